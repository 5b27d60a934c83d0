"""Ranks that are real processes: they agree through JAX's coordinator, then run the same program on their sub-mesh."""

import hashlib
from typing import Any

import jax
from jax.sharding import Mesh

from axonml_jax.compat.processes.coordination import CoordinatorClient, coordinator_client
from axonml_jax.mesh.ranks.group_program import Program, place, row
from axonml_jax.mesh.ranks.rank_engine import Engine, check_agreement, describe


class ProcessEngine(Engine):
    """One member in this process, the others elsewhere; only members call.

    Before the program starts, its members meet at JAX's coordinator: a missing rank is named at the timeout and a
    disagreement is an error everywhere, where the transport alone (gloo, NCCL) would hang, abort, or cut lengths. The
    waiting for late ranks happens there too: gloo gives up after 30 s of skew.

    Args:
      ranks, sub_mesh: see `Engine`.
      rank: the member in this process.
      timeout: seconds to wait for the other members at a call.
    """

    def __init__(self, ranks: tuple[int, ...], sub_mesh: Mesh, rank: int, timeout: float):
        super().__init__(ranks, sub_mesh)
        self._rank = rank
        self._timeout = timeout

    def run(self, program: Program, value: Any, name: str) -> Any:
        """See `Engine.run`; ValueError in every member when names, trees, shapes or dtypes differ."""
        device = self.sub_mesh.devices.flat[self.ranks.index(self._rank)]
        own = place(value, device)
        self._meet(describe(name, own), name)
        return row(self._execute(program, [own]), device)

    def barrier(self) -> None:
        """See `Engine.barrier`."""
        self._meet("barrier()", "barrier()")

    def _meet(self, call: str, name: str) -> None:
        client = coordinator_client()
        where = f"axonml_jax/{hashlib.sha1(repr(self.ranks).encode()).hexdigest()}"
        # The coordinator counts each rank's calls, so that equal groups made anywhere in a process count together.
        generation = client.key_value_increment(f"{where}/calls/{self._rank}", 1)
        said = f"{where}/{generation}/"
        client.key_value_set(f"{said}{self._rank}", call)
        processes = [device.process_index for device in self.sub_mesh.devices.flat]
        try:
            client.wait_at_barrier(f"{where}/{generation}", int(self._timeout * 1000), processes)
        except jax.errors.JaxRuntimeError as error:
            missing = sorted(set(self.ranks) - _calls(client, said).keys())
            raise TimeoutError(
                f"{name} on ranks {list(self.ranks)}: rank(s) {missing} did not call it within {self._timeout:g} s, or "
                "their processes are gone; every member of a group must make the same calls in the same order"
            ) from error
        calls = _calls(client, said)
        # Every member is here, so every member has read what was said one generation ago.
        client.key_value_delete(f"{where}/{generation - 1}/{self._rank}")
        check_agreement(dict(sorted(calls.items())))


def _calls(client: CoordinatorClient, said: str) -> dict[int, str]:
    return {int(key.rsplit("/", 1)[1]): call for key, call in client.key_value_dir_get(said)}
