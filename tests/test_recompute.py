"""What units keep for their backward: priced as JAX keeps it, chosen as all choices are, and the same gradients."""

import itertools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from predicted_steps import GPT, LENGTH, LLAMA, config, step_of

import axonml_jax as ax
from axonml_jax.compat.order import SaveWhere
from axonml_jax.models.config import ExpertsConfig
from axonml_jax.parallel.recompute import Recompute, UnitChoice, WithinBytes
from axonml_jax.program.recompute import KEEP, Keeps, Piece, Price, Rates, _best, choose, front, graph_of, peak
from axonml_jax.training.budget import budget_of, peak_of

RATES = Rates(1e12, 1e11, 1e10)
B, S, H = 4, 16, 32


def named(x, label):
    return checkpoint_name(x, KEEP + label)


def block(x, wq, wo, wu, wd, scale):
    """Attention of one head and a feed-forward part, plainly."""
    norm = lambda x: (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale
    q, k, v = jnp.split(named(norm(x) @ wq, "qkv"), 3, -1)
    weights = jax.nn.softmax(named(q @ k.mT, "scores"))
    x = x + named(named(weights @ v, "mixed") @ wo, "out")
    return [x + named(jax.nn.gelu(named(norm(x) @ wu, "up")) @ wd, "down")]


def values():
    keys = iter(jax.random.split(jax.random.key(0), 5))
    shapes = [(B, S, H), (H, 3 * H), (H, H), (H, 4 * H), (4 * H, H)]
    return [0.1 * jax.random.normal(next(keys), shape) for shape in shapes] + [jnp.ones(H)]


@pytest.mark.slow
def test_bytes_and_products_of_every_set_are_those_of_jax_checkpoint():
    given, labels = values(), ("qkv", "scores", "mixed", "out", "up")
    graph = graph_of(block, given, range(len(given)))
    products = lambda jaxpr: str(jaxpr).count("dot_general[")
    plain = products(jax.make_jaxpr(jax.grad(lambda *a: block(*a)[0].sum(), range(6)))(*given))
    for some in itertools.chain.from_iterable(itertools.combinations(labels, n) for n in range(len(labels) + 1)):
        work = jax.checkpoint(block, policy=SaveWhere(Keeps(frozenset(some))))
        _, pull = jax.vjp(work, *given)
        kept = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(pull) if not any(leaf is x for x in given)}
        price = graph.price(frozenset(some), RATES)
        assert price.kept == sum(kept.values()), some
        again = products(jax.make_jaxpr(jax.grad(lambda *a, work=work: work(*a)[0].sum(), range(6)))(*given)) - plain
        assert (price.flops > 0) == (again > 0), some


FORMS = {
    "reshaped": lambda x, w, v: [jnp.sin(x @ w).reshape(4, 2, 16) @ v],
    "transposed": lambda x, w, v: [v.T @ jnp.sin(x @ w).T],
    "named": lambda x, w, v: [checkpoint_name(jnp.sin(x @ w), "act") @ v],
    "named, cast": lambda x, w, v: [checkpoint_name(jnp.sin(x @ w), "act").astype(float) @ v],
    "two of one name": lambda x, w, v: [
        checkpoint_name(jnp.sin(checkpoint_name(jnp.sin(x @ w), "act") @ w), "act") @ v
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_elementwise_results_that_are_read_in_another_form_cost_what_jax_checkpoint_keeps(form):
    given, work = [jnp.ones((8, 16)), jnp.ones((16, 16)), jnp.ones((16, 16))], FORMS[form]
    graph = graph_of(work, given, range(3))
    for keep in (None, frozenset(), frozenset(graph.labels)):
        own = work if keep is None else jax.checkpoint(work, policy=SaveWhere(Keeps(keep)))
        _, pull = jax.vjp(own, *given)
        leaves = {id(x): x for x in jax.tree.leaves(pull) if not any(x is each for each in given)}
        forms = sum(x.nbytes for x in leaves.values() if form == "transposed" and np.array_equal(x, given[2].T))
        assert graph.price(keep, RATES).kept == sum(x.nbytes for x in leaves.values()) - forms, keep


SENDING = RATES._replace(host=5e9)


def carried(x, *weights):
    return block(named(x, "input"), *weights)


@pytest.mark.parametrize("host", [("up",), ("input",), ("qkv", "input", "out")])
def test_bytes_on_both_sides_of_the_link_are_those_of_jax_checkpoint(host):
    given, keep, host = values(), frozenset(("scores", "mixed")), frozenset(host)
    found = {}

    def kept(*given):
        _, pull = jax.vjp(jax.checkpoint(carried, policy=SaveWhere(Keeps(keep, host))), *given)
        for leaf in jax.tree.leaves(pull):
            found[id(leaf)] = (jax.typeof(leaf).memory_space, leaf.nbytes, any(leaf is x for x in given), leaf)
        return pull([jnp.ones_like(given[0])])

    jax.jit(kept).trace(*given)
    device = jax.memory.Space.Device
    price = graph_of(carried, given, range(len(given))).price(keep, SENDING, host)
    assert price.away == sum(size for space, size, _, _ in found.values() if space != device) > 0
    assert price.kept + (given[0].nbytes if "input" in host else 0) == sum(
        size for space, size, was_given, _ in found.values() if space == device and not was_given
    )
    assert not ("input" in host and any(leaf.shape == given[0].shape for *_, was, leaf in found.values() if was))


def test_a_loop_sends_no_more_than_its_link_takes_in_a_forwards_time():
    graph = graph_of(carried, values(), range(6))
    without = front(graph, RATES, plain=False)
    assert not any(price.host for price in without + front(graph, SENDING, plain=True))
    found, limit = front(graph, SENDING, plain=False), SENDING.host * graph.forward_seconds(SENDING)
    assert max(price.away for price in found) <= limit < sum(map(graph.bytes_of, graph.labels))
    least = lambda prices: min(8 * price.kept + price.fullest for price in prices)  # of eight trips
    assert least(found) < least(without)


def test_the_front_has_what_an_exhaustive_search_finds():
    given = values()
    graph = graph_of(block, given, range(len(given)))
    found = front(graph, RATES, plain=False)
    every = [graph.price(frozenset(s), RATES) for n in range(7) for s in itertools.combinations(graph.labels, n)]
    for budget in sorted({price.kept + price.fullest for price in every}):
        fits = lambda some, budget=budget: [p.seconds for p in some if p.kept + p.fullest <= budget]
        assert not fits(every) or min(fits(found)) <= 1.05 * min(fits(every)) + 1e-12, budget


CHOOSES = """
import test_recompute as test
given = test.values()
found = test.front(test.graph_of(test.block, given, range(len(given))), test.RATES, plain=False)
print([sorted(price.keep) for price in found])
"""


@pytest.mark.slow
def test_all_processes_choose_alike():
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    said = [
        subprocess.run(
            [sys.executable, "-c", CHOOSES], capture_output=True, text=True, check=True, timeout=300,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in (1, 2, 3)
    ]  # fmt: skip
    assert said[0].strip() and said[0] == said[1] == said[2]


def test_of_sets_that_cost_alike_the_front_has_the_smallest():
    alike = [Price(frozenset(keep), 8, 4, 0, 2.0) for keep in ("ab", "", "a")]
    dearer = Price(frozenset("c"), 12, 2, 0, 1.0)
    for some in itertools.permutations([*alike, dearer]):
        assert _best(some) == [dearer, Price(frozenset(), 8, 4, 0, 2.0)]
    kept = [Price(None, 8, 4, 0, 0.0), Price(frozenset(), 8, 4, 0, 0.0)]
    assert _best(kept) == _best(kept[::-1]) == kept[:1]


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_the_choice_repeats_least_of_all_that_fit(seed, stages):
    draw = random.Random(seed)
    number = lambda: draw.randrange(1, 60)
    fullest = draw.sample(range(1, 60), 7)
    fronts = [
        [Price(frozenset(str(k)), number() * (3 - k), draw.choice(fullest), 0, float(k and number())) for k in range(3)]
        for _ in range(4)
    ]
    pieces = [Piece(own, draw.choice((1, 2)), number(), number()) for own in fronts]
    if stages:
        pieces = [piece._replace(stage=i // 2, slots=draw.choice((1, 3))) for i, piece in enumerate(pieces)]
    every = list(itertools.product(*fronts))
    of_stage = lambda chosen, stage: sum(
        p.trips * c.seconds for p, c in zip(pieces, chosen, strict=True) if p.stage == stage
    )
    seconds = lambda chosen: max(of_stage(chosen, stage) for stage in {piece.stage for piece in pieces})
    for budget in range(100, 900, 50):
        fitting = [chosen for chosen in every if peak(pieces, chosen) <= budget]
        found = choose(pieces, budget)
        assert (found is None) == (not fitting)
        if found is not None:
            assert peak(pieces, found) <= budget and seconds(found) == min(map(seconds, fitting))


@pytest.mark.slow
def test_the_curve_of_a_choice_goes_from_nothing_repeated_to_what_holds_least_and_through_what_is_chosen():
    model = config(LLAMA, num_layers=3, max_length=64)
    args = step_of(model, ax.Plan(), {"data": 2}, 16, length=64)[1:]
    points = {}
    for allowance in (1 << 40, 3 << 20, 0):
        chooser = WithinBytes(allowance, RATES)
        step_of(model, ax.Plan(remat=chooser), {"data": 2}, 16, length=64)[0].trace(*args)
        found = chooser.found
        points[allowance] = (found.live, found.seconds)
        curve = found.curve()
        assert Recompute(found.units).curve() == ()  # what a configuration says was chosen elsewhere
    assert curve[0] == points[1 << 40] and curve[0][1] == 0 and curve[-1][0] == points[0][0]
    assert list(curve) == sorted(set(curve), reverse=True) and [s for _, s in curve] == sorted({s for _, s in curve})
    live, seconds = points[3 << 20]
    assert 0 < seconds < curve[-1][1] and live < curve[0][0]
    assert not any(point[0] <= live and point[1] < seconds for point in curve)


def products_in(step, state, rows):
    return len(re.findall(r"stablehlo\.dot_general", step.lower(state, rows).as_text()))


def test_recomputing_unrolled_blocks_makes_the_products_that_jax_checkpoint_around_each_block_makes():
    """A block's closing product is not among them: nothing in the block reads it but the next one."""
    model = config(GPT, num_layers=4)
    plain, full = (
        products_in(*step_of(model, ax.Plan(remat=remat), {"data": 2}, 8)) for remat in (None, "full")
    )  # fmt: skip
    forward = 6 + 2  # query, key, value, out, up, down; scores and what they weigh
    assert full - plain == 4 * (forward - 1) + 1  # and the head's


@pytest.mark.parametrize("remat", ["selective", "full"])
def test_recomputing_repeats_no_sum_over_ranks(remat):
    from axonml_jax.ledger.count import collectives_in

    traced = lambda plan: collectives_in(*step_of(config(GPT), plan, {"tensor": 4}, 4))
    sums = lambda plan: [each.kind for each in traced(plan)].count("all_reduce")
    assert sums(ax.Plan(remat=remat)) == sums(ax.Plan())


# Whole steps

ROWS = {
    "ddp": ({"data": 2}, {}, {}),
    "fsdp": ({"data": 1, "fsdp": 2}, {}, {}),
    "fsdp, scanned": ({"data": 1, "fsdp": 2}, {}, {"scan_layers": True}),
    "tensor, accumulated": ({"data": 2, "tensor": 2}, {"accumulate": 2}, {}),
    "pipe": ({"data": 1, "pipe": 2}, {"pipe": ax.Pipelined(num_microbatches=4)}, {}),
    "pipe, in turns": (
        {"data": 1, "pipe": 2},
        {"pipe": ax.Pipelined(num_microbatches=4, schedule="interleaved", chunks=2)},
        {"num_layers": 4},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_step_fits_the_bytes_that_it_is_given(name):
    degrees, options, more = ROWS[name]
    model = config(LLAMA, **{"num_layers": 3, "max_length": 64, **more})
    make = lambda **own: step_of(model, ax.Plan(**options, **own), degrees, 16, length=64)
    peaks = {remat: peak_of(make(remat=remat)[0].lower(*make()[1:]).compile()) for remat in (None, "full")}
    budget = (peaks[None] + 2 * peaks["full"]) // 3
    step, state, rows = make(memory=budget)
    assert peak_of(step.lower(state, rows).compile()) <= budget
    assert isinstance(step.recompute, Recompute) and step.recompute.seconds > 0


@pytest.mark.slow
def test_what_holds_least_is_to_be_had_of_experts_too():
    """Their block has values that are worth nothing: as many bytes and seconds are priced with and without them."""
    experts = ExpertsConfig(num_experts=4, top_k=2, inner_size=64)
    model = config(GPT, num_layers=2, max_length=64, experts=experts)
    make = lambda **own: step_of(model, ax.Plan(**own), {"data": 2}, 16, length=64)
    budget = peak_of(make(remat="full")[0].lower(*make()[1:]).compile())
    step, state, rows = make(memory=budget)
    assert peak_of(step.lower(state, rows).compile()) <= budget


@pytest.mark.slow
def test_a_budget_just_missed_repeats_little():
    model = config(LLAMA, num_layers=3, max_length=64)
    make = lambda **own: step_of(model, ax.Plan(**own), {"data": 2}, 16, length=64)
    found = []
    for budget in (lambda: "1GiB", lambda: found[0][0] - 1, lambda: found[0][0] // 2):
        step, state, rows = make(memory=budget())
        found.append((peak_of(step.lower(state, rows).compile()), step.recompute.seconds))
    (whole, nothing), (less, little), (_, much) = found
    assert less < whole and nothing == 0 < little < much


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(24, 24, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.blocks:
            x = x + jnp.tanh(checkpoint_name(layer(x), "made"))
        return x


def loss_fn(model, batch):
    return (model(batch["x"]) ** 2).mean()


BATCH = {"x": np.random.default_rng(0).normal(size=(512, 24)).astype(np.float32)}


def trained(**options):
    trainer = ax.DDP(Mlp(nnx.Rngs(0)), ax.make_mesh(data=2, devices=jax.devices()[:2]), **options).trainer(
        optax.adam(1e-2), loss_fn
    )
    return trainer, [float(trainer.step(BATCH)["loss"]) for _ in range(3)]


@pytest.mark.slow
def test_budgets_names_policies_and_chosen_units_train_alike_and_what_cannot_be_is_refused():
    _, plain = trained()
    chosen, losses = trained(memory=380_000)
    np.testing.assert_allclose(losses, plain, rtol=1e-6)
    units = chosen.recompute
    for remat in (["made"], [r"blocks/[12]/.*kernel"], jax.checkpoint_policies.dots_saveable, units, units.to_dict()):
        np.testing.assert_allclose(trained(remat=remat)[1], plain, rtol=1e-6)
    assert Recompute.of(units.to_dict()) == Recompute(tuple(UnitChoice(u.name, u.keep) for u in units.units))
    with pytest.raises(ValueError, match=r"needs at least .* bytes\).* and 10 were given"):
        trained(memory=10)
    with pytest.raises(ValueError, match=r"\['nowhere'\] finds none of the values"):
        trained(remat=["nowhere"])
    with pytest.raises(ValueError, match=r"names units .*blocks/9"):
        trained(remat={"blocks/9": ["kernel"]})
    with pytest.raises(ValueError, match="share of a device"):
        budget_of(0.5, ax.make_mesh(data=8))


class Wide(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for block in self.blocks:
            x = x + nnx.gelu(block(x))
        return x


def test_a_report_says_what_was_kept_and_what_else_may_be(tmp_path):
    mesh, batch = ax.make_mesh(data=2, devices=jax.devices()[:2]), {"x": np.ones((2048, 64), np.float32)}
    trainer = lambda **own: ax.DDP(Wide(nnx.Rngs(0)), mesh, **own).trainer(optax.sgd(1e-3), loss_fn)
    chosen = trainer(memory="3MiB")
    report = ax.explain(chosen, batch)
    assert report.recompute == chosen.recompute and str(chosen.recompute) in str(report)
    told = json.loads(report.to_json())
    assert told["recompute"] == chosen.recompute.to_dict()
    curve = [(each["live_bytes"], each["seconds_again"]) for each in told["memory_against_time"]]
    assert curve == list(report.recompute.curve()) and len(curve) > 2 and "what may be kept" in report._repr_html_()
    pytest.importorskip("matplotlib")
    report.save_picture(tmp_path / "curve.svg")
    assert "chosen: " in (tmp_path / "curve.svg").read_text("utf-8")
    plain = ax.explain(trainer(), batch)
    assert plain.recompute is None and "recompute" not in plain.to_dict()
    with pytest.raises(ValueError, match="nothing was chosen to be kept: give the plan memory="):
        plain.save_picture(tmp_path / "none.svg")


# Stages of a pipeline


def staged(schedule="1f1b", **options):
    model, mesh = Mlp(nnx.Rngs(0)), ax.make_mesh(pipe=2, devices=jax.devices()[:2])
    trainer = ax.Pipeline(model, mesh, num_microbatches=4, schedule=schedule, **options).trainer(
        optax.adam(1e-2), loss_fn
    )
    return trainer, [float(trainer.step(BATCH)["loss"]) for _ in range(3)]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_stages_keep_block_by_block_and_train_alike(schedule):
    _, plain = trained()
    held = [peak_of(staged(remat=remat)[0].trace(BATCH).lower().compile()) for remat in (None, "full")]
    chosen, losses = staged(memory=sum(held) // 2)
    np.testing.assert_allclose(losses, plain, rtol=1e-6)
    units = chosen.recompute
    assert isinstance(units, Recompute) and units.seconds > 0
    assert [unit.name for unit in units.units] == [f"blocks/{i}" for i in range(4)]
    for remat in (["made"], [r"blocks/[12]/.*kernel"], jax.checkpoint_policies.dots_saveable, units.to_dict()):
        np.testing.assert_allclose(staged(schedule, remat=remat)[1], plain, rtol=1e-6)


@pytest.mark.slow
def test_a_stage_repeats_what_its_blocks_do_not_keep():
    model, plan = config(LLAMA, num_layers=4), {"pipe": ax.Pipelined(num_microbatches=4)}
    make = lambda remat: step_of(model, ax.Plan(remat=remat, **plan), {"data": 1, "pipe": 2}, 8, length=LENGTH)
    whole = {"blocks/0": "everything"}  # and the others, of which nothing is said
    nothing = {f"blocks/{i}": [] for i in range(4)}
    plain, whole, up, none, full = (products_in(*make(remat)) for remat in (None, whole, ["mlp/up"], nothing, "full"))
    of_block = 3 + 2 + 1 + 3  # queries, keys, values; scores and what they weigh; out; gate, up, down
    assert whole == plain and none == plain + 4 * (of_block - 1)  # nothing in a block reads its closing product
    assert up == none - 4 + 1 and full == none + 1  # and the head's, of which nothing is kept
