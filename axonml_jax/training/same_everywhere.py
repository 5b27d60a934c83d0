"""Checks that all processes run the same program on the same data, before a collective would hang where one differs.

`check_same` compares what a program says; `check_first_step` all that a trainer's step depends on, `check_first_gradients` and
`check_first_update` as much of a loop of one's own; `SameBatches` what processes evaluate on.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from axonml_jax.base import PyTree, is_array, named_leaves
from axonml_jax.mesh.join import PROGRAM, digest_of, exchange, first_difference, unlike
from axonml_jax.mesh.world import World
from axonml_jax.model.view import Variables
from axonml_jax.sharding.batch import shapes_of
from axonml_jax.training.evaluate import Differentiate
from axonml_jax.training.run_state import CompareReplicas
from axonml_jax.training.state import TrainState
from axonml_jax.training.step import TrainStep

_SMALL, _SHOWN = 4, 5
_WHOLE_BATCH = (
    "the whole batch, the same in every process (ax.create_dataloader gives it, and jax.make_array_from_process_local_data "
    "makes it of rows that each process has for itself)"
)
_REMEDIES = {
    "the plan": "Give every process the same model, plan and mesh",
    "leaf": "Give every process the same model and optimizer",
    "the batch": f"A step takes {_WHOLE_BATCH}",
    "the value": "Give every process the same optimizer, seed and checkpoint",
    "the first values": "Give every process the same seed or the same file; or call model.sync_parameters() before the first "
    "step, which gives all ranks the first one's. Values that are split over processes are already a mixture of theirs: load "
    "one process's, model.load_state_dict(ax.broadcast_object(values, world.default_group()))",
    PROGRAM: "It contains the learning rate and other constants of the optimizer, the loss function and its options, and "
    "branches on the rank: give every process the same ones",
}


def check_same(what: str, said: Mapping[str, Any], world: World) -> None:
    """Compare named values over all processes, which must all call it; a process alone has nothing to compare.

    Args:
      what: a name for this comparison, used once in a job.
      said: names and plain values that must be equal in all processes, the most telling first.
      world: the world of this process; its timeout is how long the others may take to come here.

    Raises:
      ValueError: in every process, with the first name that differs and the processes on each side.
      TimeoutError: naming the processes that did not come.
    """
    if world.num_processes == 1:
        return
    everyone = range(world.num_processes)
    heard = exchange(f"{what}/", what, json.dumps(said), everyone, world.process_index, world.timeout)
    if difference := first_difference({process: json.loads(text) for process, text in heard.items()}):
        raise ValueError(
            f"the processes do not agree on their {what}: {difference}; start all with the same program, arguments and files"
        )


def check_first_step(step: TrainStep, state: TrainState, batch: PyTree, given: Mapping[str, str]) -> None:
    """Compare all that a step depends on in the processes of its mesh, which all call it; nothing runs but checksums.

    Args:
      step: about to be made.
      state: that it starts from.
      batch: as this process has it.
      given: checksums of the whole values that this process has placed itself, by name (`checksums`).

    Raises:
      ValueError: in every process, with what differs and the processes on each side, and the remedy.
      TimeoutError: naming the processes that did not come.
    """
    _check_first(step, state, lambda shapes: step.trace(state, shapes), batch, given)


def check_first_gradients(
    differentiate: Differentiate, variables: Variables, key: jax.Array, batch: PyTree, given: Mapping[str, str]
) -> None:
    """`check_first_step` for a user's own loop, before its first gradients; its optimizer is not known here."""
    state = TrainState(step=None, variables=variables, opt_state=None, key=key)  # pyright: ignore[reportArgumentType]
    _check_first(differentiate, state, lambda shapes: differentiate.trace(variables, key, shapes), batch, given)


def check_first_update(variables: Variables) -> None:
    """Compare the parameters after a user's own update on the devices that hold the same; all processes call it.

    Raises:
      ValueError: in every process, with the devices and arrays that differ, and the remedy.
    """
    state = TrainState(step=None, variables=variables, opt_state=None, key=None)  # pyright: ignore[reportArgumentType]
    if unequal := CompareReplicas()(state):
        found = "".join(f"\n  {each}" for each in unequal[:_SHOWN])
        raise ValueError(
            f"the first update made the processes' parameters different:{found}\nA learning rate or another constant of "
            "the optimizer, or what was done with the gradients, differs between processes: give every process the same"
        )


class SameBatches:
    """Compares the batches that the processes of a mesh give to a call, and their number.

    Shapes are compared each time, values where shapes are new. A global array is the same in all: of batches that have nothing
    else only the first of each shape is asked for.

    Args:
      mesh: whose processes compare.
      call: takes the batches; for the error.
    """

    def __init__(self, mesh: Mesh, call: str):
        self._devices = list(mesh.devices.flat)
        self._call = call
        self._seen = set()
        self._steps = 0
        self._alone = len({device.process_index for device in self._devices}) == 1

    def __call__(self, batch: PyTree, number: str = "") -> None:
        """Compare one batch; with its number, compare too that all processes have that many.

        Raises:
          ValueError: in every process, with what differs, the processes on each side, and the remedy.
          TimeoutError: naming the processes that did not come.
        """
        arrays, shapes = _arrays_of(batch)
        new = shapes not in self._seen
        if not self._alone and (new or any(map(_is_whole_here, arrays.values()))):
            self._compare(({number: "there"} if number else {}) | _of_batch(arrays, values=new))
        self._seen.add(shapes)

    def sometimes(self, batch: PyTree) -> None:
        """Compare some of many batches: the first of each shape, and numbers 1, 2, 4, 8 and so on. Raises as a call does."""
        self._steps += 1
        arrays, shapes = _arrays_of(batch)
        whole = any(map(_is_whole_here, arrays.values())) and self._steps & (self._steps - 1) == 0
        if not self._alone and (whole or shapes not in self._seen):
            self._compare(_of_batch(arrays))
        self._seen.add(shapes)

    def walk(self, batches: Iterable[PyTree]) -> Iterator[PyTree]:
        """Yields batches after comparing each; at the end compares that all processes have as many."""
        for number, batch in enumerate(batches, 1):
            self(batch, f"batch number {number}")
            yield batch
        self._compare({})

    def _compare(self, said: dict[str, str]) -> None:
        found = unlike(said, self._devices, f"batches of {self._call}")
        if found:
            lines = "".join(f"\n  {each}" for each in found[: 1 if found[0].startswith("batch number") else _SHOWN])
            raise ValueError(
                f"the processes do not give {self._call} the same batches:{lines}\nIt takes {_WHOLE_BATCH}"
            )


def _check_first(
    step: TrainStep | Differentiate,
    state: TrainState,
    trace: Callable[[PyTree], Any],
    batch: PyTree,
    given: Mapping[str, str],
) -> None:
    if len({device.process_index for device in step.mesh.devices.flat}) == 1:
        return
    text = program_text(trace(shapes_of(batch)))
    # Within a round of DiLoCo ranks are independent, but begin as one.
    own = {} if step.placement.plan.independent and state.rounds is None else given
    placed = {f"the first values of {name}": f"{crc} (checksum)" for name, crc in own.items()}
    said = (
        _of_plan(step) | _of_shapes(state) | placed | _of_values(state) | _of_batch(batch) | {PROGRAM: digest_of(text)}
    )
    if found := unlike(said, step.mesh.devices.flat, "first step", text.splitlines()):
        raise ValueError(_refusal(found))
    if unequal := CompareReplicas()(state):
        raise ValueError(_refusal([f"the value of arrays of the state: {each}" for each in unequal]))


def checksums(named: Mapping[str, Any]) -> dict[str, str]:
    """Checksums by name of arrays that this process has in full; none in a job of one process, which has nothing to compare."""
    if jax.process_count() == 1:
        return {}
    return {name: _checksum(x) for name, x in named.items() if _is_whole_here(x)}


def still_own(given: Mapping[str, str], resting: Mapping[str, Any]) -> dict[str, str]:
    """The checksums of values that `sync_parameters` has not replaced: those not held by devices of the first process alone.

    Args:
      given: see `check_first_step`.
      resting: the arrays as they lie on the devices, by the same names.
    """

    def all_of_the_first(array: Any) -> bool:
        if not isinstance(array, jax.Array):
            return False
        holders: dict[str, int] = {}
        order = array.sharding.mesh.devices.flat  # pyright: ignore[reportAttributeAccessIssue]
        parts = array.sharding.devices_indices_map(array.shape)
        for device in order:
            holders.setdefault(str(parts[device]), device.process_index)
        return set(holders.values()) == {order[0].process_index}

    return {name: crc for name, crc in given.items() if not all_of_the_first(resting.get(name))}


def program_hash(step: TrainStep, state: TrainState, batch: PyTree) -> str:
    """A digest of a traced training step; nothing runs, and addresses of Python objects do not count."""
    return digest_of(program_text(step.trace(state, batch)))


def program_text(traced: Any) -> str:
    """A traced program as text that is the same in every process, with checksums of the arrays that it closes over."""
    jaxpr = traced.jaxpr
    held = [f"closed over: {_checksum(x) if _is_whole_here(x) else type(x).__name__}" for x in jaxpr.consts]
    return "\n".join([_in_same_words(str(jaxpr)), *held])


def _refusal(found: Sequence[str]) -> str:
    more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    remedy = next(text for prefix, text in _REMEDIES.items() if found[0].startswith(prefix))
    lines = "".join(f"\n  {each}" for each in found[:_SHOWN])
    return f"the processes do not start this training from the same program, values or batch:{lines}{more}\n{remedy}"


def _of_plan(step: TrainStep | Differentiate) -> dict[str, str]:
    mesh, plan = step.mesh, step.placement.plan
    return {"the plan": _in_same_words(f"{plan} on {dict(mesh.shape)}, devices {[d.id for d in mesh.devices.flat]}")}


def _of_shapes(state: TrainState) -> dict[str, str]:
    return {f"leaf {name}": f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in _arrays(state).items()}


def _of_values(state: TrainState) -> dict[str, str]:
    """Small replicated numbers of a state by name: the step, the seed, constants that an optimizer keeps.

    Not buffers, which may be every rank's own.
    """
    numbers = {n: leaf for n, leaf in _arrays(state).items() if not n.startswith("variables/")}
    small = {n: leaf for n, leaf in numbers.items() if leaf.size <= _SMALL and leaf.is_fully_replicated}
    return {f"the value of {name}": str(_here(leaf).tolist()) for name, leaf in small.items()}


def _arrays(state: TrainState) -> dict[str, jax.Array]:
    return {name: leaf for name, leaf in named_leaves(state).items() if isinstance(leaf, jax.Array)}


def _arrays_of(batch: PyTree) -> tuple[dict[str, Any], tuple]:
    """The arrays of a batch by name, and a key of their names, dtypes and shapes."""
    arrays = {name: x for name, x in named_leaves(batch).items() if is_array(x)}
    return arrays, tuple((name, str(x.dtype), np.shape(x)) for name, x in arrays.items())


def _of_batch(batch: PyTree, *, values: bool = True) -> dict[str, str]:
    leaves = named_leaves(batch)
    said = {
        f"the batch's leaf {n or 'batch'}": f"{s.dtype}{list(s.shape)}"
        for n, x in leaves.items()
        for s in [shapes_of(x)]
    }
    own = {n: x for n, x in leaves.items() if values and _is_whole_here(x)}
    return said | {f"the batch's values of {name or 'batch'}": f"{_checksum(x)} (checksum)" for name, x in own.items()}


def _in_same_words(text: str) -> str:
    """Removes addresses from a text and sorts sets in it, which Python's hashes of strings shuffle in each process.

    >>> _in_same_words("axes=frozenset({'fsdp', 'data'}) fn=<f at 0x7f1b>")
    "axes=frozenset({'data', 'fsdp'}) fn=<f at >"
    """
    text = re.sub(r"0x[0-9a-f]+", "", text)
    return re.sub(r"\{([^{}:\n]*)\}", lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", text)


def _is_whole_here(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic) or (isinstance(x, jax.Array) and x.is_fully_addressable)


def _here(x: Any) -> np.ndarray:
    """An array, or this process's copy of one, on the host."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = x.addressable_data(0)
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _checksum(x: Any) -> str:
    array = np.ascontiguousarray(_here(x))
    return f"{zlib.crc32(array.reshape(-1).view(np.uint8)):08x}" if array.size else "empty"
