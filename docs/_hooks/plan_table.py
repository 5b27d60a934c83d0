"""The tables of plans in training-step.md, from the strategies' roles and the cost model's flows.

`python docs/_hooks/plan_table.py` writes them into the page; `tests/test_plan_table.py` fails while the page has others.
"""

import re
from pathlib import Path

import axonml_jax as ax
from axonml_jax.cost.base import LOSS_VALUES, ONCE
from axonml_jax.models.config import TransformerConfig

PAGE = Path(__file__).resolve().parents[1] / "training-step.md"
BLOCK = re.compile(r"(<!-- plans: begin[^\n]*\n).*?(<!-- plans: end -->)", re.DOTALL)
SIZES = {"vocab_size": 64, "num_layers": 4, "hidden_size": 32, "num_heads": 8, "mlp_hidden_size": 48, "max_length": 32}
MICROBATCHES, RANKS = 4, 2

# name: (axes of the mesh, the plan's options, the model's options)
PLANS = {
    "DDP": ("data", {}, {}),
    "DDP, `NO_SYNC`": ("data", {"data": ax.Replicate(sync_strategy=ax.GradSyncStrategy.NO_SYNC)}, {}),
    "ZeRO-1": ("fsdp", {"fsdp": ax.Shard(stage=1)}, {}),
    "ZeRO-2": ("fsdp", {"fsdp": ax.Shard(stage=2)}, {}),
    "ZeRO-3": ("fsdp", {"fsdp": ax.Shard(stage=3)}, {}),
    "hybrid": ("data fsdp", {"fsdp": ax.Shard(stage=3)}, {}),
    "tensor (Megatron)": ("tensor", {}, {}),
    "tensor, sequence parallel": ("tensor", {}, {"sequence_parallel": True}),
    "context, gathered": ("context", {"context": ax.Context(method="gather")}, {}),
    "context, Ulysses": ("context", {"context": ax.Context(method="ulysses")}, {}),
    "context, ring": ("context", {"context": ax.Context(method="ring")}, {}),
    "context and ZeRO-3 over both": ("fsdp context", {"context": ax.Context(method="gather", shard=True)}, {}),
    "3-D (AxoNN)": ("depth row col", {}, {"split": "grid"}),
    "pipeline": ("pipe", {"pipe": {}}, {}),
    "pipeline and DDP, tied embedding": ("data pipe", {"pipe": {}}, {"tie_embeddings": True}),
    'pipeline and ZeRO-3, `gather="step"`': ("pipe fsdp", {"pipe": {}}, {}),
    'pipeline and ZeRO-3, `gather="tick"`': ("pipe fsdp", {"pipe": {"gather": "tick"}}, {}),
}  # fmt: skip
WHOLE = ("Plan", "Mesh axes", "Whole parameters", "Whole gradients")
SENT = ("Plan", "Sent once a step", "Sent in every microbatch")
ORDER = ("parameters", "layers", "attention", "activations", "cotangents", "gradients")


def tables():
    """Both tables as Markdown."""
    return f"{table(WHOLE, held)}\n{table(SENT, travels)}"


def table(columns, cells):
    """A table with a row for each plan."""
    rows = [columns, ("---",) * len(columns), *((name, *cells(*each)) for name, each in PLANS.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def plan_of(axes, options):
    """The plan, and the degrees of its mesh."""
    degrees = dict.fromkeys(axes.split(), RANKS)
    if "pipe" not in options:
        return ax.Plan(accumulate=MICROBATCHES, **options), degrees
    return ax.Plan(**options | {"pipe": ax.Pipelined(num_microbatches=MICROBATCHES, **options["pipe"])}), degrees


def held(axes, options, model):
    """What is whole on a rank."""
    plan, degrees = plan_of(axes, options)
    return code(degrees), *whole(plan, degrees)


def travels(axes, options, model):
    """What a rank sends once a step, and what more often."""
    plan, degrees = plan_of(axes, options)
    config = TransformerConfig(**SIZES, **model)
    predicted = ax.explain(plan, model=config, mesh=degrees, global_batch=MICROBATCHES * RANKS ** len(degrees))
    large = [each for each in predicted.traffic if not is_small(each)]
    return sent(each for each in large if each.where == ONCE), sent(each for each in large if each.where != ONCE)


def code(names):
    """Names as code, with commas."""
    return ", ".join(f"`{name}`" for name in names)


def is_small(flow):
    """Whether a flow is the loss's sum or the norm's: a few numbers."""
    return flow.label in ("metrics", "norm") or flow.elements == LOSS_VALUES


def sent(flows):
    """What flows move, by which collectives over which axes, and in which passes."""
    found = {}
    for flow in flows:
        kinds = found.setdefault((ORDER.index(label_of(flow)), "tick" in flow.where), {})
        axes, works = kinds.setdefault(flow.kind.replace("_", "-"), (set(), set()))
        axes.update(flow.axes)
        works.add(flow.work)
    return "<br>".join(
        f"{ORDER[what]}{' in every tick' if ticks else ''}: "
        + ", ".join(f"{kind} over {code(sorted(axes))} {passes(works)}" for kind, (axes, works) in sorted(kinds.items()))
        for (what, ticks), kinds in sorted(found.items())
    ) or "nothing"  # fmt: skip


def label_of(flow):
    """What a flow moves; along a pipeline the cost model has no name for gradients of what stages share."""
    return flow.label or ("gradients" if flow.where == ONCE else "layers")


def passes(works):
    """The passes in which something is sent."""
    return f"({', '.join(sorted(works, reverse=True))})"


def whole(plan, degrees):
    """Of which parameters, and of which gradients, a rank has all elements, and when: as the roles of the axes say."""
    roles = {axis: strategy.role for axis, strategy in plan.on(degrees).items()}
    if layers := [axis for axis, role in roles.items() if role.parameters == "layers"]:
        return (f"all but what layers split over {code(layers)}",) * 2
    is_sharded = any(role.parameters == "sharded" for role in roles.values())
    if plan.pipe is not None:
        return in_stages(plan.pipe, is_sharded)
    if is_sharded:
        return next(sharded(role) for role in roles.values() if role.parameters == "sharded")
    own = any(role.reduces == "never" for role in roles.values())
    return "all, always", "all, of a rank's own rows" if own else "all"


def sharded(role):
    """The same where parameters rest sharded."""
    if role.reads == "use":
        return "a unit's, while it is used", "a unit's, until they are reduced"
    ends = {"step": "all, until the last microbatch is done", "microbatch": "all, of one microbatch"}
    return "all, while a step runs", ends[role.reduces]


def in_stages(pipe, is_sharded):
    """The same along a pipeline."""
    if not is_sharded:
        return "of a rank's own stages, always", "of a rank's own stages"
    if pipe.in_ticks:
        return "of one stage, in its tick", "of one stage, in its tick"
    return "of a rank's own stages, while a step runs", "of a rank's own stages, until the last microbatch is done"


def page_with(text, made):
    """A page's text with the tables in their place."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{made}\n{found[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text("utf-8"), tables()), "utf-8")
