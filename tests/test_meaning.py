"""A loss means the whole batch under a plan: losses as people write them against one device, and the rules that make it so."""

import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.compat.jaxpr import trace
from axonml_jax.meaning.following import Following
from axonml_jax.meaning.places import SUM, Group, Split, local_shape, reshaped
from axonml_jax.program.program import read_program
from axonml_jax.training.compile import Objective

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from meaning import PLANS, cell, plain
from meaning_losses import CASES, Net, batch_of, nll

# Of all losses those in which the tests below were seen to fail when one rule was broken; the rest is slow.
QUICK = (
    *("masked mean", "variance penalty", "relu at 0", "max with ties (straight-through rounding)", "SigLIP"),
    *(
        "z-loss + weight decay",
        "gradient penalty (grad in the loss)",
        "metrics: count, histogram, max, confusion, mean",
    ),
)
EXACT = [name for name in PLANS if "accumulate" not in name]


def rows():
    for i, loss in enumerate(CASES):
        options = {"plan": EXACT[i % len(EXACT)], "linen": bool(i // 2 % 2), "check_vma": bool(i % 2)}
        yield pytest.param(loss, options, id=loss, marks=[] if loss in QUICK else [pytest.mark.slow])


@pytest.mark.parametrize(("loss", "options"), list(rows()))
def test_a_loss_and_its_metrics_under_a_plan_are_those_of_one_device(loss, options):
    plan = options.pop("plan")
    found = cell(CASES[loss], plain(CASES[loss], 16), 16, plan, **options)
    assert not isinstance(found, str) and found < 1e-9, (loss, plan, options, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", ["masked mean", "CLIP (both directions)", "metrics: count, histogram, max, confusion, mean"]
)
def test_one_row_a_rank_is_enough(loss):
    assert cell(CASES[loss], plain(CASES[loss], 8), 8, "hybrid", linen=False, check_vma=True) < 1e-9


# Microbatches


def with_metrics(net, b):
    """Sums of the batch alone, one number that the loss is a function of, and metrics of completed sums."""
    out = net(b["x"])
    right, wanted = out.argmax(-1) == 1, b["y"] == 1
    each = nll(out, b["y"]) * b["mask"] * (b["adv"] - b["adv"].mean()) / b["adv"].std()
    return jnp.sqrt(1 + each.sum() / b["mask"].sum()), {
        "f1": 2 * (right & wanted).sum() / jnp.maximum(right.sum() + wanted.sum(), 1),
        "count": (b["mask"] > 0).sum(),
        "rows": out,
    }


@pytest.mark.parametrize("plan", ["ddp, accumulate", pytest.param("fsdp, accumulate", marks=pytest.mark.slow)])
def test_microbatches_add_up_to_the_loss_and_metrics_of_the_whole_batch(plan):
    assert cell(with_metrics, plain(with_metrics, 32), 32, plan, linen=False, check_vma=plan.startswith("fsdp")) < 1e-9


def test_evaluation_in_microbatches_means_the_whole_batch():
    model = ax.parallelize(Net(nnx.Rngs(0)), mesh_of(data=4), ax.Plan(accumulate=2))
    found, (wanted, _) = model.trainer(optax.sgd(0.1), with_metrics).evaluate(batch_of(16)), plain(with_metrics, 16)
    for name, value in wanted[0].items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_a_loss_whose_rows_meet_those_of_other_microbatches_is_refused_with_the_operation_and_its_line():
    model = ax.parallelize(Net(nnx.Rngs(0)), mesh_of(data=4), ax.Plan(accumulate=2))
    where = r"dot_general \(line \d+ of test_meaning.py, contrastive\)"
    with pytest.raises(ValueError, match=f"other microbatches: {where}.*accumulate=1"):
        model.value_and_grad(contrastive)(batch_of(16))


# Places

GROUPS = (Group(("data",), 8), Group(("context",), 4))
ROWS, POSITIONS = (Split(0), None), (None, Split(1))


def followed(fun, *given):
    """The places of what a function of arrays of these shapes returns, without running anything."""
    shapes = [jax.ShapeDtypeStruct(shape, float) for shape, _ in given]
    return Following(GROUPS).program(read_program(trace(fun, *shapes).jaxpr), [places for _, places in given])


X = ((32, 16, 6), (Split(0), Split(1)))

FOLLOWED = {
    "a sum over both": (lambda x: x.sum(), [X], [(SUM, SUM)]),
    "a sum over positions": (lambda x: x.sum(1), [X], [(Split(0), SUM)]),
    "positions and rows merged": (lambda x: x.reshape(-1, 6), [X], [(Split(0), Split(0, 32))]),
    "and taken apart": (lambda x: x.reshape(-1, 6).reshape(32, 16, 6), [X], [X[1]]),
    "and first swapped": (lambda x: x.swapaxes(0, 1).reshape(-1, 6), [X], [(Split(0, 16), Split(0))]),
    "a product over features": (lambda x: x @ jnp.ones((6, 3)), [X], [X[1]]),
    "rows by rows": (lambda a, b: a @ b.T, [((32, 6), ROWS), ((32, 6), ROWS)], [(Split(0), None)]),
    "a sum times a number": (lambda x: 2 * x.sum() / 3, [X], [(SUM, SUM)]),
    "a sum and a number": (lambda x: x.sum() + 1, [X], [(SUM, SUM)]),
    "the root of a sum": (lambda x: jnp.sqrt(x.sum()), [X], [(None, None)]),
    "a maximum": (lambda x: x.max(), [X], [(None, None)]),
    "a maximum of features": (lambda x: x.max(2), [X], [X[1]]),
    "sorted rows": (lambda x: jnp.sort(x, 0), [X], [(None, Split(1))]),
    "a mean taken off": (lambda x: x - x.mean((0, 1)), [X], [X[1]]),
    "a sum in a loop": (
        lambda x: jax.lax.scan(lambda c, y: (c + y.sum(), None), 0.0, x.swapaxes(0, 2))[0], [X], [(SUM, SUM)]
    ),
    "a loop's carry that becomes rows": (
        lambda x: jax.lax.scan(lambda c, y: (c + y, None), jnp.zeros((16, 32)), x.T)[0], [X], [(Split(1), Split(0))]
    ),
    "branches that agree": (
        lambda x: jax.lax.cond(x.sum() > 0, lambda x: x.sum(), lambda x: (2 * x).sum(), x), [X], [(SUM, SUM)]
    ),
    "branches of which one is whole": (
        lambda x: jax.lax.cond(x.sum() > 0, lambda x: x, jnp.zeros_like, x), [X], [X[1]]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_places_follow_through_programs_without_running_them(name):
    fun, given, wanted = FOLLOWED[name]
    assert followed(fun, *given) == wanted


@pytest.mark.parametrize("seed", range(30))
def test_a_part_of_a_reshaped_array_is_the_reshaped_part(seed):
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.choice([1, 2, 3, 4, 8], 4)]
    cuts = lambda: sorted({0, 4, *rng.choice(range(1, 4), rng.integers(0, 3)).tolist()})
    merged = lambda cut: tuple(int(np.prod(sizes[a:b])) for a, b in itertools.pairwise(cut))
    old, new, ranks = merged(cuts()), merged(cuts()), 2
    x, place = np.arange(np.prod(sizes)).reshape(old), Split(int(rng.integers(len(old))))
    if old[place.dim] % ranks:
        return
    to, group = reshaped(place, old, new, ranks), (Group(("data",), ranks),)

    def part(x, place, rank):
        seen = x.reshape(*x.shape[: place.dim], place.outer, ranks, -1, *x.shape[place.dim + 1 :])
        return np.take(seen, rank, place.dim + 1).reshape(local_shape(x.shape, (place,), group))

    for rank in range(ranks) if to is not None else ():
        np.testing.assert_array_equal(
            part(x.reshape(new), to, rank), part(x, place, rank).reshape(local_shape(new, (to,), group))
        )


# Which program runs


def step_text(loss, monkeypatch, *, by_rows):
    if by_rows:
        monkeypatch.setattr(Objective, "_called", Objective._on_rows)
    model = ax.parallelize(Net(nnx.Rngs(0)), mesh_of(data=4), ax.Plan())
    trainer = model.trainer(optax.sgd(0.1), loss)
    return str(trainer.train_step.trace(trainer.state, batch_of(16)).jaxpr)


PLAIN = {
    "mean": lambda net, b: nll(net(b["x"]), b["y"]).mean(),
    "mean and metrics": lambda net, b: (
        (net(b["x"]) ** 2).mean(),
        {"accuracy": (net(b["x"]).argmax(-1) == b["y"]).mean()},
    ),
    "weighted": lambda net, b: ax.WeightedMean((nll(net(b["x"]), b["y"]) * b["mask"]).sum(), b["mask"].sum()),
    "sum over the rows": lambda net, b: nll(net(b["x"]), b["y"]).sum() / b["x"].shape[0],
    "decay beside a mean": lambda net, b: (net(b["x"]) ** 2).mean() + 0.1 * (net.w1[...] ** 2).sum(),
    "its own collectives": lambda net, b: jax.lax.pmean((net(b["x"]) ** 2).sum(), "data"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_loss_that_is_a_plain_mean_or_talks_itself_keeps_the_program_of_rows(name, monkeypatch):
    meant = step_text(PLAIN[name], monkeypatch, by_rows=False)
    assert meant == step_text(PLAIN[name], monkeypatch, by_rows=True)


NOT_PLAIN = {
    "a sum": lambda net, b: nll(net(b["x"]), b["y"]).sum(),
    "a sum by a constant": lambda net, b: nll(net(b["x"]), b["y"]).sum() / 16.0,
    "decay beside a sum": lambda net, b: (net(b["x"]) ** 2).sum() + 0.1 * (net.w1[...] ** 2).sum(),
    "a count among the metrics": lambda net, b: ((net(b["x"]) ** 2).mean(), {"n": (b["mask"] > 0).sum()}),
    "the row's number": lambda net, b: (net(b["x"])[:, 0] * jnp.arange(b["x"].shape[0])).mean(),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_a_loss_that_is_no_plain_mean_is_not_taken_for_one(name, monkeypatch):
    meant = step_text(NOT_PLAIN[name], monkeypatch, by_rows=False)
    assert meant != step_text(NOT_PLAIN[name], monkeypatch, by_rows=True)


# Refusals


def contrastive(net, b):
    z = net(b["x"])
    return nll(z @ z.T, jnp.arange(z.shape[0])).mean()


def test_a_loss_that_mixes_more_rows_than_allowed_is_refused_with_the_operation_and_its_line():
    model = ax.parallelize(Net(nnx.Rngs(0)), mesh_of(data=4), ax.Plan())
    with pytest.raises(
        ValueError, match=r"dot_general \(line \d+ of test_meaning.py, contrastive\): 384 bytes[^$]*mixing_rows"
    ):
        model.value_and_grad(ax.mixing_rows(contrastive, most_bytes=100))(batch_of(16))
    loss, _ = model.value_and_grad(ax.mixing_rows(contrastive))(batch_of(16))
    np.testing.assert_allclose(loss, contrastive(Net(nnx.Rngs(0)), batch_of(16)), rtol=1e-12)


def test_a_number_of_bytes_that_is_none_is_refused():
    with pytest.raises(ValueError, match="most_bytes='1 GB'"):
        ax.mixing_rows(contrastive, most_bytes="1 GB")
