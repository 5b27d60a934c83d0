"""Sliding windows as a `config.json` says them, block by block, and back."""

from collections.abc import Iterator
from typing import Any

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.families.family import Described

SLIDING, FULL = "sliding_attention", "full_attention"


def window_problems(described: Described) -> Iterator[str]:
    """What of them the transformer here does not do."""
    if _period(kinds := _kinds(described)) == 0:
        yield f"layer_types={kinds}: all must slide, none, or all but every so many-th"


def window_settings(described: Described) -> dict[str, Any]:
    """The arguments of `TransformerConfig`."""
    kinds = _kinds(described)
    if SLIDING not in kinds:
        return {}
    return {"window": described["sliding_window"], "full_every": _period(kinds)}


def window_description(config: TransformerConfig) -> dict[str, Any]:
    """What a `config.json` says of them."""
    kinds = [FULL if config.window_of(block) is None else SLIDING for block in range(config.num_layers)]
    slides = config.window is not None
    return {
        "sliding_window": config.window,
        "use_sliding_window": slides,
        "max_window_layers": 0 if slides else config.num_layers,
        "layer_types": kinds,
    }


def _kinds(described: Described) -> list[str]:
    """Of each block, `SLIDING` or `FULL`."""
    layers, window = described["num_hidden_layers"], described.get("sliding_window")
    if window is None or not described.get("use_sliding_window", True):
        return [FULL] * layers
    if given := described.get("layer_types"):
        return list(given)
    first = described.get("max_window_layers", 0)
    return [SLIDING if block >= first else FULL for block in range(layers)]


def _period(kinds: list[str]) -> int | None:
    """After how many blocks one is full; None where all or none are, 0 where there is no such number."""
    if len(set(kinds)) == 1:
        return None
    every = kinds.index(FULL) + 1
    alike = all((kind == FULL) == ((block + 1) % every == 0) for block, kind in enumerate(kinds))
    return every if alike and every > 1 and set(kinds) == {FULL, SLIDING} else 0
