"""Do all processes run the same thing? Asked before the first step; who differs is named instead of hanging in a collective.

`check_same` compares what a program says; `check_first_step` all that a trainer's step depends on, `check_first_gradients` and
`check_first_update` as much of a loop of one's own.
"""

import base64
import hashlib
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from axonml_jax.base import PyTree, named_leaves
from axonml_jax.compat.processes import coordinator_client, lost_processes
from axonml_jax.mesh.world import World
from axonml_jax.model.view import Variables
from axonml_jax.training.evaluate import Differentiate
from axonml_jax.training.run_state import CompareReplicas
from axonml_jax.training.state import TrainState
from axonml_jax.training.step import TrainStep

TIMEOUT = 600.0
"""Seconds that a trainer's first step waits for the other processes: one may load much longer than another."""

PROGRAM = "the traced program"
_SMALL, _SHOWN, _LONGEST = 4, 5, 200
_meetings: Counter[tuple[int, ...]] = Counter()
_REMEDIES = {
    "the plan": "Give every process the same model, plan and mesh",
    "leaf": "Give every process the same model and optimizer",
    "the batch": "A step takes the whole batch, the same in every process (ax.create_dataloader gives it, and "
    "jax.make_array_from_process_local_data makes it of rows that each process has for itself)",
    "the value": "Give every process the same optimizer, seed and checkpoint",
    "the first values": "Give every process the same seed or the same file; or call model.sync_parameters() before the first "
    "step, which gives all the first rank's. Values that are split over processes are mixed already where they differ: load "
    "one process's, model.load_state_dict(ax.broadcast_object(values, world.default_group()))",
    PROGRAM: "A learning rate, another constant of the optimizer, the loss function and its options, and a branch on the rank "
    "stand in it: give every process the same ones",
}


def check_same(what: str, said: Mapping[str, Any], world: World) -> None:
    """Compare what every process says. All must call it; a process alone has nothing to compare.

    Args:
      what: a name for this comparison, used once in a job.
      said: names and plain values that must be equal in all processes, the most telling first.
      world: of this process; its timeout is how long the others may take to come here.

    Raises:
      ValueError: in every process, with the first name that differs and the processes on each side.
      TimeoutError: naming the processes that did not come.
    """
    if world.num_processes == 1:
        return
    everyone = range(world.num_processes)
    heard = _exchange(f"{what}/", what, json.dumps(said), everyone, world.process_index, world.timeout)
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
    """`check_first_step` of a loop of one's own, before its first gradients; of its optimizer nothing is known here."""
    state = TrainState(step=None, variables=variables, opt_state=None, key=key)  # pyright: ignore[reportArgumentType]
    _check_first(differentiate, state, lambda shapes: differentiate.trace(variables, key, shapes), batch, given)


def check_first_update(variables: Variables) -> None:
    """Compare what an update of one's own has made of parameters that several devices hold; all processes call it.

    Raises:
      ValueError: in every process, with the devices and arrays that differ, and the remedy.
    """
    state = TrainState(step=None, variables=variables, opt_state=None, key=None)  # pyright: ignore[reportArgumentType]
    if unequal := CompareReplicas()(state):
        found = "".join(f"\n  {each}" for each in unequal[:_SHOWN])
        raise ValueError(
            f"the first update did not leave the processes' parameters alike:{found}\nA learning rate or another constant of "
            "the optimizer, or what was done with the gradients, is not the same: give every process the same"
        )


def _check_first(
    step: TrainStep | Differentiate,
    state: TrainState,
    trace: Callable[[PyTree], Any],
    batch: PyTree,
    given: Mapping[str, str],
) -> None:
    processes = tuple(sorted({device.process_index for device in step.mesh.devices.flat}))
    if len(processes) == 1:
        return
    _meetings[processes] += 1
    where = f"first step {processes} {_meetings[processes]}"
    text = program_text(trace(jax.tree.map(_shape, batch)))
    # Within a round of DiLoCo ranks are independent, but begin as one.
    own = {} if step.placement.plan.independent and state.rounds is None else given
    placed = {f"the first values of {name}": f"{crc} (checksum)" for name, crc in own.items()}
    said = _of_plan(step) | _of_shapes(state) | placed | _of_values(state) | _of_batch(batch) | {PROGRAM: _digest(text)}
    if found := differences(said, text.splitlines(), where, processes, jax.process_index()):
        raise ValueError(_refusal(found))
    if unequal := CompareReplicas()(state):
        raise ValueError(_refusal([f"the value of arrays of the state: {each}" for each in unequal]))


def checksums(named: Mapping[str, Any]) -> dict[str, str]:
    """Checksums of arrays that this process has whole, by name; nothing where it runs alone, which has nothing to compare."""
    if jax.process_count() == 1:
        return {}
    return {name: _checksum(x) for name, x in named.items() if _is_whole_here(x)}


def still_own(given: Mapping[str, str], resting: Mapping[str, Any]) -> dict[str, str]:
    """Of checksums of what each process has placed those that count after `sync_parameters`: of values not all the first's.

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
    """A digest of a training step as it is traced; nothing runs, and addresses of Python objects do not count."""
    return _digest(program_text(step.trace(state, batch)))


def program_text(traced: Any) -> str:
    """A program as it is traced, in the same words in every process, and checksums of the arrays that it closes over."""
    jaxpr = traced.jaxpr
    held = [f"closed over: {_checksum(x) if _is_whole_here(x) else type(x).__name__}" for x in jaxpr.consts]
    return "\n".join([_in_same_words(str(jaxpr)), *held])


def first_difference(said: Mapping[int, Mapping[str, Any]]) -> str | None:
    """The first thing that is not the same in all, with the processes on each side; None when all agree.

    >>> first_difference({0: {"seed": 1}, 1: {"seed": 2}, 2: {"seed": 1}})
    'seed is 1 in process(es) [0, 2], 2 in process(es) [1]'
    """
    return next(_all_differences(said), None)


def _all_differences(said: Mapping[int, Mapping[str, Any]]):
    for name in dict.fromkeys(key for each in said.values() for key in each):
        sides: dict[str, list[int]] = {}
        for process, each in sorted(said.items()):
            sides.setdefault(str(each.get(name, "not there")), []).append(process)
        if len(sides) > 1:
            yield f"{name} is " + ", ".join(f"{value} in process(es) {who}" for value, who in sides.items())


def differences(
    said: Mapping[str, str], lines: Sequence[str], where: str, processes: Sequence[int], me: int
) -> list[str]:
    """What differs between processes, in words, the same in all.

    Only a digest travels where nothing does; of processes that say the same one speaks for all.

    Args:
      said: by this process, the most telling first.
      lines: of its program, of which the first that differs is told.
      where: a name for this comparison, used once.
      processes: that compare, and `me` among them.

    Raises:
      TimeoutError: naming the processes that did not come.
    """
    heard = _exchange(f"{where}/digests/", "the first step", _digest(json.dumps(said)), processes, me, TIMEOUT)
    speakers = {digest: process for process, digest in sorted(heard.items(), reverse=True)}
    if len(speakers) == 1:
        return []
    speaks = me in speakers.values()
    told = {**said, "lines": [_digest(line) for line in lines]}
    spoken = _exchange(f"{where}/all/", "the first step", _packed(told) if speaks else None, processes, me, TIMEOUT)
    known = {process: _unpacked(text) for process, text in spoken.items()}
    hashes = [each.pop("lines") for _, each in sorted(known.items())]
    place = next((i for i, row in enumerate(itertools.zip_longest(*hashes)) if len(set(row)) > 1), None)
    found = list(_all_differences({process: known[speakers[digest]] for process, digest in heard.items()}))
    if place is not None:
        line = "".join(lines[place : place + 1]).strip()[:_LONGEST]
        rows = _exchange(f"{where}/line/", "the first step", line if speaks else None, processes, me, TIMEOUT)
        said_there = ", ".join(f"`{row}` in process {process}" for process, row in sorted(rows.items()))
        found = [f"{each}, first in {said_there}" if each.startswith(PROGRAM) else each for each in found]
    return found


def _refusal(found: Sequence[str]) -> str:
    more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    remedy = next(text for prefix, text in _REMEDIES.items() if found[0].startswith(prefix))
    lines = "".join(f"\n  {each}" for each in found[:_SHOWN])
    return f"the processes do not begin this training alike:{lines}{more}\n{remedy}"


def _of_plan(step: TrainStep | Differentiate) -> dict[str, str]:
    mesh, plan = step.mesh, step.placement.plan
    return {"the plan": _in_same_words(f"{plan} on {dict(mesh.shape)}, devices {[d.id for d in mesh.devices.flat]}")}


def _of_shapes(state: TrainState) -> dict[str, str]:
    return {f"leaf {name}": f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in _arrays(state).items()}


def _of_values(state: TrainState) -> dict[str, str]:
    """Numbers that are the same everywhere: the step, the seed, what an optimizer keeps of its constants.

    Not buffers, which may be every rank's own.
    """
    numbers = {n: leaf for n, leaf in _arrays(state).items() if not n.startswith("variables/")}
    small = {n: leaf for n, leaf in numbers.items() if leaf.size <= _SMALL and leaf.is_fully_replicated}
    return {f"the value of {name}": str(_here(leaf).tolist()) for name, leaf in small.items()}


def _arrays(state: TrainState) -> dict[str, jax.Array]:
    return {name: leaf for name, leaf in named_leaves(state).items() if isinstance(leaf, jax.Array)}


def _of_batch(batch: PyTree) -> dict[str, str]:
    leaves = named_leaves(batch)
    said = {
        f"the batch's leaf {n or 'batch'}": f"{s.dtype}{list(s.shape)}" for n, x in leaves.items() for s in [_shape(x)]
    }
    own = {n: x for n, x in leaves.items() if _is_whole_here(x)}
    return said | {f"the batch's values of {name or 'batch'}": f"{_checksum(x)} (checksum)" for name, x in own.items()}


def _exchange(
    folder: str, what: str, said: str | None, processes: Sequence[int], me: int, timeout: float
) -> dict[int, str]:
    """What those processes say that say something, by process, once all have come."""
    client, folder = coordinator_client(), f"axonml_jax/same/{folder}"
    if said is not None:
        client.key_value_set(f"{folder}{me}", said)
    come = f"{folder[:-1]} come/"
    client.key_value_set(f"{come}{me}", "")
    try:
        client.wait_at_barrier(folder, int(1000 * timeout), list(processes))
    except jax.errors.JaxRuntimeError as error:
        missing = sorted(set(processes) - _heard(client, come).keys())
        lost = lost_processes(error)
        raise TimeoutError(
            f"process(es) {lost or missing} did not come to compare their {what} within {timeout:g} s: they have failed, or "
            "load or compile much longer than the others"
        ) from error
    return _heard(client, folder)


def _heard(client: Any, folder: str) -> dict[int, str]:
    return {int(key.rsplit("/", 1)[1]): text for key, text in client.key_value_dir_get(folder)}


def _in_same_words(text: str) -> str:
    """Without addresses, and with sets in order, which Python's hashes of strings shuffle in each process.

    >>> _in_same_words("axes=frozenset({'fsdp', 'data'}) fn=<f at 0x7f1b>")
    "axes=frozenset({'data', 'fsdp'}) fn=<f at >"
    """
    text = re.sub(r"0x[0-9a-f]+", "", text)
    return re.sub(r"\{([^{}:\n]*)\}", lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _packed(said: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(said).encode())).decode()


def _unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


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


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(x), jax.numpy.result_type(x))
