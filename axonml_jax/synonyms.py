"""What others call our names: one table, for the choices where another name means one thing, and for the hints elsewhere.

A choice (an axis, a precision, a strategy, a schedule, a dtype) is taken by any of its names, however it is spelt:
`HYBRID_SHARD` is `hybrid_shard`. A keyword or a key of a configuration has one name, the same in both, and a refusal says
which; `SAME_KEYS` are taken all the same.
"""

import difflib
import enum
from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

AXES: dict[str, str] = {
    "dp": "data",
    "ddp": "data",
    "batch": "data",
    "replica": "data",
    "dp_replicate": "data",
    "pp": "pipe",
    "pipeline": "pipe",
    "stage": "pipe",
    "zero": "fsdp",
    "dp_shard": "fsdp",
    "cp": "context",
    "context_parallel": "context",
    "seq": "context",
    "sequence": "context",
    "ep": "expert",
    "expert_parallel": "expert",
    "experts": "expert",
    "tp": "tensor",
    "mp": "tensor",
    "model": "tensor",
}
"""Axes of a mesh."""

CHOICES: dict[str, dict[str, str]] = {
    "dtype": {
        "fp64": "float64",
        "f64": "float64",
        "fp32": "float32",
        "f32": "float32",
        "bf16": "bfloat16",
        "fp16": "float16",
        "f16": "float16",
        "half": "float16",
    },
    "precision": {
        "fp32": "float32",
        "f32": "float32",
        "bfloat16": "bf16",
        "bf16_mixed": "bf16",
        "float16": "fp16",
        "f16": "fp16",
        "half": "fp16",
        "fp16_mixed": "fp16",
        "float8": "fp8",
    },
    "sharding_strategy": {
        "zero3": "full_shard",
        "zero_3": "full_shard",
        "zero2": "shard_grad_op",
        "zero_2": "shard_grad_op",
        "zero1": "shard_optimizer",
        "zero_1": "shard_optimizer",
        "zero0": "no_shard",
        "hsdp": "hybrid_shard",
    },
    "schedule": {
        "one_f_one_b": "1f1b",
        "interleaved1f1b": "interleaved",
        "interleaved_1f1b": "interleaved",
        "interleaved_one_f_one_b": "interleaved",
        "zb": "zero-bubble",
    },
    "hardware": {"v5litepod": "v5e", "v5_lite": "v5e", "trillium": "v6e"},
}
"""Values by the setting that takes them; spelt as `_plain` does."""

KEYS: dict[str, str] = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "bs": "global_batch_size",
    "batch_size": "global_batch_size",
    "batch": "global_batch_size",
    "grad_clip": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "max_steps": "steps",
    "num_steps": "steps",
    "warmup": "warmup_steps",
    "optimizer": "name",
    "seq_len": "length",
    "sequence_length": "length",
    "context_length": "max_length",
    "grad_accum": "accumulate",
    "dtype": "precision",
    "gradient_accumulation_steps": "accumulate",
    "zero_stage": "sharding_strategy",
    "strategy": "sharding_strategy",
    "n_layer": "num_layers",
    "n_layers": "num_layers",
    "num_hidden_layers": "num_layers",
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "n_head": "num_heads",
    "n_heads": "num_heads",
    "num_attention_heads": "num_heads",
    "intermediate_size": "mlp_hidden_size",
    "activation_checkpointing": "remat",
}
"""Keys of a configuration by the last part of their name."""

SAME_KEYS: dict[str, str] = {
    "pipeline.microbatches": "pipeline.num_microbatches",
    "plan.cpu_offload": "plan.offload",
    "plan.mixed_precision": "plan.precision",
    "plan.reduce_wire": "plan.reduce",
    "plan.wire": "plan.gather",
}
"""Keys of a configuration by other names that Python has for them, or that they had: taken as what they are."""

SECTIONS: dict[str, str] = {
    "optimizer": "optim",
    "parallelism": "mesh",
    "dataset": "data",
    "training": "train",
    "trainer": "train",
    "logging": "output",
    "generation": "sample",
    "checkpoints": "checkpoint",
    "checkpointing": "checkpoint",
}
"""Sections of a configuration."""

NO_AXIS: dict[str, str] = {
    "sp": "sequence parallelism lies along 'tensor': give that axis, and sequence_parallel=True to the layers; whole models "
    "split sequences along 'context'",
}
"""What people look for as an axis and what there is in its place."""

Kind = TypeVar("Kind", bound=enum.Enum)


def meant(setting: str, given: Any, choices: Iterable[str] = ()) -> Any:
    """The choice that a name means.

    Args:
      setting: which row of `CHOICES` knows the other names.
      given: a name, however it is spelt; anything but text is given back.
      choices: ours; none: whatever the table says.

    Returns:
      One of `choices`, or `given` where it is none of them.

    >>> meant("sharding_strategy", "ShardingStrategy.HYBRID_SHARD", ["hybrid_shard"]), meant("dtype", "bf16")
    ('hybrid_shard', 'bfloat16')
    """
    if not isinstance(given, str):
        return given
    ours = {_plain(choice): choice for choice in choices}
    plain = _plain(given)
    found = CHOICES.get(setting, {}).get(plain, given)
    return ours.get(plain, found if not ours or found in ours.values() else given)


def member(kind: type[Kind], setting: str, given: Any) -> Kind | None:
    """For `_missing_` of an Enum: the member that a name means, or None."""
    if not isinstance(given, Hashable):
        return None
    by_value = {each.value: each for each in kind}
    by_name = {_plain(each.name): each for each in kind}
    found = by_value.get(meant(setting, given, by_value))
    return by_name.get(_plain(given)) if found is None and isinstance(given, str) else found


def is_choice(kind: type[enum.Enum], given: Any) -> bool:
    """Whether a member, its name or its value is given."""
    try:
        kind(given)
    except ValueError:
        return False
    return True


def nearest(given: str, known: Iterable[str], *tables: dict[str, str], cutoff: float = 0.6) -> str | None:
    """The known name that was most likely meant: by a table where it says, else by its letters.

    >>> nearest("lr", ["steps", "learning_rate"], KEYS), nearest("stpes", ["steps"], KEYS)
    ('learning_rate', 'steps')
    """
    known, plain = list(known), _plain(given)
    for table in tables:
        if table.get(plain) in known:
            return table[plain]
    return next(iter(difflib.get_close_matches(given, known, n=1, cutoff=cutoff)), None)


def _plain(name: str) -> str:
    """A name without its class, in small letters, with underscores."""
    return name.strip().rpartition(".")[2].lower().replace("-", "_").replace(" ", "_")
