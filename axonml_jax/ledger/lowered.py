"""Count the collectives of a lowered program (StableHLO): what JAX hands to the compiler, before XLA touches it."""

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from axonml_jax.compat.stablehlo import parsed
from axonml_jax.ledger.entry import Branch, Collective, Loop

_KINDS: dict[str, str] = {
    "stablehlo.all_reduce": "all_reduce",
    "stablehlo.all_gather": "all_gather",
    "stablehlo.reduce_scatter": "reduce_scatter",
    "stablehlo.all_to_all": "all_to_all",
    "stablehlo.collective_permute": "permute",
    "stablehlo.collective_broadcast": "broadcast",
}
_Path = tuple[Loop | Branch, ...]
_REDUCTIONS = {"stablehlo.add": "sum", "stablehlo.maximum": "max", "stablehlo.minimum": "min"}
_DTYPES = {"i1": "bool", "bf16": "bfloat16", "complex<f32>": "complex64", "complex<f64>": "complex128"}


def collectives_in_lowered(program: Any) -> tuple[Collective, ...]:
    """Every collective of a lowered program, in program order.

    A function called from two places counts at both. Trip counts are not read, so every loop is a `Loop(trips=None)`;
    names of axes are not either, because older JAX does not write them.

    Args:
      program: StableHLO as text, or anything whose `as_text()` gives it (`jax.jit(f).lower(...)`).

    Returns:
      A tuple of `Collective`; a permute's group size is 0, which its text does not tell.
    """
    text = program if isinstance(program, str) else program.as_text()
    module = parsed(text)  # alive while it is read
    return tuple(_Reader(module).read())


class _Reader:
    """One module with its functions and meshes by name."""

    def __init__(self, module: Any) -> None:
        operations = [operation.operation for operation in module.body]
        self.functions = {_symbol(op): op for op in operations if op.name == "func.func"}
        self.meshes = {
            _symbol(op): _mesh_sizes(str(op.attributes["mesh"])) for op in operations if op.name == "sdy.mesh"
        }

    def read(self) -> Iterator[Collective]:
        yield from self._regions(self.functions["main"], ())

    def _regions(self, op: Any, path: _Path) -> Iterator[Collective]:
        """The collectives inside an operation, one more step down the path if it is a loop or a conditional."""
        for index, region in enumerate(op.regions):
            inside = path
            if op.name == "stablehlo.while":
                inside = (*path, Loop())
            elif op.name in ("stablehlo.case", "stablehlo.if"):
                inside = (*path, Branch(index, len(op.regions)))
            for block in region:
                for inner in block:
                    yield from self._operation(inner.operation, inside)

    def _operation(self, op: Any, path: _Path) -> Iterator[Collective]:
        kind = _kind(op)
        if kind:
            yield self._collective(op, kind, path)
        elif op.name == "func.call":
            yield from self._regions(self.functions[str(op.attributes["callee"]).removeprefix("@").strip('"')], path)
        else:
            yield from self._regions(op, path)

    def _collective(self, op: Any, kind: str, path: _Path) -> Collective:
        arrays = op.results if kind == "all_gather" else op.operands
        arrays = list(arrays)[:1] if kind == "ragged_all_to_all" else list(arrays)
        types = [_tensor(str(value.type)) for value in arrays]
        return Collective(
            kind=kind,
            op=_reduction(op) if kind in ("all_reduce", "reduce_scatter") else "",
            group_size=self._group_size(op, kind),
            dtype=types[0][0],
            itemsize=np.dtype(types[0][0]).itemsize,
            leaf_elements=tuple(elements for _, elements in types),
            path=path,
        )

    def _group_size(self, op: Any, kind: str) -> int:
        """Ranks per group, from explicit groups (one row each, short rows padded) or from mesh axes."""
        if kind == "permute":
            return 0
        text = str(op.attributes["backend_config" if kind == "ragged_all_to_all" else "replica_groups"])
        axes = re.search(r"mesh = @(\w+), axes = \[(.*)\]", text)
        if axes:
            sizes = self.meshes[axes.group(1)]
            return math.prod(sizes[name] for name in re.findall(r'name = "([^"]+)"', axes.group(2)))
        return int(re.findall(r"tensor<\d+x(\d+)xi64>", text)[-1])


def _symbol(op: Any) -> str:
    return str(op.attributes["sym_name"]).strip('"')


def _mesh_sizes(text: str) -> dict[str, int]:
    return {name: int(size) for name, size in re.findall(r'"([^"]+)"=(\d+)', text)}


def _kind(op: Any) -> str:
    if op.name == "stablehlo.custom_call" and "ragged_all_to_all" in str(op.attributes["call_target_name"]):
        return "ragged_all_to_all"
    return _KINDS.get(op.name, "")


def _reduction(op: Any) -> str:
    """What a reduction's region computes, or an empty string for anything but a sum, maximum or minimum."""
    names = [inner.operation.name for inner in op.regions[0].blocks[0]]
    return next((_REDUCTIONS[name] for name in names if name in _REDUCTIONS), "")


def _tensor(text: str) -> tuple[str, int]:
    """Numpy's name and the number of elements of a `tensor<2x8xf32>`."""
    body = text.removeprefix("tensor<").removesuffix(">")
    dims = re.match(r"(?:\d+x)*", body)
    assert dims is not None
    return _dtype_name(body[dims.end() :]), math.prod(int(dim) for dim in dims.group().split("x") if dim)


def _dtype_name(text: str) -> str:
    if text in _DTYPES:
        return _DTYPES[text]
    if text.startswith("f8"):
        return "float8_" + text[2:].lower()
    return re.sub(r"^(ui|i|f)(\d+)$", lambda m: {"ui": "uint", "i": "int", "f": "float"}[m[1]] + m[2], text)
