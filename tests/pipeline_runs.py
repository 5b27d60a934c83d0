"""A pipeline of stages that differ in everything, run under any timetable, and the same model unsplit."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from axonml_jax.collectives.primitives import axis_index, sum_over, vary
from axonml_jax.executor.cut import Stage, StageOutput
from axonml_jax.executor.run import run_pipeline
from axonml_jax.pipeline.pack import StageBuffers, Stored
from axonml_jax.pipeline.schedules import make_schedule, make_timetable

ROWS, LENGTH, VOCABULARY = 2, 3, 7
# Many small programs that run once: what LLVM would gain is less than it takes.
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
WIDTHS = (4, 6, 3, 5)


def width(stage: int) -> int:
    """The width of what a stage sends: it changes from stage to stage and comes back to the embedding's."""
    return WIDTHS[stage % len(WIDTHS)]


def dropout(h, key):
    return h * jax.random.bernoulli(key, 0.7, h.shape) / 0.7


def normalized(h, state):
    """A layer with mutable state: a running mean, and how many microbatches it has seen."""
    state = {"mean": 0.9 * state["mean"] + 0.1 * h.mean((0, 1)), "seen": state["seen"] + 1}
    return h - state["mean"], state


def first(weights, x, batch, key, state):
    """An embedding of integer tokens; sends a pytree in which integers, floats and a mask travel."""
    assert x is None and state is None
    tokens = batch["tokens"]
    h = dropout(weights["embedding"][tokens], key)
    return StageOutput({"h": (h, h.mean()), "tokens": tokens, "mask": tokens > 1, "scale": weights["scale"]})


def middle(stage, weights, x, batch, key, state):
    h, mean = x["h"]
    h, state = normalized(h, state)
    y = jnp.tanh(h @ weights["w"] + weights["b"]) + mean * x["scale"]
    y = (dropout(y, key) if stage == 2 else y) + jnp.where(x["mask"], batch["extra"], 0.0)[..., None]
    return StageOutput({**x, "h": (y, y.mean())}, state=state)


def last(weights, x, batch, key, state):
    """Logits from the first stage's own embedding, and the tokens that have travelled all the way."""
    assert state is None
    h, mean = x["h"]
    logits = (h @ weights["head"]) @ weights["embedding"].T
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)[..., 0]
    loss = -jnp.mean(scores * x["scale"]) + 0.1 * mean
    correct = logits.argmax(-1) == batch["targets"]
    return StageOutput(
        logits, loss, {"correct": correct.sum(), "tokens": x["tokens"].sum(), "any": correct.any()}, None
    )


class Model(NamedTuple):
    """Stages, and per stage its weights (the tied embedding in the first and in the last) and its state."""

    stages: list
    weights: list
    states: list


@functools.cache
def model(num_stages: int) -> Model:
    rng = np.random.default_rng(num_stages)
    normal = lambda *shape: np.asarray(rng.normal(size=shape))
    embedding = normal(VOCABULARY, width(0))
    stages, weights, states = [first], [{"embedding": embedding, "scale": normal()}], [None]
    for p in range(1, num_stages - 1):
        stages.append(functools.partial(middle, p))
        weights.append({"w": normal(width(p - 1), width(p)), "b": normal(width(p))})
        states.append({"mean": normal(width(p - 1)), "seen": np.asarray(p, np.int32)})
    stages.append(last)
    weights.append({"head": normal(width(num_stages - 2), width(0)), "embedding": embedding})
    states.append(None)
    return Model(stages, weights, states)


def batch_of(num_microbatches: int, data: int):
    """[M, rows over all data ranks, ...]."""
    rng = np.random.default_rng(num_microbatches)
    shape = (num_microbatches, data * ROWS, LENGTH)
    return {
        "tokens": rng.integers(0, VOCABULARY, shape).astype(np.int32),
        "targets": rng.integers(0, VOCABULARY, shape).astype(np.int32),
        "extra": rng.normal(size=shape),
    }


@functools.partial(jax.jit, static_argnums=0)
def keys_of(num_microbatches: int, shard):
    """One key per microbatch, which differs per data shard."""
    return jax.random.split(jax.random.fold_in(jax.random.key(3), shard), num_microbatches)


class Outcome(NamedTuple):
    """Of one step: means over the data ranks, but states and outputs by data rank."""

    loss: jax.Array
    aux: dict
    grads: list
    states: list
    outputs: jax.Array


@functools.cache
def unsplit_microbatch(num_stages: int):
    """(loss, (metrics, states, outputs)) and gradients of one microbatch, stage after stage on one device."""
    stages = model(num_stages).stages

    def microbatch(weights, states, batch, key):
        # The embedding that is tied: one parameter, and the gradients of both uses add up.
        weights = [*weights[:-1], {**weights[-1], "embedding": weights[0]["embedding"]}]
        x, after = None, []
        for stage, w, state in zip(stages, weights, states, strict=True):
            out = stage(w, x, batch, key, state)
            x, after = out.y, [*after, out.state]
        return out.loss, (out.aux, after, out.y)

    return jax.jit(jax.value_and_grad(microbatch, has_aux=True), compiler_options=FAST_COMPILE)


@functools.cache
def unsplit(num_stages: int, num_microbatches: int, data: int) -> Outcome:
    """The model without a pipeline, microbatch after microbatch on every data shard."""
    _, weights, states = model(num_stages)
    batch, found, shards = batch_of(num_microbatches, data), [], []
    for shard in range(data):
        mine, keys = slice(shard * ROWS, (shard + 1) * ROWS), keys_of(num_microbatches, shard)
        after, outputs = states, []
        for m in range(num_microbatches):
            microbatch = {name: x[m, mine] for name, x in batch.items()}
            (loss, (aux, after, y)), grads = unsplit_microbatch(num_stages)(weights, after, microbatch, keys[m])
            found.append(jax.device_get((loss, aux, grads)))
            outputs.append(np.asarray(y))
        shards.append((jax.device_get(after), np.stack(outputs)))
    loss, aux, grads = jax.tree.map(lambda *x: np.sum(np.stack(x), 0), *found)
    loss, grads = jax.tree.map(lambda x: x / len(found), (loss, grads))
    grads[-1] = {**grads[-1], "embedding": grads[0]["embedding"]}
    return Outcome(loss, aux, grads, *jax.tree.map(lambda *x: np.stack(x), *shards))


class Case(NamedTuple):
    """One program."""

    schedule: str
    ranks: int
    microbatches: int
    chunks: int = 1
    data: int = 1
    check_vma: bool = False
    remat: str | None = None
    rows: str = "fused"
    forward_only: bool = False

    def __str__(self):
        options = [name for name in ("check_vma", "remat", "forward_only") if getattr(self, name)]
        rows = [self.rows] if self.rows != "fused" else []
        size = f"{self.schedule}-S{self.ranks}-M{self.microbatches}-V{self.chunks}-data{self.data}"
        return "-".join([size, *rows, *options])


def layouts(case: Case) -> tuple[StageBuffers, StageBuffers]:
    built = model(case.ranks * case.chunks)
    stored = [jax.tree.map(lambda x: Stored(x.shape, x.dtype), tree) for tree in built.weights]
    for tree in (stored[0], stored[-1]):
        tree["embedding"] = Stored((VOCABULARY, width(0)), jnp.float64, shared="embedding")
    states = [jax.tree.map(lambda x: Stored(x.shape, x.dtype, ("data",)), tree) for tree in built.states]
    return StageBuffers.of(stored, case.ranks), StageBuffers.of(states, case.ranks)


def stacked(layout: StageBuffers, trees, copies: tuple = ()):
    """Every rank's buffers, [copies, S, n]."""
    ranks = [layout.pack_rank(r, [trees[p] for p in layout.stages(r)]) for r in range(layout.num_ranks)]
    whole = jax.tree.map(lambda *x: np.stack(x), *ranks)
    return jax.tree.map(lambda x: np.broadcast_to(x, (*copies, *x.shape)), whole)


def program(case: Case):
    """(jitted step, its arguments): loss, metrics, gradients [S, n], states [data, S, n], outputs."""
    layout, states_layout = layouts(case)
    built = model(case.ranks * case.chunks)
    timetable = make_timetable(make_schedule(case.schedule, case.ranks, case.microbatches, case.chunks), case.rows)
    timetable = timetable.forward_only if case.forward_only else timetable

    def local(weights, states, batch):
        shard = axis_index("data")
        result = run_pipeline(
            [Stage(stage) for stage in built.stages],
            timetable,
            layout,
            {group: vary(x[0], "data") for group, x in weights.items()},
            batch,
            keys=keys_of(case.microbatches, shard),
            states_layout=states_layout,
            states={group: x[0, 0] for group, x in states.items()},
            remat=case.remat,
        )
        mean = lambda x: sum_over(x, "data") / case.data
        return (
            mean(result.loss),
            jax.tree.map(lambda x: sum_over(x, "data"), result.aux),
            {group: mean(x)[None] for group, x in result.grads.items()},
            {group: x[None, None] for group, x in result.states.items()},
            result.outputs[None],
        )

    mesh = Mesh(np.array(jax.devices()[: case.data * case.ranks]).reshape(case.data, -1), ("data", "pipe"))
    specs = (P("pipe"), P("data", "pipe"), P(None, "data"))
    out = (P(), P(), P("pipe"), P("data", "pipe"), P("data"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=case.check_vma)
    step = jax.jit(mapped, compiler_options=FAST_COMPILE)
    arguments = (
        stacked(layout, built.weights),
        stacked(states_layout, built.states, (case.data,)),
        batch_of(case.microbatches, case.data),
    )
    return step, arguments


def outcome(case: Case, results) -> Outcome:
    """A program's results as trees by stage."""
    layout, states_layout = layouts(case)
    loss, aux, grads, states, outputs = jax.device_get(results)
    by_stage = lambda layout, buffers: [
        layout.unpack(p, {group: x[..., p % case.ranks, :] for group, x in buffers.items()})
        for p in range(case.ranks * case.chunks)
    ]
    grads = by_stage(layout, grads) if grads else []
    shards = [by_stage(states_layout, {group: x[d] for group, x in states.items()}) for d in range(case.data)]
    return Outcome(loss, aux, grads, jax.tree.map(lambda *x: np.stack(x), *shards), outputs)


def run(case: Case) -> Outcome:
    step, arguments = program(case)
    return outcome(case, step(*arguments))
