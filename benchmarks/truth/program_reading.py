"""Reads a lowered step: its collectives with groups and loops, and a hash that no order of independent operations changes.

The hash of a value is a hash of its operation, attributes, types and of its operands' hashes; called functions are inlined, so
it does not matter which inner functions JAX outlined. Names, locations and channel numbers do not count; mesh axes of degree 1
neither, so that a mesh may gain one.
"""

import collections
import hashlib
import itertools
import math
import re

import numpy as np

from axonml_jax.compat.jaxpr import parsed

SKIPPED = {"channel_handle", "sym_name", "callee", "use_global_device_ids"}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "collective_broadcast")
LOOPS, BRANCHES = ("stablehlo.while",), ("stablehlo.case", "stablehlo.if")


def read_program(lowered):
    """Collectives, operations by name, and the hash of everything that reaches the outputs."""
    return _Reader(lowered.as_text()).read()


def _hash(*parts):
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=12).hexdigest()


class _Reader:
    """One module with its functions and meshes by name."""

    def __init__(self, text):
        self.module = module = parsed(text)
        operations = [operation.operation for operation in module.body]
        named = lambda kind: {_symbol(op): op for op in operations if op.name == kind}
        self.functions = named("func.func")
        self.meshes = {name: _degrees(str(op.attributes["mesh"])) for name, op in named("sdy.mesh").items()}
        self.collectives, self.operations = collections.Counter(), collections.Counter()
        self.texts = {}

    def read(self):
        main = self.functions["main"]
        block = main.regions[0].blocks[0]
        values = {argument: _hash("argument", i, argument.type) for i, argument in enumerate(block.arguments)}
        outputs = self._block(block, values, ())
        return {
            "hash": _hash(*outputs),
            "collectives": dict(sorted(self.collectives.items())),
            "operations": dict(sorted(self.operations.items())),
        }

    def _block(self, block, values, path):
        """Hash every operation of a block, in order; what its terminator returns."""
        for each in block:
            op = each.operation
            operands = [values[operand] for operand in op.operands]
            if op.name.endswith(".return"):
                return operands
            if op.name == "func.call":
                inner = self.functions[str(op.attributes["callee"]).removeprefix("@").strip('"')].regions[0].blocks[0]
                results = self._block(inner, dict(zip(inner.arguments, operands, strict=True)), path)
            else:
                self.operations[op.name.removeprefix("stablehlo.")] += 1
                self._count(op, path)
                regions = [self._region(op, i, values, path) for i in range(len(op.regions))]
                types = [str(result.type) for result in op.results]
                whole = _hash(op.name, self._attributes(op), *operands, *types, *regions)
                results = [_hash(whole, i) for i in range(len(types))]
            values.update(zip(op.results, results, strict=True))
        return []

    def _region(self, op, index, values, path):
        """A region's hash: what it returns as a function of its arguments and of what it reads from outside."""
        if op.name in LOOPS:
            path = (*path, "loop")
        elif op.name in BRANCHES:
            path = (*path, f"branch {index} of {len(op.regions)}")
        hashes = []
        for block in op.regions[index].blocks:
            inside = dict(values)
            inside.update((a, _hash("inner", len(path), op.name, i, a.type)) for i, a in enumerate(block.arguments))
            hashes.append(_hash(*self._block(block, inside, path)))
        return _hash(*hashes)

    def _attributes(self, op):
        names = {getattr(each, "name", each) for each in op.attributes}  # older bindings give pairs
        return ";".join(f"{name}={self._attribute(op.attributes[name])}" for name in sorted(names - SKIPPED))

    def _attribute(self, attribute):
        if attribute not in self.texts:
            self.texts[attribute] = self._normal(str(attribute))
        return self.texts[attribute]

    def _normal(self, text):
        """An attribute without names of meshes and without axes of degree 1; groups of ranks spelt out."""
        text = re.sub(
            r"#stablehlo\.replica_group_mesh_axes<mesh = @(\w+), axes = \[(.*?)\]>",
            lambda found: self._groups(found[1], re.findall(r'name = "([^"]+)"', found[2])),
            text,
        )
        if "@" not in text and "manual_axes" not in text:
            return re.sub(r"dense<(\[.*\])> : tensor<\d+x\d+xi64>", r"\1", text)
        single = {axis for mesh in self.meshes.values() for axis, degree in mesh.items() if degree == 1}
        for axis in single:
            text = re.sub(rf'"{axis}"(, )?', "", text)
        return re.sub(r", ([\]}])", r"\1", re.sub(r"@\w*mesh\w*", "@mesh", text))

    def _groups(self, mesh, axes):
        degrees = self.meshes[mesh]
        ranks = np.arange(math.prod(degrees.values())).reshape(tuple(degrees.values()))
        names = list(degrees)
        order = [i for i, name in enumerate(names) if name not in axes] + [names.index(axis) for axis in axes]
        return str(ranks.transpose(order).reshape(-1, math.prod(degrees[axis] for axis in axes)).tolist())

    def _count(self, op, path):
        name = op.name.removeprefix("stablehlo.")
        if name not in KINDS:
            return
        arrays = op.results if name == "all_gather" else op.operands
        size = sum(_bytes(str(value.type)) for value in arrays)
        which = "source_target_pairs" if name == "collective_permute" else "replica_groups"
        groups = self._attribute(op.attributes[which])
        kinds = {str(value.type).split("x")[-1].rstrip(">").removeprefix("tensor<") for value in arrays}
        where = " in " + "/".join(path) if path else ""
        reduction = (
            []
            if not op.regions
            else [inner.operation.name.removeprefix("stablehlo.") for inner in op.regions[0].blocks[0]]
        )
        how = f" {reduction[0]}" if reduction else ""
        self.collectives[f"{name}{how} {size} B {'+'.join(sorted(kinds))} {groups.replace(' ', '')}{where}"] += 1


def _symbol(op):
    return str(op.attributes["sym_name"]).strip('"')


def _degrees(text):
    return {name: int(size) for name, size in re.findall(r'"([^"]+)"=(\d+)', text)}


def _bytes(text):
    """Bytes of a `tensor<2x8xbf16>`."""
    *dims, dtype = text.removeprefix("tensor<").removesuffix(">").split("x")
    bits = {"i1": 8}.get(dtype) or int(re.findall(r"\d+", dtype)[0]) * (2 if dtype.startswith("complex") else 1)
    return math.prod(map(int, dims)) * bits // 8


def differences(before, after):
    """What two Counters written as dicts differ in: name -> (before, after)."""
    names = itertools.chain(before, (name for name in after if name not in before))
    return {
        name: (before.get(name, 0), after.get(name, 0)) for name in names if before.get(name, 0) != after.get(name, 0)
    }
