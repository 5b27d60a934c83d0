"""Models of parallel layers train under plans as on one device: tensor and 3-D axes with data, fsdp, accumulation, clipping."""

import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from meshes import mesh_of
from plan_models import F64, regression, tokens

import axonml_jax as ax
from axonml_jax.base import named_leaves
from axonml_jax.testing.equality import assert_equals_single_device, assert_trees_close


class Language(nnx.Module):
    """A block of attention and MLP between a tied vocabulary, all split over `tensor`."""

    def __init__(self, sequence_parallel=False):
        options = {"param_dtype": F64, "rngs": nnx.Rngs(0)}
        self.embed = ax.VocabParallelEmbedding(12, 8, **options)
        own = {"sequence_parallel": sequence_parallel}
        self.norms = nnx.List([ax.ParallelLayerNorm(8, **own, **options) for _ in range(2)])
        self.attention = ax.TensorParallelAttention(8, 4, num_kv_heads=2, **own, **options)
        self.mlp = ax.ParallelMLP(8, 16, **own, **options)
        self.sequence_parallel = sequence_parallel

    def __call__(self, ids):
        x = self.embed(ids)
        x = ax.split_sequence(x) if self.sequence_parallel else x
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        x = ax.join_sequence(x) if self.sequence_parallel else x
        return self.embed.attend(x)


def vocabulary_loss(model, batch):
    losses = ax.vocab_parallel_cross_entropy(model(batch["x"]), batch["y"])
    kept = batch["keep"].astype(losses.dtype)
    return ax.WeightedMean(jnp.sum(losses * kept), jnp.sum(kept))


def mean_loss(model, batch):
    return jnp.mean(ax.vocab_parallel_cross_entropy(model(batch["x"]), batch["y"]))


class Cube(nnx.Module):
    """AxoNN's layers, alternately transposed, with a plain layer between."""

    def __init__(self):
        options = {"param_dtype": F64, "rngs": nnx.Rngs(0)}
        self.up, self.down = ax.ParallelLinear(4, 8, **options), ax.ParallelLinear(8, 4, transpose=True, **options)
        self.last = nnx.Linear(4, 3, **options)

    def __call__(self, x):
        return self.last(jnp.tanh(self.down(jnp.tanh(self.up(x[..., :4])))))


def squares(model, batch):
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


MESHES = {
    "tensor": {"tensor": 4},
    "data_tensor": {"data": 2, "tensor": 2},
    "fsdp_tensor": {"fsdp": 2, "tensor": 4},
    "data_fsdp_tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "wide_fsdp_tensor": {"fsdp": 4, "tensor": 2},
}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(
    ("mesh", "stage", "sequence_parallel"),
    [
        ("tensor", 3, True),
        ("data_tensor", 3, False),
        ("fsdp_tensor", 2, False),  # sums of microbatches, reduced over fsdp, wait for tensor
        ("fsdp_tensor", 3, True),
        ("wide_fsdp_tensor", 3, False),  # biases too small for fsdp are whole on every rank
        ("data_fsdp_tensor", 1, False),
    ],
)
def test_a_language_model_split_over_tensor_equals_one_device(mesh, stage, sequence_parallel, check_vma):
    plan = ax.Plan(fsdp=ax.Shard(stage=stage), accumulate=2, check_vma=check_vma)
    degrees = MESHES[mesh]
    rows = 4 * degrees.get("data", 1) * degrees.get("fsdp", 1)
    assert_equals_single_device(
        Language(sequence_parallel),
        vocabulary_loss,
        tokens(rows),
        plan,
        mesh=mesh_of(**degrees),
        tx=optax.adamw(1e-2),
        steps=2,
        max_grad_norm=0.1,
    )


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(
    "degrees",
    [{"depth": 2, "row": 2, "col": 1}, {"data": 2, "depth": 2, "row": 2}, {"fsdp": 2, "row": 2, "col": 1, "depth": 2}],
)
def test_three_dimensions_equal_one_device(degrees, check_vma):
    plan = ax.Plan(check_vma=check_vma, remat="full")
    rows = 2 * degrees.get("data", 1) * degrees.get("fsdp", 1) * degrees["depth"]
    assert_equals_single_device(
        Cube(),
        squares,
        regression(rows),
        plan,
        mesh=mesh_of(**degrees),
        tx=optax.adamw(1e-2),
        steps=2,
        max_grad_norm=0.1,
    )


@pytest.mark.slow
def test_every_rank_holds_its_part_and_outputs_are_whole():
    mesh = mesh_of(data=2, tensor=4)
    model = ax.parallelize(Language(), mesh)
    held = {name: leaf.addressable_shards[0].data.shape for name, leaf in named_leaves(model.variables.params).items()}
    assert held["embed/embedding"] == (3, 8) and held["mlp/up/kernel"] == (8, 4)
    trained = model.trainer(optax.adamw(1e-2), vocabulary_loss)
    _, synced = model.value_and_grad(mean_loss)(tokens(8))
    with model.no_sync():
        _, own = model.value_and_grad(mean_loss)(tokens(8))
    assert own["embed"]["embedding"].shape == (2, 12, 8) and own["mlp"]["up"]["kernel"].sharding.spec[2] == "tensor"
    assert_trees_close(model.sync_gradients(own), synced, "gradients")
    assert jnp.isfinite(trained.step(tokens(8))["loss"])


@pytest.mark.slow
def test_ranks_that_do_not_synchronize_train_models_of_their_own_split_over_tensor():
    plan = ax.Plan(data=ax.Replicate(sync_strategy="no_sync"))
    mesh = mesh_of(data=2, tensor=2)
    assert_equals_single_device(
        Language(), mean_loss, tokens(8), plan, mesh=mesh, tx=optax.adamw(1e-2), steps=2, max_grad_norm=0.1
    )


@pytest.mark.parametrize("check_vma", [False, True])
def test_ranks_along_depth_share_one_of_several_models(check_vma):
    plan = ax.Plan(data=ax.Replicate(sync_strategy="no_sync"), check_vma=check_vma)
    mesh = mesh_of(data=2, row=2, depth=2)
    assert_equals_single_device(
        Cube(), squares, regression(8), plan, mesh=mesh, tx=optax.adamw(1e-2), steps=2, max_grad_norm=0.1
    )
    model = ax.parallelize(Cube(), mesh, plan)
    assert model.parameters()["up"]["kernel"].shape == (2, 4, 8)  # one for each model, not one for each batch shard


def test_own_gradients_of_what_ranks_along_depth_share_are_refused_by_name():
    model = ax.parallelize(Cube(), mesh_of(data=1, row=2, depth=2))
    with (
        pytest.raises(
            ValueError, match=r"layers split .* as well as .* ranks share one: down/kernel, up/kernel\. Accumulate"
        ),
        model.no_sync(),
    ):
        model.value_and_grad(squares)(regression(4))


@pytest.mark.slow
def test_the_last_microbatch_is_written_again_only_where_a_reduction_waits_for_it():
    def products(accumulate, **degrees):
        plan = ax.Plan(accumulate=accumulate)
        trainer = ax.parallelize(Language(), mesh_of(**degrees), plan).trainer(optax.sgd(0.1), mean_loss)
        return trainer.train_step.lower(trainer.state, tokens(8)).as_text().count("stablehlo.dot_general")

    assert products(2, tensor=2) == products(1, tensor=2) > 0
    assert products(2, data=2, tensor=2) == 2 * products(1, data=2, tensor=2)


def test_dims_that_do_not_divide_are_refused_by_path():
    with pytest.raises(ValueError, match=r"embed/embedding"):
        ax.parallelize(Language(), mesh_of(tensor=8))
