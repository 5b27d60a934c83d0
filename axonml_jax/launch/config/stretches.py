"""The configurations of a run, which may change when it is resumed: which one trained what, and what differs.

`config.yaml` is that of the steps made last; `config.until_00000400.yaml` another one, by which the steps up to 400 were made.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from axonml_jax.launch.config.plain_yaml import yaml_in
from axonml_jax.launch.config.read_config import as_dict
from axonml_jax.launch.config.run_config import RunConfig

NEWEST = "config.yaml"
_EARLIER = re.compile(r"config\.until_(\d{8,})\.yaml")
_TRAINS_NOTHING = ("name", "profile", "resume", "callbacks", "output", "sample")
_NONE = "not set"


def settings_at(folder: Path, step: int) -> dict[str, Any] | None:
    """The configuration that made a step; None where the folder does not have it, or it cannot be read."""
    until = [number for number in _earlier(folder) if number >= step]
    path = _earlier(folder)[min(until)] if until else folder / NEWEST
    try:
        content = yaml_in(path)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def examples_until(folder: Path, step: int) -> int | None:
    """How many examples the steps up to one have drawn, which may have had other batches; None where nobody can say."""
    total, before = 0, 0
    for until in [*sorted(each for each in _earlier(folder) if each < step), step]:
        try:
            total += (until - before) * int((settings_at(folder, until) or {})["train"]["global_batch_size"])
        except (KeyError, TypeError, ValueError):
            return None
        before = until
    return total


def begin(folder: Path, config: RunConfig, step: int) -> None:
    """Note the configuration that makes all steps after this one, and keep the one before, if it made any and is another."""
    before, now = settings_at(folder, step) if step else None, as_dict(config)
    for until, path in _earlier(folder).items():
        if until >= step:
            path.unlink()
    if before is not None and list(_different(before, now)):
        _write(folder / f"config.until_{step:08d}.yaml", before)
    _write(folder / NEWEST, now)


def differences(before: Mapping[str, Any], config: RunConfig) -> list[str]:
    """What differs from another configuration, of all that matters to the training but the mesh, a line each."""
    lines = [
        f"{key}: {was}, now {value}"
        for key, was, value in _different(before, as_dict(config))
        if not key.startswith(("mesh.", "devices."))  # -1 there means whatever devices there are
    ]
    if config.optim.schedule == "cosine" and any(line.startswith("train.steps:") for line in lines):
        lines.append(f"the learning rate falls to its lowest at step {config.train.steps} now")
    return lines


def _different(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    old, new = dict(_flat(before)), dict(_flat(now))
    for key in dict.fromkeys((*new, *old)):
        if old.get(key, _NONE) != new.get(key, _NONE):
            yield key, old.get(key, _NONE), new.get(key, _NONE)


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, values in settings.items():
        if section not in _TRAINS_NOTHING:
            yield from ((f"{section}.{name}", value) for name, value in (values or {}).items())


def _earlier(folder: Path) -> dict[int, Path]:
    found = ((_EARLIER.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in found if match}


def _write(path: Path, settings: Mapping[str, Any]) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(yaml.safe_dump(dict(settings), sort_keys=False), encoding="utf-8")
    new.replace(path)
