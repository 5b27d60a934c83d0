"""Parallel training for any Flax model in JAX: sharding specs over a mesh, explicit collectives, PyTorch-like facades.

`__init__.pyi` is the register of public names. A name's module is imported when the name is first used (PEP 562), so that
`import axonml_jax` costs little more than importing JAX.
"""

import importlib
import pathlib
import re
import sys
from typing import Any

__version__ = "0.1.0"

_MODULES: dict[str, str] = {
    name: module
    for module, name in re.findall(
        r"^from (\S+) import \(?\s*(\w+)", pathlib.Path(__file__).with_suffix(".pyi").read_text("utf-8"), re.MULTILINE
    )
}
__all__ = [*_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
