"""FSDP equals the single-device run, over strategies x models; benchmarks/truth/full_matrix.py has the whole product."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from fsdp_plans import FSDP, check, possible
from meshes import mesh_of
from plan_models import CASES, F64, DropoutMLP, mean_loss, regression, tokens
from plan_tables import name, pairwise
from test_ddp_equality import OPTIMIZERS

import axonml_jax as ax
from axonml_jax.testing.equality import assert_equals_single_device

# A model for each trap; benchmarks/truth/full_matrix.py has them all.
MODELS = ["dropout", "tied", "recurrent", "scanned", "linen_batch_norm"]
PLANS = [row for row in pairwise(FSDP | {"case": MODELS}) if possible(row)]


@pytest.mark.parametrize("row", PLANS, ids=name)
def test_a_plan_equals_one_device(row):
    check(row)


class OddNet(nnx.Module):
    """Leaves that divide by nothing: primes, scalars, a single element, a dim that is smaller than the world."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.wide = nnx.Linear(5, 13, param_dtype=F64, rngs=rngs)
        self.deep = nnx.Param(jax.random.normal(rngs.params(), (2, 3, 13), F64))
        self.one, self.scalar = nnx.Param(np.ones(1)), nnx.Param(np.float64(0.7) * np.ones(()))
        self.last = nnx.Linear(6, 3, param_dtype=F64, rngs=rngs)

    def __call__(self, x):
        x = jax.numpy.einsum("bd,ijd->bij", jax.numpy.tanh(self.wide(x)), self.deep[...]) * self.one[...]
        return self.last(x.reshape(len(x), 6)) * self.scalar[...]


@pytest.mark.parametrize(("ranks", "stage"), [(3, 3), (5, 1), (7, 3), (8, 2)])
def test_leaves_of_any_shape_on_any_number_of_ranks(ranks, stage):
    plan = ax.Plan(fsdp=ax.Shard(stage=stage), check_vma=stage == 3)
    model, batch = OddNet(), regression(2 * ranks)
    assert_equals_single_device(model, mean_loss, batch, plan, mesh=mesh_of(fsdp=ranks), max_grad_norm=0.1, steps=2)
    sharded = ax.parallelize(model, mesh_of(fsdp=ranks), plan)
    assert jax.tree.map(np.shape, sharded.parameters()) == jax.tree.map(np.shape, nnx.to_pure_dict(nnx.state(model)))
    assert all(len(leaf.sharding.device_set) == ranks for leaf in jax.tree.leaves(sharded.variables.params))
    held = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(sharded.variables.params))
    whole = sum(leaf.size for leaf in jax.tree.leaves(sharded.parameters()))
    assert held < 2 * whole / ranks + 5


GATHERED = {"noise"}  # the others act on elements, on sums over all of them, or on whole arrays of one parameter


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_equals_one_device_on_shards_or_is_refused_and_equals_it_on_gathered_leaves(optimizer):
    tx, batch = OPTIMIZERS[optimizer], regression(12)
    run = lambda update: assert_equals_single_device(
        DropoutMLP(nnx.Rngs(0)), mean_loss, batch, ax.Plan(update=update), mesh=mesh_of(fsdp=3), tx=tx, steps=2
    )
    if optimizer not in GATHERED:
        run("shards")
        return
    with pytest.raises(ValueError, match=r"does not act element by element .* update=\"whole\""):
        ax.FSDP(DropoutMLP(nnx.Rngs(0)), mesh_of(fsdp=3)).trainer(tx, mean_loss)
    run("whole")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("policy", ["bf16", "bf16-reduce", "bf16-reduce-float32", "float32"])
def test_precision_policies_equal_one_device_with_the_same_policy(policy, stage):
    case = CASES["linen_dropout" if stage == 2 else "tied"]
    batch = jax.tree.map(lambda x: np.float32(x) if x.dtype == np.float64 else x, case.batch(16))
    plan = ax.Plan(fsdp=ax.Shard(stage=stage), precision=policy, accumulate=2)
    assert_equals_single_device(
        case.model(), case.loss, batch, plan, mesh=mesh_of(fsdp=4), params=case.params(), steps=2
    )


def test_frozen_parameters_are_sharded_too_and_get_no_gradient():
    plan = ax.Plan(fsdp=ax.Shard(stage=3))
    case, mesh = CASES["tied"], mesh_of(fsdp=4)
    assert_equals_single_device(case.model(), case.loss, tokens(16), plan, mesh=mesh, trainable="blocks", steps=2)
    model = ax.parallelize(case.model(), mesh, plan, trainable="blocks")
    assert all(leaf.addressable_shards[0].data.size < leaf.size for leaf in jax.tree.leaves(model.variables.frozen))


def test_a_model_called_twice_and_a_loss_that_reads_every_weight():
    def loss(model, batch):
        squares = sum(jax.numpy.sum(leaf**2) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
        return jax.numpy.mean((model(batch["x"]) - model(2 * batch["x"])) ** 2) + 1e-3 * squares

    assert_equals_single_device(
        OddNet(), loss, regression(8), ax.Plan(), mesh=mesh_of(fsdp=4), tx=optax.sgd(0.1), steps=2
    )
