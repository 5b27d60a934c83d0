"""Constants written into a program train as on one device: in carries, operands, results and branches, under every plan."""

import jax
import literal_models
import optax
import pytest
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.testing.equality import assert_equals_single_device

CUT = {"num_microbatches": 2, "split": ("last",)}
PLANS = {
    "ddp": ({"data": 2}, {}),
    "ddp, recomputed": ({"data": 2}, {"remat": "full"}),
    "shard_grad_op": ({"fsdp": 2}, {"fsdp": ax.Shard(stage=2), "accumulate": 2}),
    "full_shard": ({"fsdp": 2}, {"fsdp": ax.Shard(stage=3)}),
    "full_shard, ahead": ({"fsdp": 2}, {"fsdp": ax.Shard(stage=3, prefetch=1), "remat": "selective", "accumulate": 2}),
    "hybrid": ({"data": 2, "fsdp": 2}, {"fsdp": ax.Shard(stage=3), "remat": "full"}),
    "pipeline": ({"pipe": 2}, {"pipe": ax.Pipelined(**CUT)}),
    "pipeline, gpipe": ({"pipe": 2, "fsdp": 2}, {"pipe": ax.Pipelined(schedule="gpipe", **CUT), "remat": "full"}),
}


TYPED = ["ddp, recomputed"]
if not jax.__version__.startswith("0.10"):  # whose typed mode refuses a constant in a unit's loop
    TYPED += ["full_shard, ahead"]

# A loop whose results are constants is work: they are sent, and then typed as differing along the pipeline, and others are not.
TYPED += ["pipeline"]


@pytest.mark.parametrize(("plan", "typed"), [*((plan, False) for plan in PLANS), *((plan, True) for plan in TYPED)])
@pytest.mark.slow
def test_constants_in_a_program_train_as_on_one_device(plan, typed):
    degrees, options = PLANS[plan]
    programs, batch = literal_models.programs(typed), literal_models.batch(8)
    linen = list(PLANS).index(plan) % 2 != typed
    model = (literal_models.LinenNet if linen else literal_models.Net)(programs)
    assert_equals_single_device(
        model,
        literal_models.loss,
        batch,
        ax.Plan(check_vma=typed, **options),
        mesh=mesh_of(**degrees),
        params=model.init(jax.random.key(0), batch["x"]) if linen else None,
        tx=optax.adamw(1e-2),
        steps=2,
    )
