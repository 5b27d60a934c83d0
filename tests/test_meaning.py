"""A loss means the whole batch under a plan: losses as people write them against one device, and the rules that make it so."""

import functools
import itertools
import sys
import types
import zlib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import salt
from flax import nnx
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.compat.jaxpr import trace
from axonml_jax.meaning.following import Following
from axonml_jax.meaning.places import SUM, Group, Split, local_shape, reshaped
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.program.program import read_program
from axonml_jax.testing.equality import assert_trees_close
from axonml_jax.training.objective import Objective

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "truth"))
from drawn_losses import draw_loss
from expert_models import Net as Experts
from expert_models import batch_of as expert_batch
from expert_models import grad_of
from meaning import LIMIT, PLANS, cell, plain
from meaning_losses import CASES, Layered, Net, batch_of, nll, weight

# Of all losses those in which the tests below were seen to fail when one rule was broken; the rest is slow.
QUICK = (
    *("masked mean", "variance penalty", "relu at 0", "max with ties (straight-through rounding)", "SigLIP"),
    *(
        "z-loss + weight decay",
        "gradient penalty (grad in the loss)",
        "metrics: count, histogram, max, confusion, mean",
    ),
)
EXACT = [name for name in PLANS if "accumulate" not in name and "pipeline" not in name]
MICRO = [name for name in PLANS if name not in EXACT]


def rows():
    for i, loss in enumerate(CASES):
        options = {"plan": EXACT[i % len(EXACT)], "linen": bool(i // 2 % 2), "check_vma": bool(i % 2)}
        yield pytest.param(loss, options, id=loss, marks=[] if loss in QUICK else [pytest.mark.slow])


@pytest.mark.parametrize(("loss", "options"), list(rows()))
def test_a_loss_and_its_metrics_under_a_plan_are_those_of_one_device(loss, options):
    plan = options.pop("plan")
    found = cell(CASES[loss], plain(CASES[loss], 16), 16, plan, **options)
    assert not isinstance(found, str) and found < 1e-9, (loss, plan, options, found)


COVERED = ("ddp", "ddp, synchronous", "fsdp", "zero-1", "zero-2", "hybrid", "remat", "rules")


def test_a_loss_for_each_rule_is_that_of_one_device_under_plans_that_each_commit_chooses_anew():
    for loss in QUICK:
        drawn = zlib.crc32(f"{salt()} {loss}".encode())
        plan, options = COVERED[drawn % len(COVERED)], {"linen": bool(drawn & 16), "check_vma": bool(drawn & 32)}
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
        "largest": jnp.abs(out).max() / (1 + out.min(0)),
        "finite": jnp.isfinite(out).all(),
        "some": (out > 1).any(),
        "rows": out,
    }


QUICK_PLANS = ("ddp, accumulate", "rules, accumulate", "one device, accumulate", "tensor, accumulate", "pipeline, fsdp")


def quick(names, some):
    """All names; those that are not among some are slow."""
    return [name if name in some else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("plan", quick(MICRO, QUICK_PLANS))
def test_microbatches_add_up_to_the_loss_and_metrics_of_the_whole_batch(plan):
    found = cell(with_metrics, plain(with_metrics, 32), 32, plan, linen=False, check_vma="fsdp" in plan)
    assert not isinstance(found, str) and found < 1e-9, found


def pairs(net, b):
    """Of a microbatch that gives each rank one row there are none."""
    z = net(b["x"])
    i, j = np.triu_indices(len(z), 1)
    return (jnp.abs(z[i] - z[j]).sum(-1) * (b["y"][i] == b["y"][j])).mean()


def test_a_loss_that_reads_nothing_of_one_row_is_taken_of_all():
    assert cell(pairs, plain(pairs, 16), 16, "ddp, accumulate", linen=False, check_vma=False) < 1e-9


def test_a_scatter_of_typed_rows_goes_into_zeros_in_a_pipeline():
    loss = CASES["segment means"]
    assert cell(loss, plain(loss, 16), 16, "pipeline, fsdp", linen=False, check_vma=True) < 1e-9


EVALUATED = {
    "ddp": (Net, {"data": 4}, ax.Plan(accumulate=2)),
    "pipeline": (Layered, {"data": 2, "pipe": 2}, ax.Plan(pipe=ax.Pipelined(num_microbatches=2, split=["w2"]))),
}


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_in_microbatches_means_the_whole_batch(name):
    net, degrees, plan = EVALUATED[name]
    model = ax.parallelize(net(nnx.Rngs(0)), mesh_of(degrees), plan)
    found, (wanted, _) = (
        model.trainer(optax.sgd(0.1), with_metrics).evaluate(batch_of(16)),
        plain(with_metrics, 16, net),
    )
    for name, value in wanted[0].items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_a_loss_whose_rows_meet_those_of_other_microbatches_is_refused_with_the_operation_and_its_line():
    model = ax.parallelize(Net(nnx.Rngs(0)), mesh_of(data=4), ax.Plan(accumulate=2))
    where = r"dot_general \(line \d+ of test_meaning.py, contrastive\)"
    with pytest.raises(ValueError, match=f"other microbatches: {where}.*accumulate=1"):
        model.value_and_grad(contrastive)(batch_of(16))


@jax.custom_vjp
def unit_gradient(x):
    return x


unit_gradient.defvjp(lambda x: (x, None), lambda _, ct: (ct / jnp.linalg.norm(ct),))


def normed(net, b):
    return nll(unit_gradient(net(b["x"])), b["y"]).mean()


def trimmed(net, b):
    losses = nll(net(b["x"]), b["y"])
    limit = jax.lax.while_loop(lambda t: (losses > t).sum() > 3, lambda t: t + 0.05, jnp.zeros(()))
    return jnp.where(losses > limit, losses, 0).sum()


@pytest.mark.parametrize("loss", [normed, trimmed])
def test_a_condition_and_a_gradient_of_its_own_that_need_other_microbatches_are_refused_by_name(loss):
    model = ax.parallelize(Net(nnx.Rngs(0)), mesh_of(data=4), ax.Plan(accumulate=2))
    with pytest.raises(ValueError, match=r"other microbatches: \w+ \(line \d+ of test_meaning.py"):
        model.value_and_grad(loss)(batch_of(16))


def mapped(net, b):
    """Rows by themselves, one after the other through the model: a plain mean."""
    return nll(jax.vmap(net)(b["x"]), b["y"]).mean()


def mapped_sum(net, b):
    """The same, summed."""
    return nll(jax.vmap(net)(b["x"]), b["y"]).sum()


def scaled(net, b):
    """A number of the batch without rows, before and after the one sum."""
    return jnp.sqrt((nll(net(b["x"]), b["y"]) * b["scale"]).mean()) * b["scale"], {"scale": b["scale"] * 2}


def test_a_number_that_a_batch_has_beside_its_rows_is_read_before_and_after_microbatches():
    batch = batch_of(16) | {"scale": np.float64(3.0)}
    model = ax.parallelize(Net(nnx.Rngs(0)), mesh_of(data=2), ax.Plan(accumulate=2))
    (found, metrics), _ = model.value_and_grad(scaled)(batch)
    np.testing.assert_allclose(found, scaled(Net(nnx.Rngs(0)), batch)[0], rtol=1e-10)
    np.testing.assert_allclose(metrics["scale"], 6.0)


def test_a_loss_that_maps_the_model_is_taken_in_microbatches_where_it_is_proven_a_mean_and_refused_elsewhere():
    assert cell(mapped, plain(mapped, 32), 32, "ddp, accumulate", linen=False, check_vma=False) < 1e-9
    assert "two sums" in cell(mapped_sum, plain(mapped_sum, 16), 16, "ddp, accumulate", linen=False, check_vma=False)
    assert "two sums" in cell(mapped_sum, plain(mapped_sum, 16), 16, "tensor", linen=False, check_vma=False)


@pytest.mark.parametrize("rows", [8, 16])
def test_a_loss_that_divides_by_one_fewer_than_the_rows_means_the_whole_batch(rows):
    """A rank of one row would divide by 0."""
    one_fewer = lambda net, b: (net(b["x"]) ** 2).sum() / (len(b["x"]) - 1)
    trainer = ax.DDP(Net(nnx.Rngs(0)), mesh_of(data=8)).trainer(optax.sgd(0.1), one_fewer)
    batch = batch_of(rows)
    np.testing.assert_allclose(trainer.step(batch)["loss"], one_fewer(Net(nnx.Rngs(0)), batch), rtol=1e-10)


def masked(net, b):
    return (nll(net(b["x"]), b["y"]) * b["mask"]).sum() / b["mask"].sum()


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("inner", [{"fsdp": 2}, {}], ids=["sharded inside", "accumulated"])
def test_a_loss_of_a_replica_that_trains_by_itself_means_all_its_rows(inner, check_vma):
    plan = ax.Plan(data=ax.DiLoCo(every=3), accumulate=1 if inner else 2, check_vma=check_vma)
    trainer = ax.parallelize(Net(nnx.Rngs(0)), mesh_of({"data": 2, **inner}), plan).trainer(optax.sgd(0.1), masked)
    graph, start = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
    of_params = jax.value_and_grad(lambda params, rows: masked(nnx.merge(graph, params), rows))
    batch, both = batch_of(16), [start, start]
    for _ in range(2):
        found, wanted = trainer.step(batch)["loss"], []
        for i, params in enumerate(both):
            loss, grads = of_params(params, jax.tree.map(lambda x, i=i: x[8 * i : 8 * i + 8], batch))
            both[i] = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            wanted.append(loss)
        np.testing.assert_allclose(found, wanted, rtol=1e-10)


def steepest(net, b):
    """The largest of neighbouring rows, by a function that JAX does not know as a maximum."""
    most = lambda x, start, of: jax.lax.reduce_window(x, start, of, (2,), (1,), "VALID")
    x = net(b["x"]).mean(1)
    return most(x, -jnp.inf, lambda a, b: jnp.maximum(a, b) + 0.0).sum(), {
        "changes": most(x > 0, False, lambda a, b: jnp.logical_xor(a, b)).sum()
    }


def test_a_function_that_is_run_on_all_rows_is_typed_as_the_same_and_refused_where_replicas_differ():
    evaluated = lambda degrees, plan: ax.parallelize(Net(nnx.Rngs(0)), mesh_of(degrees), plan).trainer(
        optax.sgd(0.1), steepest
    )
    wanted, metrics = steepest(Net(nnx.Rngs(0)), batch_of(16))
    found = evaluated({"data": 4}, ax.Plan(check_vma=True)).evaluate(batch_of(16))
    np.testing.assert_allclose((found["loss"], found["changes"]), (wanted, metrics["changes"]), rtol=1e-9)
    alone = ax.Plan(data=ax.Replicate(sync_strategy="no_sync"), fsdp=ax.Shard(stage=1), check_vma=True)
    with pytest.raises(ValueError, match="replicas along data have other rows: leave out check_vma=True"):
        evaluated({"data": 2, "fsdp": 2}, alone).evaluate(batch_of(16))


def test_a_model_with_adapters_is_accumulated_by_the_mean_over_all_rows():
    adapted = lambda: ax.lora(Layered(nnx.Rngs(0)), rank=2, alpha=2, targets="w.*/kernel")
    found = []
    for degrees, plan in (({"data": 1}, ax.Plan()), ({"data": 2}, ax.Plan(accumulate=4))):
        model = ax.parallelize(adapted(), mesh_of(degrees), plan)
        found.append(jax.tree.map(np.asarray, model.value_and_grad(masked)(batch_of(16))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-7), *found)


# Settings of modules


def with_settings(net):
    class Settings(net):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.times, self.drop, self.calls = 1.0, nnx.Dropout(0.5, rngs=rngs), 0
            self.counts, self.keeps = False, False
            self.words, self.last, self.mean = {"times": 1.0}, lambda x: x, nnx.data(jnp.zeros(()))

        def __call__(self, x, times=None):
            if times is not None:
                self.times = times
            out = self.last(self.drop(super().__call__(x))) * self.times * self.words["times"]
            if self.counts:
                self.calls += 1
            if self.keeps:
                self.mean = nnx.data((out**2).mean())
            return out

    return Settings


def quiet(net, b):
    """A model in evaluation, a number of it changed between two calls, and one call in a loop."""
    net.eval()
    once, net.times = net(b["x"]), 3.0
    thrice = jax.lax.scan(lambda _, x: (None, net(x)), None, b["x"][None])[1][0]
    return ((once + thrice) ** 2 * b["mask"][:, None]).sum() / b["mask"].sum()


def without_dropout(net, b):
    """A module in the place of another."""
    net.drop = nnx.Dropout(0.0)
    return (net(b["x"]) ** 2 * b["mask"][:, None]).sum() / b["mask"].sum()


def set_by_calls(net, b):
    """Numbers that calls set of the model, and that the loss sets again."""
    net.eval()
    net.times, net.counts = 2.0, True
    out = net(b["x"], 3.0) + net(b["x"])
    counted = net.calls
    net.times = 1.0
    return ((out + net(b["x"])) ** 2 * b["mask"][:, None]).sum() / b["mask"].sum() * counted * net.times


def an_array_set_by_the_call(net, b):
    """A mean that a call leaves on the model."""
    net.eval()
    net.keeps = True
    return (net(b["x"]) ** 2 * b["mask"][:, None]).sum() / b["mask"].sum() + net.mean


def content(net, b):
    """A mapping that all copies of the model share."""
    net.eval()
    net.words["times"] = 3.0
    thrice = net(b["x"])
    net.words["times"] = 1.0
    return ((thrice + net(b["x"])) ** 2 * b["mask"][:, None]).sum() / b["mask"].sum()


def functions(net, b):
    """One made anew in each trace, and one of the batch."""
    net.eval()
    net.last = lambda x: x * 2
    twice, mean = net(b["x"]), b["x"].mean()
    net.last = lambda x: x * mean
    return ((twice + net(b["x"])) ** 2 * b["mask"][:, None]).sum() / b["mask"].sum()


OWN_CODE = [without_dropout, an_array_set_by_the_call, content, functions]
"""Taken with the model's own code in the program."""

SETTING_PLANS = {
    "ddp": (Net, {"data": 4}, {}),
    "fsdp, accumulate": (Net, {"fsdp": 2}, {"fsdp": ax.Shard(), "accumulate": 2}),
    "tensor": (Layered, {"data": 2, "tensor": 2}, {}),
    "pipeline": (Layered, {"data": 2, "pipe": 2}, {"pipe": ax.Pipelined(num_microbatches=2, split=["w2"])}),
}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(
    ("loss", "plan"),
    [
        *itertools.product([quiet, set_by_calls], SETTING_PLANS),
        *itertools.product(OWN_CODE, ["ddp", "fsdp, accumulate"]),
    ],
)
def test_what_a_loss_sets_of_the_models_modules_holds_in_its_calls(loss, plan, check_vma):
    net, degrees, options = SETTING_PLANS[plan]
    graph, params, rest = nnx.split(with_settings(net)(nnx.Rngs(0)), nnx.Param, ...)
    wanted, grads = jax.value_and_grad(lambda params: loss(nnx.merge(graph, params, rest), batch_of(16)))(params)
    model, mesh = with_settings(net)(nnx.Rngs(0)), mesh_of(degrees)
    if plan == "tensor":
        ax.auto_parallelize(model, mesh)
    parallel = ax.parallelize(model, mesh, ax.Plan(check_vma=check_vma, **options))
    if loss in OWN_CODE and plan != "ddp":
        with pytest.raises(
            ValueError, match=r"(the model's modules|which only a call).* at .*test_meaning.py:\d+.*two sums"
        ):
            parallel.trainer(optax.sgd(0.1), loss).step(batch_of(16))
        return
    trainer = parallel.trainer(optax.sgd(0.1), loss)
    np.testing.assert_allclose(trainer.evaluate(batch_of(16))["loss"], wanted, rtol=1e-6)
    np.testing.assert_allclose(trainer.step(batch_of(16))["loss"], wanted, rtol=1e-9)
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.to_pure_dict(params), nnx.to_pure_dict(grads))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), parallel.parameters(), moved)


class WorkedOut:
    @functools.cached_property
    def times(self):
        return 2.0


class Configured(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.config = WorkedOut()

    def __call__(self, x):
        return super().__call__(x) * self.config.times


def test_what_an_object_works_out_in_a_call_is_no_change():
    loss = lambda net, b: ((net(b["x"]) + net(b["x"])) ** 2 * b["mask"][:, None]).sum() / b["mask"].sum()
    trainer = ax.parallelize(Configured(nnx.Rngs(0)), mesh_of(data=2), ax.Plan(accumulate=2)).trainer(
        optax.sgd(0.1), loss
    )
    wanted = loss(Configured(nnx.Rngs(0)), batch_of(16))
    np.testing.assert_allclose(trainer.step(batch_of(16))["loss"], wanted, rtol=1e-9)


class Output:
    """What JAX does not see into."""

    def __init__(self, logits, name="net"):
        self.logits, self.name = logits, name


def returning(make, net=Net):
    class Returning(net):
        def __call__(self, x):
            return make(super().__call__(x))

    return Returning(nnx.Rngs(0))


def squares(y, b):
    return (y**2 * b["mask"][:, None]).sum() / b["mask"].sum()


# What a model makes of its logits, how a loss has them back, and what a refusal says of it.
OPAQUE = {
    "an object": (Output, lambda out: out.logits, "a Output"),
    "an object beside logits": (lambda y: (y, Output(y)), lambda out: out[1].logits, "1: a Output"),
    "an object in a dict": (
        lambda y: {"y": y, "o": {"z": Output([y])}},
        lambda out: out["o"]["z"].logits[0],
        "o/z: a Out",
    ),
    "a function": (lambda y: (y, lambda times: times * y), lambda out: out[1](1.0), "1: a function"),
    "a generator": (lambda y: (each for each in [y, y]), lambda out: list(out)[-1], "a generator"),
}
OPAQUE_USES = {
    "step": lambda parallel, loss, b: parallel.trainer(optax.sgd(0.1), loss).step(b),
    "evaluate": lambda parallel, loss, b: parallel.trainer(optax.sgd(0.1), loss).evaluate(b),
    "value_and_grad": lambda parallel, loss, b: parallel.value_and_grad(loss)(b),
    "call": lambda parallel, loss, b: parallel(b["x"]),
}


@pytest.mark.filterwarnings("ignore:Python iterable type 'generator'")
@pytest.mark.parametrize("plan", ["ddp", "fsdp, accumulate", "pipeline"])
@pytest.mark.parametrize("what", OPAQUE)
def test_arrays_in_what_jax_does_not_see_into_are_refused_by_name_where_they_are_read(what, plan):
    make, read, words = OPAQUE[what]
    net, degrees, options = SETTING_PLANS[plan]
    parallel = ax.parallelize(returning(make, net), mesh_of(degrees), ax.Plan(**options))
    for use, run in OPAQUE_USES.items():
        with pytest.raises(TypeError, match=rf"model\(\.\.\.\) returned .*{words}.*register_dataclass.*dict") as caught:
            run(parallel, lambda model, b: squares(read(model(b["x"])), b), batch_of(16))
        assert "Tracer" not in str(caught.value), use


@pytest.mark.parametrize("plan", ["ddp", "fsdp, accumulate", "pipeline"])
@pytest.mark.parametrize("what", ["unread", "without arrays", "given"])
def test_what_jax_does_not_see_into_is_as_on_one_device_where_it_holds_no_arrays_of_the_model(what, plan):
    net, degrees, options = SETTING_PLANS[plan]
    made = {"unread": lambda y: (y, Output(y)), "without arrays": lambda y: (y, Output(2.0))}

    class Returning(net):
        def __call__(self, x, own=None):
            return (super().__call__(x), own) if what == "given" else made[what](super().__call__(x))

    def loss(model, b):
        y, out = model(b["x"], Output(b["x"] ** 2)) if what == "given" else model(b["x"])
        return squares(y * (1 if what == "unread" else jnp.mean(out.logits)), b)

    parallel = ax.parallelize(Returning(nnx.Rngs(0)), mesh_of(degrees), ax.Plan(**options))
    wanted = loss(Returning(nnx.Rngs(0)), batch_of(16))
    np.testing.assert_allclose(parallel.trainer(optax.sgd(0.1), loss).step(batch_of(16))["loss"], wanted, rtol=1e-9)


# Two sweeps


def in_batch(net, b):
    """Contrastive among all rows, with a parameter of its own, and metrics that need all rows."""
    logits = net(b["x"]) @ net(b["x2"]).T * jnp.exp(weight(net, "temp"))
    kept = b["mask"] / b["mask"].sum()
    return (nll(logits, jnp.arange(len(logits))) * kept).sum(), {
        "most": logits.max(),
        "right": (logits.argmax(-1) == jnp.arange(len(logits))).sum(),
    }


def weighted_in_batch(net, b):
    loss, metrics = in_batch(net, b)
    return ax.WeightedMean(loss * 6.0, jnp.float64(2.0)), {"all": ax.WeightedMean(metrics["most"], jnp.float64(4.0))}


SWEPT = ("ddp, accumulate", "pipeline, fsdp")


@pytest.mark.parametrize("plan", quick(MICRO, SWEPT))
def test_two_sweeps_take_a_loss_of_all_rows_out_of_microbatches(plan):
    loss_fn = ax.mixing_rows(in_batch, two_sweeps=True)
    found = cell(
        loss_fn, plain(in_batch, 32), 32, plan, sweeps=False, linen=plan == "ddp, accumulate", check_vma="fsdp" in plan
    )
    assert not isinstance(found, str) and found < 1e-9, found


def test_two_sweeps_take_complex_results_of_the_model():
    class Spectrum(Net):
        def __call__(self, x):
            return jnp.fft.fft(super().__call__(x))

    def loss(net, b):
        z = net(b["x"])
        return jnp.abs(z @ z.conj().T).mean()

    def steps(plan):
        loss_fn = ax.mixing_rows(loss, two_sweeps=True)
        trainer = ax.parallelize(Spectrum(nnx.Rngs(0)), mesh_of(data=2), plan).trainer(optax.sgd(0.01), loss_fn)
        return [trainer.step(batch_of(16))["loss"] for _ in range(2)]

    np.testing.assert_allclose(steps(ax.Plan(accumulate=2)), steps(ax.Plan()), rtol=1e-9)


PINNED = {
    "cond": lambda y, b: jax.lax.cond(b["mask"].sum() > 0, lambda y: y.T, lambda y: y, y),
    "while": lambda y, b: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1].T), (0, y))[1],
    "scan": lambda y, b: jax.lax.scan(lambda c, _: (c.T, None), y, length=3)[0],
}


@pytest.mark.parametrize("what", PINNED)
def test_rows_that_branches_or_trips_hold_in_other_dims_are_refused_in_microbatches_but_for_two_sweeps(what):
    def loss(net, b):
        out = net(b["x"])
        turned = PINNED[what](out @ jnp.ones((out.shape[1], len(out))), b)
        return (turned**2 * jnp.arange(len(out))[:, None]).mean() ** 0.5

    model = ax.parallelize(Net(nnx.Rngs(0)), mesh_of(data=2), ax.Plan(accumulate=2))
    with pytest.raises(
        ValueError,
        match=rf"the loss needs the model's results of other microbatches: {what} \(line \d+.*two_sweeps=True",
    ):
        model.trainer(optax.sgd(0.1), loss).step(batch_of(16))
    if what == "while":  # JAX has no gradient of it
        return
    found = model.trainer(optax.sgd(0.1), ax.mixing_rows(loss, two_sweeps=True)).evaluate(batch_of(16))
    np.testing.assert_allclose(found["loss"], loss(Net(nnx.Rngs(0)), batch_of(16)), rtol=1e-9)


def test_two_sweeps_evaluate_all_rows_and_sweep_once():
    model = ax.parallelize(Net(nnx.Rngs(0)), mesh_of(data=2), ax.Plan(accumulate=2))
    trainer = model.trainer(optax.sgd(0.1), ax.mixing_rows(in_batch, two_sweeps=True))
    wanted, _ = plain(in_batch, 16)
    for name, value in trainer.evaluate(batch_of(16)).items():
        np.testing.assert_allclose(value, wanted[0][name], rtol=1e-6, err_msg=name)


@pytest.mark.filterwarnings("ignore:the model's code mixes rows")
def test_two_sweeps_see_the_state_that_the_model_has_in_each_microbatch():
    class Counting(nnx.Module):
        """Multiplies by the means of all microbatches that it has seen: every microbatch by another number."""

        def __init__(self):
            self.w, self.seen = nnx.Param(jnp.ones((6, 4))), nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            self.seen[...] = self.seen[...] + x.mean()
            return self.seen[...] * (x @ self.w[...])

    def loss_fn(net, b):
        out = net(b["x"])
        return ((out - out.mean(0)) ** 2).mean()

    x = batch_of(8)["x"]
    factor = jnp.repeat(jnp.cumsum(x.reshape(2, -1).mean(-1)), 4)[:, None]
    of_w = lambda w: (lambda out: ((out - out.mean(0)) ** 2).mean())(factor * (x @ w))
    wanted, grad = jax.value_and_grad(of_w)(jnp.ones((6, 4)))
    model = ax.parallelize(Counting(), mesh_of(data=1), ax.Plan(accumulate=2))
    found, grads = model.value_and_grad(ax.mixing_rows(loss_fn, two_sweeps=True))({"x": x})
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(jax.tree.leaves(grads)[0], grad, rtol=1e-5)


def test_two_sweeps_take_the_mean_of_what_the_model_returns_without_rows():
    class WithAuxiliary(Net):
        def __call__(self, x):
            out = super().__call__(x)
            return out, (out**2).mean()

    def loss_fn(net, b):
        out, auxiliary = net(b["x"])
        return ((out - out.mean(0)) ** 2).mean() + auxiliary**2

    batch, (graph, params) = batch_of(16), nnx.split(WithAuxiliary(nnx.Rngs(0)), nnx.Param)
    wanted, grads = jax.value_and_grad(lambda params: loss_fn(nnx.merge(graph, params), batch))(params)
    model = ax.parallelize(WithAuxiliary(nnx.Rngs(0)), mesh_of(data=2), ax.Plan(accumulate=2))
    found, ours = model.value_and_grad(ax.mixing_rows(loss_fn, two_sweeps=True))(batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-10)
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-12)
    jax.tree.map(compare, jax.tree.map(np.asarray, ours), nnx.to_pure_dict(grads))


def test_what_two_sweeps_do_not_take_is_refused_by_name():
    def again(net, b):  # what it is called with depends on all rows of what it made
        return net(b["x"] + (net(b["x"]).sum(0) * net(b["x2"]).max(0)).sum()).std()

    loss_fn = ax.mixing_rows(again, two_sweeps=True)
    with pytest.raises(ValueError, match="the model's input depends on"):
        ax.parallelize(Net(nnx.Rngs(0)), mesh_of(data=2), ax.Plan(accumulate=2)).value_and_grad(loss_fn)(batch_of(16))
    plan = ax.Plan(accumulate=2, precision="fp16")
    trainer = ax.parallelize(Net(nnx.Rngs(0)), mesh_of(data=2), plan).trainer(
        optax.sgd(0.1), ax.mixing_rows(in_batch, two_sweeps=True)
    )
    with pytest.raises(ValueError, match="loss scaling"):
        trainer.step(batch_of(16))
    with pytest.raises(ValueError, match="two_sweeps='yes'"):
        ax.mixing_rows(in_batch, two_sweeps="yes")


# Positions


class Sequences(nnx.Module):
    """Every position by itself, and a mean over all of them."""

    splits_positions = True

    def __init__(self):
        self.inner = nnx.Linear(3, 4, rngs=nnx.Rngs(0), param_dtype=jnp.float64)

    def __call__(self, x):
        return jnp.tanh(self.inner(x))


def of_positions(net, b):
    """What depends on the order of positions, and on that of merged ones; a mask over a length that is written down."""
    out = net(b["x"])
    moved = (out[:, 1:] - out[:, :-1]) ** 2 * jnp.arange(1.0, 16.0)[:, None]
    chunks = out.reshape(8, 4, 4, 4).max(2).sum()
    best = out.sum(-1).argmax(1)
    looked_up = jnp.take_along_axis(out, best[:, None, None], 1)
    loss = (
        moved.mean()
        + 0.1 * jnp.cumsum(out, 1).max()
        + chunks
        + (looked_up**2).sum()
        + (out * b["w"]).sum() / b["w"].sum()
    )
    return loss, {"last": out[:, -1].sum(), "best": best.sum(), "mask": (out * (jnp.arange(16) < 5)[:, None]).sum()}


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("degrees", [{"context": 4}, {"data": 2, "context": 2}], ids=["context", "data and context"])
def test_positions_in_the_orders_of_ranks_are_meant_as_they_were_given(order, degrees):
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 16, 3)), "w": rng.random((8, 16, 1))}
    graph, params = nnx.split(Sequences(), nnx.Param)
    of_params = lambda params: of_positions(nnx.merge(graph, params), batch)
    (wanted, metrics), grads = jax.value_and_grad(of_params, has_aux=True)(params)
    model = ax.parallelize(Sequences(), mesh_of(degrees), ax.Plan(context=ax.Context(order=order)))
    (found, more), ours = model.value_and_grad(of_positions)(batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-10)
    for name, value in metrics.items():
        np.testing.assert_allclose(more[name], value, rtol=1e-6, err_msg=name)
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-11)
    jax.tree.map(compare, jax.tree.map(np.asarray, ours), nnx.to_pure_dict(grads))


class Merging(Sequences):
    """Returns rows and positions merged in one dim, in one order or the other."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def __call__(self, x):
        out = super().__call__(x)
        return (out if self.order == "rows first" else out.swapaxes(0, 1)).reshape(-1, 4)


def of_merged(net, b):
    """What depends on the order of a merged dim."""
    out = net(b["x"])
    weights = (b["w"] if net.order == "rows first" else b["w"].swapaxes(0, 1)).reshape(-1, 1)
    return (out * weights).sum() / weights.sum() + (out[1:] * out[:-1]).sum()


MERGED = {
    "data": ({"data": 4}, ax.Plan()),
    "accumulated": ({"data": 2}, ax.Plan(accumulate=2)),
    "context": ({"context": 4}, ax.Plan(context=ax.Context(order="contiguous"))),
    "data and context": ({"data": 2, "context": 2}, ax.Plan(context=ax.Context(order="zigzag"), accumulate=2)),
}


@pytest.mark.parametrize("plan", MERGED)
@pytest.mark.parametrize("order", ["rows first", "positions first"])
def test_a_model_may_return_rows_merged_with_other_dims_or_is_refused(order, plan):
    rng, (degrees, settings) = np.random.default_rng(0), MERGED[plan]
    batch = {"x": rng.normal(size=(8, 16, 3)), "w": rng.random((8, 16))}
    model = ax.parallelize(Merging(order), mesh_of(degrees), settings)
    ours = lambda: model.value_and_grad(ax.mixing_rows(of_merged, two_sweeps=True))(batch)
    if (order, plan) == ("positions first", "data and context"):
        with pytest.raises(ValueError, match=r"shape \(\d+, 4\), whose dim 0 has positions merged.*a dim of their own"):
            ours()
        return
    graph, params = nnx.split(Merging(order), nnx.Param)
    wanted, grads = jax.value_and_grad(lambda params: of_merged(nnx.merge(graph, params), batch))(params)
    found = ours()
    np.testing.assert_allclose(found[0], wanted, rtol=1e-10)
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-11)
    jax.tree.map(compare, jax.tree.map(np.asarray, found[1]), nnx.to_pure_dict(grads))


def test_a_loop_from_plain_zeros_may_carry_rows_where_an_axis_of_rows_has_one_rank():
    loss = CASES["scan over rows"]
    assert cell(loss, plain(loss, 16), 16, "context", linen=False, check_vma=True) < 1e-9


# Layers that split their parameters

SPLIT = {
    "tensor": ({"data": 2, "tensor": 2}, {}, {}),
    "tensor, microbatches": ({"fsdp": 2, "tensor": 2}, {"sequence_parallel": True}, {"accumulate": 2}),
    "pipeline": ({"data": 2, "tensor": 2, "pipe": 2}, {}, {"pipe": ax.Pipelined(num_microbatches=2)}),
    "grid": ({"data": 2, "row": 2, "col": 2}, {"split": "grid"}, {}),
    "depth": ({"data": 2, "depth": 2, "col": 2}, {"split": "grid"}, {"accumulate": 2}),
}


def of_words(model, batch):
    """The commonest loss of language models, and metrics."""
    losses = ax.vocab_parallel_cross_entropy(model(batch["tokens"]), batch["labels"], axis=("tensor", "col"))
    kept = losses * batch["kept"]
    return kept.sum() / batch["kept"].sum(), {"bits": kept.sum() / jnp.log(2.0), "most": losses.max()}


@pytest.mark.parametrize("check_vma", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["untyped", "typed"])
@pytest.mark.parametrize("name", quick(SPLIT, ["tensor"]))
def test_the_librarys_split_losses_are_masked_as_on_one_device(name, check_vma):
    degrees, options, plan = SPLIT[name]
    loss_fn = of_words if name in ("tensor", "grid") else lambda model, batch: of_words(model, batch)[0]
    sizes = {"vocab_size": 16, "num_layers": 2, "hidden_size": 8, "num_heads": 2, "max_length": 8, "attention": "xla"}
    config = TransformerConfig(**sizes, mlp_hidden_size=16, param_dtype="float64", dtype="float64", **options)
    rng = np.random.default_rng(0)
    batch = {key: rng.integers(0, 16, (16, 8)) for key in ("tokens", "labels")}
    batch["kept"] = (rng.random((16, 8)) < 0.3).astype(float)
    graph, params, rest = nnx.split(Transformer(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    scalar = lambda found: found if isinstance(found, tuple) else (found, {})
    of_params = lambda params: scalar(loss_fn(nnx.merge(graph, params, rest), batch))
    (wanted, metrics), grads = jax.value_and_grad(of_params, has_aux=True)(params)
    model = ax.parallelize(
        Transformer(config, rngs=nnx.Rngs(0)), mesh_of(degrees), ax.Plan(check_vma=check_vma, **plan)
    )
    found, ours = model.value_and_grad(loss_fn)(batch)
    found, more = found if metrics else (found, {})
    np.testing.assert_allclose(found, wanted, rtol=1e-10)
    for key, value in metrics.items():
        np.testing.assert_allclose(more[key], value, rtol=1e-6, err_msg=key)
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-11)
    ours = nnx.to_pure_dict(ours) if isinstance(ours, nnx.State) else ours
    jax.tree.map(compare, jax.tree.map(np.asarray, ours), nnx.to_pure_dict(grads))


def test_a_split_loss_of_logits_that_swapped_layers_gather_takes_them_whole():
    def loss_fn(net, b):
        return (ax.vocab_parallel_cross_entropy(net(b["x"]), b["y"]) * b["mask"]).sum() / b["mask"].sum()

    assert cell(loss_fn, None, 16, "tensor", linen=False, check_vma=False) < 1e-9


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_masked_mean_of_experts_over_ranks_is_that_of_one_device(accumulate):
    def loss_fn(model, batch):
        out, _ = model(batch["x"])
        return (jnp.square(out - batch["y"]).sum(-1) * batch["mask"]).sum() / batch["mask"].sum()

    batch = expert_batch(8, masked=True)
    wanted, grads = grad_of(Experts(), loss_fn, batch)
    model = ax.parallelize(Experts(), mesh_of(expert=2, data=2), ax.Plan(accumulate=accumulate))
    found, ours = model.value_and_grad(loss_fn)(batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    ours = nnx.to_pure_dict(ours) if isinstance(ours, nnx.State) else ours
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-11)
    jax.tree.map(compare, jax.tree.map(np.asarray, ours), nnx.to_pure_dict(grads))


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
    "a sum of bytes as a number": (
        lambda x: x.astype(jnp.uint8).sum(dtype=jnp.uint8).astype(float), [X], [(None, None)]
    ),
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


PUT = {
    "padded": lambda s: jnp.pad(s, 1, constant_values=3.0),
    "added to": lambda s: s.at[0].add(5.0),
    "looked up outside": lambda s: jnp.take(s, jnp.array([0, 99]), mode="fill", fill_value=4.0),
}


@pytest.mark.parametrize("how", PUT)
def test_a_number_that_is_put_into_a_sum_over_ranks_counts_once(how):
    loss = lambda net, b: (PUT[how](net(b["x"]).sum(0)) ** 2).sum()
    trainer = ax.parallelize(Net(nnx.Rngs(0)), mesh_of(data=4), ax.Plan()).trainer(optax.sgd(0.1), loss)
    wanted = loss(Net(nnx.Rngs(0)), batch_of(16))
    np.testing.assert_allclose(trainer.evaluate(batch_of(16))["loss"], wanted, rtol=1e-9)


def test_a_lookup_by_rows_and_positions_that_are_both_split_gathers_one_of_them():
    step = followed(lambda x: x[jnp.arange(32), jnp.arange(32) % 16], ((32, 16, 6), (Split(0), Split(1))))
    assert step == [(SUM, None)]


# Which program runs


def step_text(loss, monkeypatch, *, by_rows):
    if by_rows:
        monkeypatch.setattr(Objective, "_of", Objective._on_rows)
    model = ax.parallelize(Net(nnx.Rngs(0)), mesh_of(data=4), ax.Plan())
    trainer = model.trainer(optax.sgd(0.1), loss)
    return str(trainer.train_step.trace(trainer.state, batch_of(16)).jaxpr)


def step_text_split(monkeypatch, *, by_rows):
    """Of a transformer whose vocabulary is split."""
    if by_rows:
        monkeypatch.setattr(Objective, "_of", Objective._on_rows)
    config = TransformerConfig(
        vocab_size=16, num_layers=1, hidden_size=8, num_heads=2, max_length=8, mlp_hidden_size=16
    )
    model = ax.parallelize(Transformer(config, rngs=nnx.Rngs(0)), mesh_of(data=2, tensor=2), ax.Plan())
    loss_fn = lambda net, b: ax.vocab_parallel_cross_entropy(net(b["x"]), b["y"]).mean()
    batch = {name: np.zeros((8, 8), np.int32) for name in "xy"}
    trainer = model.trainer(optax.sgd(0.1), loss_fn)
    return str(trainer.train_step.trace(trainer.state, batch).jaxpr)


def test_the_mean_of_a_split_loss_keeps_the_program_of_rows(monkeypatch):
    meant = step_text_split(monkeypatch, by_rows=False)
    assert meant == step_text_split(monkeypatch, by_rows=True)


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
    "a number put into a sum": lambda net, b: net(b["x"]).sum(0).at[0].add(5.0).sum() / b["x"].shape[0],
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


def test_the_ledger_says_what_a_loss_gathers():
    model = ax.parallelize(Net(nnx.Rngs(0)), mesh_of(data=4), ax.Plan())
    rows = ax.explain(model.trainer(optax.sgd(0.1), contrastive), batch_of(16)).traffic
    found = {row.kind: (row.count, row.elements, row.wire_bytes) for row in rows if row.label == "loss"}
    own = 4 * 4 * 8  # rows, features, bytes: what three other ranks send, and take back
    assert found["all_gather"] == (1, 64, 3 * own) and found["reduce_scatter"] == (1, 64, 3 * own)


def test_a_number_of_bytes_that_is_none_is_refused():
    with pytest.raises(ValueError, match="most_bytes='1 GB'"):
        ax.mixing_rows(contrastive, most_bytes="1 GB")


class RefersToItsModel(nnx.Module):
    """What it returns beside its rows has the model in it, and nothing that the call made."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        kept = types.SimpleNamespace(name="a name", model=self)
        return self.layer(x), kept


def test_an_object_that_refers_to_the_model_is_read_as_on_one_device():
    def loss(model, batch):
        y, kept = model(batch)
        return (y**2).mean() + len(kept.name)

    x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    trainer = ax.DDP(RefersToItsModel(nnx.Rngs(0)), mesh_of({"data": 2})).trainer(optax.sgd(0.1), loss)
    np.testing.assert_allclose(trainer.step(x)["loss"], loss(RefersToItsModel(nnx.Rngs(0)), x), rtol=1e-6)


DRAWN_PLANS = ("ddp", "fsdp, accumulate", "pipeline")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_drawn_losses_are_those_of_one_device(number):
    _, loss = draw_loss(number, 5)
    options = {"linen": not number % 2, "check_vma": number > 2}
    found = cell(loss, plain(loss, 32), 32, DRAWN_PLANS[number % 3], **options)
    assert not isinstance(found, str) and found < LIMIT, (number, options, found)


class Gridded(nnx.Module):
    """Reads the sides of a grid, as vision models with images of any shape do; and takes rows one by one, in a list."""

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0), param_dtype=jnp.float64)

    def __call__(self, x, grid):
        height, width = int(grid[0]), int(grid[1])
        return self.linear(x.reshape(len(x), height, width, 4)).mean((1, 2))

    def listed(self, rows, scales):
        made = jnp.tanh(self.linear(jnp.stack(rows).mean(1))) * scales[:, None]
        return [made[i] for i in range(len(rows))]


GIVEN = {
    "numbers of NumPy": lambda model, x: jnp.sqrt(jnp.square(model(x, np.array([2, 3]))).mean()),
    "numbers of NumPy by a shape": lambda model, x: jnp.square(model(x, np.array([2, x.shape[1] // 2]))).mean(),
    "rows in a list": lambda model, x: jnp.square(jnp.stack(model.listed(list(x), x[:, 0, 0]))).mean(),
}


@pytest.mark.parametrize("plan", ["ddp", "accumulate"])
@pytest.mark.parametrize("name", GIVEN)
def test_a_model_is_given_what_its_code_reads_on_the_host(name, plan):
    x, loss, model = np.random.default_rng(0).normal(size=(8, 6, 4)), GIVEN[name], Gridded()
    degrees, chosen = {"ddp": ({"data": 4}, ax.Plan()), "accumulate": ({"data": 2}, ax.Plan(accumulate=2))}[plan]
    parallel = ax.parallelize(Gridded(), mesh_of(degrees), chosen)
    if name == "rows in a list" and plan == "accumulate":
        with pytest.raises(ValueError, match=r"for a microbatch's rows alone(.|\n)*accumulate=1"):
            parallel.value_and_grad(loss)(x)
        return
    value, grads = parallel.value_and_grad(loss)(x)
    wanted, by_hand = nnx.value_and_grad(loss)(model, jnp.asarray(x))
    np.testing.assert_allclose(value, wanted, rtol=1e-9)
    assert_trees_close(grads, nnx.to_pure_dict(by_hand), "gradients")
