"""Do all processes run the same thing? Asked before the first step; who differs is named instead of hanging in a collective."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import jax

from axonml_jax._types import PyTree
from axonml_jax.compat.processes.coordination import coordinator_client
from axonml_jax.mesh.world import World
from axonml_jax.training.state.train_state import TrainState
from axonml_jax.training.step import TrainStep


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
    client, folder = coordinator_client(), f"axonml_jax/same/{what}/"
    client.key_value_set(f"{folder}{world.process_index}", json.dumps(said))
    try:
        client.wait_at_barrier(folder, int(1000 * world.timeout))
    except jax.errors.JaxRuntimeError as error:
        missing = sorted(set(range(world.num_processes)) - _heard(client, folder).keys())
        raise TimeoutError(
            f"process(es) {missing} did not come to compare their {what} within {world.timeout:g} s: they have failed, or "
            "load or compile much longer than the others"
        ) from error
    if difference := first_difference(_heard(client, folder)):
        raise ValueError(
            f"the processes do not agree on their {what}: {difference}; start all with the same program, arguments and files"
        )


def program_hash(step: TrainStep, state: TrainState, batch: PyTree) -> str:
    """A digest of a training step as it is traced; nothing runs, and addresses of Python objects do not count."""
    text = re.sub(r"0x[0-9a-f]+", "", str(step.trace(state, batch).jaxpr))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def first_difference(said: Mapping[int, Mapping[str, Any]]) -> str | None:
    """The first thing that is not the same in all, with the processes on each side; None when all agree.

    >>> first_difference({0: {"seed": 1}, 1: {"seed": 2}, 2: {"seed": 1}})
    'seed is 1 in process(es) [0, 2], 2 in process(es) [1]'
    """
    for name in dict.fromkeys(key for each in said.values() for key in each):
        sides: dict[str, list[int]] = {}
        for process, each in sorted(said.items()):
            sides.setdefault(str(each.get(name, "not there")), []).append(process)
        if len(sides) > 1:
            return f"{name} is " + ", ".join(f"{value} in process(es) {who}" for value, who in sides.items())
    return None


def _heard(client, folder: str) -> dict[int, dict[str, Any]]:
    return {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in client.key_value_dir_get(folder)}
