"""Split parameters of swapped layers are whole to whoever reads them; what enters between paired layers has its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.testing.equality import assert_equals_single_device

F64 = {"param_dtype": jnp.float64}
IDS = np.arange(8).reshape(2, 4) % 12


class Tied(nnx.Module):
    """A table, a norm and two linear layers; what is done with the result is given."""

    def __init__(self, read):
        rngs, self.read = nnx.Rngs(0), read
        self.embed, self.norm = nnx.Embed(12, 8, rngs=rngs, **F64), nnx.LayerNorm(8, rngs=rngs, **F64)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs, **F64), nnx.Linear(16, 8, rngs=rngs, **F64)

    @property
    def table(self):
        return self.embed.embedding

    def __call__(self, ids):
        x = self.embed(ids)
        return self.read(self, x + self.down(nnx.gelu(self.up(self.norm(x)))))


class Stacked(nnx.Module):
    """Layers with a first dim of blocks, scanned over."""

    def __init__(self):
        make = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs, **F64), in_axes=0, out_axes=0)
        self.blocks = make(nnx.Rngs(0).split(2))

    def __call__(self, x):
        run = nnx.scan(lambda x, block: x + jnp.tanh(block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, self.blocks)


def transposed(model, x):
    return x @ model.embed.embedding.T


def normalized(model, x):
    """`nnx.SpectralNorm` reads and writes the parameters of its layer through `nnx.state`: those of a copy."""
    return nnx.SpectralNorm(nnx.clone(model.up), rngs=nnx.Rngs(0))(x, update_stats=False)


def of_its_class(model, x):
    weights = nnx.state(model, nnx.Param)["up"]["kernel"][...].astype(jnp.float32).astype(jnp.float64)
    return jnp.einsum("bsh,ho->bso", x, weights)


def recomputed(model, x):
    return nnx.remat(lambda model, x: x @ model.table[...].T + model.down(model.up(x)).sum())(model, x)


def looped(model, x):
    step = lambda x, _: (model.down(nnx.gelu(model.up(x))) + model.up.kernel.sum(), x.sum())
    return jax.lax.scan(step, x, None, length=2)


def by_shape(model, x):
    return model.up(x).reshape(*x.shape[:2], -1, model.up.kernel.shape[1] // 8) / model.up.kernel.size


def taken(model, x):
    return model.norm(x + jnp.take(model.table[...], jnp.arange(4), axis=0))


def mean_square(model, batch):
    leaves = jax.tree.leaves(model(batch))
    return sum(jnp.mean(jnp.square(leaf)) for leaf in leaves)


def with_decay(model, batch):
    squares = sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return mean_square(model, batch) + 0.1 * jnp.sqrt(squares) + jnp.mean(model.down.kernel[...] ** 4)


# What reads parameters, the loss, and whether JAX checks types.
READS = [
    *((read, mean_square, False) for read in (transposed, normalized, of_its_class, by_shape, taken, looped)),
    (recomputed, with_decay, False),
    (transposed, with_decay, True),
    (looped, with_decay, True),
]


def same_gradients(model, mesh, loss_fn, batch, **options):
    loss, grads = ax.parallelize(model, mesh, ax.Plan(**options)).value_and_grad(loss_fn)(batch)
    wanted, own = nnx.jit(nnx.value_and_grad(loss_fn))(model, batch)
    np.testing.assert_allclose(loss, wanted, rtol=1e-9)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-8), grads, nnx.to_pure_dict(own))


@pytest.mark.parametrize(("read", "loss_fn", "check_vma"), READS, ids=lambda value: getattr(value, "__name__", value))
def test_parameters_read_outside_their_layer_are_whole_without_an_example(read, loss_fn, check_vma):
    model, mesh = Tied(read), mesh_of(data=1, tensor=2)
    assert set(ax.auto_parallelize(model, mesh).swapped) == {"embed", "up", "down"}
    same_gradients(model, mesh, loss_fn, IDS, check_vma=check_vma)


@pytest.mark.parametrize("degrees", [{"data": 2, "tensor": 2}, {"data": 1, "row": 2, "col": 1, "depth": 2}])
@pytest.mark.slow
def test_a_tied_model_with_decay_in_its_loss_trains_evaluates_and_is_called_as_on_one_device(degrees):
    model, mesh, rows = Tied(transposed), mesh_of(**degrees), np.concatenate([IDS, IDS[::-1]])
    wanted, evaluated = model(rows), with_decay(model, rows)
    ax.auto_parallelize(model, mesh)
    np.testing.assert_allclose(ax.parallelize(model, mesh)(rows), wanted, atol=1e-9)
    trainer = ax.parallelize(model, mesh).trainer(optax.adamw(1e-2), with_decay)
    np.testing.assert_allclose(trainer.evaluate(rows)["loss"], evaluated, rtol=1e-9)
    assert_equals_single_device(model, with_decay, rows, mesh=mesh, tx=optax.adamw(1e-2), steps=3)


def test_only_what_is_read_is_gathered():
    """Each swapped layer alone: one sum or gather of activations; a read adds one gather of the parameter."""
    sent = {}
    for read in (transposed, lambda model, x: x):
        model, mesh = Tied(read), mesh_of(data=1, tensor=2)
        ax.auto_parallelize(model, mesh)
        trainer = ax.parallelize(model, mesh).trainer(optax.sgd(0.1), mean_square)
        sent[read is transposed] = str(trainer.trace(IDS).jaxpr)
    count = lambda text: text.count("all_gather_dimension=")
    assert count(sent[True]) == count(sent[False]) + 1


@pytest.mark.parametrize("made", ["before", "within"])
def test_layers_stacked_for_a_scan_are_split_along_their_own_dims(made):
    mesh, x = mesh_of(data=1, tensor=2), np.random.default_rng(0).normal(size=(2, 3, 8))
    if made == "within":
        with ax.auto_parallelize(mesh):
            model = Stacked()
    else:
        ax.auto_parallelize(model := Stacked(), mesh)
    assert ax.tensor_specs(model, {"tensor": 2})["blocks"]["kernel"] == jax.sharding.PartitionSpec(None, None, "tensor")
    same_gradients(model, mesh, mean_square, x)


class Between(nnx.Module):
    """Two paired layers; a whole value enters between them."""

    def __init__(self, entering):
        rngs, self.entering = nnx.Rngs(0), entering
        self.first, self.norm = nnx.Linear(4, 4, rngs=rngs, **F64), nnx.LayerNorm(4, rngs=rngs, **F64)
        self.up, self.down = nnx.Linear(4, 8, rngs=rngs, **F64), nnx.Linear(8, 4, rngs=rngs, **F64)
        self.scale = nnx.Param(jnp.full((), 2.0))

    def __call__(self, x):
        return self.entering(self, self.norm(self.first(x)))


ENTERING = {
    "a part of the input": lambda m, x: m.down(nnx.gelu(m.up(x)) * x[..., :1]),
    "a parameter": lambda m, x: m.down(nnx.relu(m.up(x)) * m.scale),
    "both, twice, recomputed": lambda m, x: m.down(
        nnx.remat(lambda m, x: m.scale * (nnx.gelu(m.up(x)) * m.scale + x[..., 1:2]))(m, x)
    ),
}


@pytest.mark.parametrize("name", ENTERING)
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.slow
def test_a_whole_value_between_paired_layers_has_its_whole_gradient(name, check_vma):
    model, mesh = Between(ENTERING[name]), mesh_of(data=1, tensor=2)
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    assert ax.auto_parallelize(model, mesh, example=x).swapped["down"] == "RowParallelLinear"
    same_gradients(model, mesh, mean_square, x, check_vma=check_vma)


def test_what_stays_split_is_no_result_of_a_call_that_the_example_was_not():
    inner = lambda m, x: m.down(m.up(x)) if m.scale.ndim == 0 and not hasattr(m, "early") else m.up(x)
    model, mesh, x = Between(inner), mesh_of(data=1, tensor=2), np.ones((2, 3, 4))
    ax.auto_parallelize(model, mesh, example=x)
    model.early = True
    with pytest.raises(ValueError, match="give the arguments of this call as the example"):
        ax.parallelize(model, mesh).value_and_grad(mean_square)(x)


class Headed(nnx.Module):
    """A head that the loss reads itself."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.head = nnx.Embed(12, 8, rngs=rngs, **F64), nnx.Linear(8, 12, use_bias=False, rngs=rngs, **F64)

    def __call__(self, ids):
        return self.embed(ids)


def chunked(model, ids):
    losses = ax.chunked_cross_entropy(
        jnp.tanh(model(ids)), model.head.kernel[...], (ids + 1) % 12, words_dim=1, chunk=2
    )
    return losses.mean() + jnp.mean(jnp.square(model.head(model(ids))))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.slow
def test_a_chunked_cross_entropy_takes_this_ranks_words_of_a_swapped_head(check_vma):
    model, mesh = Headed(), mesh_of(data=1, tensor=2)
    ax.auto_parallelize(model, mesh)
    same_gradients(model, mesh, chunked, IDS, check_vma=check_vma)
