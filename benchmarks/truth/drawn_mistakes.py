"""Bad inputs that `random_plans.py` draws: junk in the place of options, degrees, batches, losses, parameters and keys."""

import random
from pathlib import Path
from typing import Any

from drawn_plans import CONTEXT, PIPELINED, PLAN, REPLICATE, SHARD, TRAINER, drawn

JUNK = (
    "zebra", "", "None", -1, 0, 3, 1.5, "nan", "inf", "-inf", True, None, [], {}, [1, 2], {"a": 1}, 10**30, "type", "object",
    "function", "array",
)  # fmt: skip
"""What nobody should give; names of what JSON has not are replaced by `real`."""
SECTIONS = {
    "data": ("table", REPLICATE),
    "fsdp": ("table", SHARD),
    "plan": ("table", PLAN | {"data": [], "fsdp": [], "context": [], "pipe": [], "axes": [], "partition": [], "mesh": []}),
    "trainer": ("table", TRAINER | {"ema": [], "accumulate": [], "norm_type": [], "callbacks": [], "layer_norms": []}),
    "pipe": ("stages", PIPELINED | {"split": []}),
    "context": ("transformer", CONTEXT),
    "diloco": ("diloco", {"every": [], "lr": [], "momentum": [], "wire": []}),
}  # fmt: skip
SIZES = (
    "vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "mlp_hidden_size", "max_length",
    "window", "full_every", "rope_theta", "norm_eps", "dropout", "norm", "activation", "position", "split", "attention",
    "dtype", "param_dtype", "loss_chunk", "latent", "experts", "rope_scaling", "logit_softcap", "scan_layers",
    "sequence_parallel", "ring",
)  # fmt: skip
EXPERT_SIZES = (
    "num_experts", "top_k", "inner_size", "every", "first_dense", "router", "groups", "top_groups", "scale",
    "bias_rate", "noise", "shared_size", "capacity_factor", "dispatch", "load_balance", "z", "activation",
    "renormalize", "router_bias",
)  # fmt: skip
LOSSES = (
    "vector", "nothing", "integer", "complex", "three", "metrics list", "metric vector", "metric loss", "text", "weight vector",
)  # fmt: skip
BATCHES = ("one row less", "no rows", "one leaf shorter", "text", "objects", "scalars", "nothing")
OF_STATES = ["first", "embed", "Dense", "kernel", "load_state_dict", "set_parameters"]
STATES = ("missing", "unexpected", "shape", "text", "nothing", "integer", "list")


def real(value: Any) -> Any:
    """What a word of `JUNK` stands for."""
    import numpy as np

    words = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf"), "type": int, "object": object()}
    words |= {"function": print, "array": np.ones(3)}
    return words.get(value, value) if isinstance(value, str) else value


def mistaken(family: str, draw: random.Random) -> dict[str, Any]:
    """A case that works but for one thing, and what its refusal must say; an option's junk may happen to be right."""
    return MISTAKES[family](draw)


def _simple(family: str, draw: random.Random) -> dict[str, Any]:
    """A case whose plan is as by default but for what it needs."""
    case = drawn(family, draw)
    case["plan"], case["trainer"], case["optimizer"] = {}, {}, "momentum"
    case["mesh"] = {"table": {"data": 2}, "stages": {"pipe": 2}, "diloco": {"data": 2}}.get(family, {"data": 2})
    if family == "table":
        case["model"] = {"case": draw.choice(["dropout", "weighted", "tied", "linen_dropout"])}
    if family == "transformer":
        case["model"] = {"num_layers": 1}
    if family == "stages":
        case["plan"] = {"pipe": {"num_microbatches": 2}}
        case["model"]["stages"] = 2
    if family == "diloco":
        case["plan"] = {"data": {"every": 2}}
    return case


def option(draw: random.Random) -> dict[str, Any]:
    """Junk in the place of one option."""
    section = draw.choice([*SECTIONS, "plan", "trainer"])
    family, options = SECTIONS[section]
    case, name, junk = _simple(family, draw), draw.choice(list(options)), draw.choice(JUNK)
    if section == "trainer":
        case["trainer"] = {name: junk}
    elif section == "plan":
        case["plan"][name] = junk
    else:
        axis = "data" if section == "diloco" else section
        if axis in ("fsdp", "context"):
            case["mesh"] = {axis: 2}
        case["plan"][axis] = {**case["plan"].get(axis, {}), name: junk}
    return case | {"family": family, "junk": [section, name], "says": [name]}


def size(draw: random.Random) -> dict[str, Any]:
    """Junk, or a number that does not go with the others, in a transformer's configuration."""
    case, numbers = _simple("transformer", draw), [2, 3, 5, 7, 9, 13, 15]
    junk = draw.choice(JUNK) if draw.random() < 0.6 else draw.choice(numbers)
    name = draw.choice(SIZES) if draw.random() < 0.6 else "experts." + draw.choice(EXPERT_SIZES)
    case["model"] = {"num_layers": 1} | ({"experts": {"num_experts": 4}} if "." in name else {})
    if "." in name:
        case["model"]["experts"][name.split(".")[1]] = junk
    else:
        case["model"][name] = junk
    case["mesh"] = draw.choice([{"data": 2}, {"tensor": 2}, {"tensor": 4}, {"expert": 4}, {"context": 2}, {"fsdp": 2}])
    if name == "experts.capacity_factor":  # ranks drop tokens of their own positions, one device those of whole rows
        case["mesh"] = {"data": 2}
    return case | {"junk": ["model", name], "says": [name.rpartition(".")[2], "divide", *case["mesh"]]}


def mesh(draw: random.Random) -> dict[str, Any]:
    """Degrees that cannot be."""
    case = _simple("table", draw)
    name = draw.choice(["data", "fsdp", "dta", "model", "tensor", "pipe", "expert", "context", "row", "x", ""])
    size = draw.choice([*(junk for junk in JUNK if junk != "None"), 2, 5, 7, 9, 16])
    case["mesh"] = {name: size} | draw.choice([{}, {"data": 2}, {"fsdp": 2}])
    return case | {
        "junk": ["mesh", name],
        "says": [repr(name), f"{'tensor' if name == 'model' else name}=", "8 devices"],
    }


def batch(draw: random.Random) -> dict[str, Any]:
    """A batch that does not fit."""
    case, how = _simple("table", draw), draw.choice(BATCHES)
    case["mesh"] = draw.choice([{"data": 2}, {"fsdp": 4}, {"data": 2, "fsdp": 2}])
    if draw.random() < 0.5:
        case["plan"]["accumulate"] = draw.choice([2, 3])
    return case | {"junk": ["batch", how], "says": ["x", "y", "batch"]}


def loss(draw: random.Random) -> dict[str, Any]:
    """A loss function that returns what is none."""
    case = _simple("table", draw)
    if draw.random() < 0.3:
        case = _simple("stages", draw)
    return case | {"junk": ["loss", draw.choice(LOSSES)], "says": ["loss_fn"]}


def state(draw: random.Random) -> dict[str, Any]:
    """Parameters that are another model's."""
    case = _simple("table", draw)
    case["mesh"] = draw.choice([{"data": 2}, {"fsdp": 2}])
    return case | {"junk": [draw.choice(["load_state_dict", "set_parameters"]), draw.choice(STATES)], "says": OF_STATES}


def key(draw: random.Random) -> dict[str, Any]:
    """Junk for one key of a configuration, or a key that is none."""
    keys = (Path(__file__).resolve().parents[2] / "tests" / "config_keys.txt").read_text().split()
    name, junk = (
        draw.choice(keys),
        draw.choice([*JUNK[:-4], "2026-01-01", "1e3", "*", "a: b", "~/x", "[1,", "0x10", "1_0"]),
    )
    if draw.random() < 0.15:
        at = draw.randrange(len(name))
        name = name[:at] + draw.choice(["", "x", name[at] * 2]) + name[at + 1 :]
    return {"family": "key", "junk": ["key", name], "value": junk, "says": [name, name.rpartition(".")[2]]}


MISTAKES = {"option": option, "size": size, "mesh": mesh, "batch": batch, "loss": loss, "state": state, "key": key}


def spoiled_batch(batch: Any, how: str) -> Any:
    """A good batch made into a bad one."""
    import numpy as np

    names = sorted(name for name in batch if np.ndim(batch[name]))
    shorter = lambda x: x[:-1] if np.ndim(x) else x
    return {
        "one row less": lambda: {name: shorter(x) for name, x in batch.items()},
        "no rows": lambda: {name: x[:0] if np.ndim(x) else x for name, x in batch.items()},
        "one leaf shorter": lambda: batch | {names[0]: batch[names[0]][:-1]},
        "text": lambda: batch | {names[0]: np.full(batch[names[0]].shape, "a")},
        "objects": lambda: batch | {names[0]: np.full(batch[names[0]].shape, None)},
        "scalars": lambda: {name: np.float64(1) for name in batch},
        "nothing": lambda: None,
    }[how]()


def spoiled_loss(loss: Any, how: str) -> Any:
    """A good loss function made into a bad one."""
    import jax.numpy as jnp

    import axonml_jax as ax

    def total(value):
        value = value[0] if isinstance(value, tuple) else value
        return value.total / value.weight if isinstance(value, ax.WeightedMean) else value

    what = {
        "vector": lambda x: jnp.stack([x, x]),
        "nothing": lambda x: None,
        "integer": lambda x: x.astype(int),
        "complex": lambda x: x + 1j,
        "three": lambda x: (x, {}, 3),
        "metrics list": lambda x: (x, [x]),
        "metric vector": lambda x: (x, {"a": jnp.ones(3)}),
        "metric loss": lambda x: (x, {"loss": x}),
        "text": lambda x: "loss",
        "weight vector": lambda x: ax.WeightedMean(x, jnp.ones(2)),
    }[how]
    return lambda model, batch: what(total(loss(model, batch)))


def spoiled_state(values: Any, how: str) -> Any:
    """A nest of parameters with one leaf that is wrong."""
    import numpy as np

    first = sorted(values)[0]
    inner = values[first]
    leaf = lambda change: {**values, first: spoiled_state(inner, how) if isinstance(inner, dict) else change(inner)}
    return {
        "missing": lambda: {name: value for name, value in values.items() if name != first},
        "unexpected": lambda: {**values, "zebra": np.ones(3)},
        "shape": lambda: leaf(lambda x: np.ones((*np.shape(x), 2))),
        "text": lambda: leaf(lambda x: "text"),
        "nothing": lambda: None,
        "integer": lambda: leaf(lambda x: 3),
        "list": lambda: [values],
    }[how]()
