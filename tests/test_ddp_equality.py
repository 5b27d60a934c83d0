"""DDP equals the single-device run, over a cover of plans x models; the whole product is benchmarks/truth/full_matrix.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plan_models import CASES, DropoutMLP, mean_loss, regression, weighted_loss
from plan_tables import DDP, name, pairwise

import axonml_jax as ax
from axonml_jax.testing.equality import assert_equals_single_device

# A model for each trap; benchmarks/truth/full_matrix.py has them all.
MODELS = ["dropout", "masked_batch_norm", "tied", "recurrent", "scanned", "linen_masked"]
TABLE = pairwise(DDP | {"case": MODELS})
PLANS = [row for row in TABLE if CASES[row["case"]].typed or not row["check_vma"]]


def check(row, tx=None, steps=5):
    """Hold one row of a table of plans to the oracle."""
    case = CASES[row["case"]]
    options = ("sync_strategy", "bucket_size_mb", "gradient_as_bucket_view")
    plan = ax.Plan(
        data=ax.Replicate(**{key: row[key] for key in options}),
        accumulate=row["accumulate"],
        check_vma=row["check_vma"],
    )
    mesh = ax.make_mesh(data=row["ranks"], devices=jax.devices()[: row["ranks"]])
    batches = [case.batch(4 * row["ranks"] * row["accumulate"], seed) for seed in range(steps)]
    assert_equals_single_device(
        case.model(),
        case.loss,
        batches,
        plan,
        mesh=mesh,
        params=case.params(),
        tx=tx or optax.adamw(1e-2),
        max_grad_norm=row["max_grad_norm"],
    )


@pytest.mark.parametrize("row", PLANS, ids=name)
def test_a_plan_equals_one_device(row):
    check(row)


BASE = dict(sync_strategy="overlapped", bucket_size_mb=0.0002, gradient_as_bucket_view=True, accumulate=1, ranks=2)
BASE |= dict(check_vma=False, max_grad_norm=None)

OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "lion": optax.lion(1e-2),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-1),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": optax.contrib.muon(1e-2),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "masked": optax.masked(optax.adam(1e-2), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "ema": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "noise": optax.noisy_sgd(1e-2, key=jax.random.key(0)),
    "plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, accumulation_size=1)),
    "polyak": optax.polyak_sgd(max_learning_rate=0.1),
    "schedule": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optax_transformation_equals_one_device(optimizer):
    check(BASE | {"case": "weighted"}, tx=OPTIMIZERS[optimizer], steps=3)


@pytest.mark.parametrize("policy", ["float32", "bf16"])
@pytest.mark.parametrize("linen", [False, True])
def test_precision_policies_equal_one_device_with_the_same_policy(policy, linen):
    case = CASES["linen_dropout" if linen else "weighted"]
    plan = ax.Plan(precision=policy, accumulate=2)
    batch = jax.tree.map(lambda x: x.astype(np.float32), regression(32))
    assert_equals_single_device(case.model(), case.loss, batch, plan, params=case.params())


@pytest.mark.parametrize(
    "data",
    [
        ax.Replicate(comm_dtype="bfloat16"),
        ax.Replicate(comm_dtype="float16", sync_strategy="synchronous"),
        ax.Replicate(
            comm_hook=lambda flat, axes: ax.all_reduce_sum(flat.astype(jnp.bfloat16), axes).astype(flat.dtype)
        ),
    ],
    ids=["bf16", "fp16", "hook"],
)
def test_reduced_precision_communication_stays_close(data):
    plan = ax.Plan(data=data)
    if data.comm_hook is not None:
        with pytest.raises(AssertionError, match="max"):  # lossy, and held to float64 because only the hook knows
            assert_equals_single_device(DropoutMLP(nnx.Rngs(0)), mean_loss, regression(16), plan, steps=1)
        exact = ax.Plan(data=ax.Replicate(comm_hook=ax.all_reduce_sum))
        assert_equals_single_device(DropoutMLP(nnx.Rngs(0)), mean_loss, regression(16), exact, steps=2)
    else:
        assert_equals_single_device(DropoutMLP(nnx.Rngs(0)), mean_loss, regression(16), plan)


def test_frozen_parameters_get_no_gradient_and_no_optimizer_state():
    model = ax.DDP(DropoutMLP(nnx.Rngs(0)), trainable="^last/")
    before = model.state_dict()
    trainer = model.trainer(optax.adam(0.1), mean_loss)
    assert len(jax.tree.leaves(trainer.state.opt_state)) == 2 * 2 + 1  # two moments of kernel and bias, and a count
    trainer.step(regression(16))
    changed = {k for k, v in model.state_dict().items() if not np.array_equal(v, before[k])}
    assert changed == {"last/kernel", "last/bias"}
    assert_equals_single_device(DropoutMLP(nnx.Rngs(0)), weighted_loss, regression(16), trainable="^last/")


def test_typed_mode_names_a_scan_that_starts_from_plain_zeros():
    case = CASES["recurrent"]
    trainer = ax.DDP(case.model(), check_vma=True).trainer(optax.sgd(0.1), case.loss)
    with pytest.raises(
        ValueError, match=r"check_vma=True: the loop at .*plan_models.py:\d+ \(in __call__\).*check_vma=False"
    ):
        trainer.step(case.batch(16))


@pytest.mark.parametrize("data", [ax.DiLoCo(every=2), ax.Replicate(sync_strategy="no_sync")], ids=["diloco", "no_sync"])
def test_typed_mode_names_a_conditional_of_which_one_branch_differs_from_rank_to_rank(data):
    """Replicas of their own have losses of their own, and what `optax.contrib.reduce_on_plateau` makes of them."""
    case, plan = CASES["weighted"], ax.Plan(data=data, check_vma=True)
    trainer = ax.parallelize(case.model(), ax.make_mesh(data=8), plan).trainer(OPTIMIZERS["plateau"], case.loss)
    with pytest.raises(ValueError, match=r"check_vma=True: .* conditional at .*_plateau.py:\d+ .*check_vma=False"):
        trainer.step(case.batch(16))
