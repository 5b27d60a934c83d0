"""What the processes of a job tell each other before copies are made: machines, shards, sizes."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from axonml_jax.checkpoint.memory.handed import GENERATIONS
from axonml_jax.checkpoint.memory.partners import to_send
from axonml_jax.checkpoint.team import Team
from axonml_jax.logging import logger
from axonml_jax.mesh.kept_memory import machine_memory

SHARE = 0.5
"""Of a machine's memory, what copies may take at most."""

_RESTARTS = "AXONML_JAX_RESTART_COUNT"  # of the launcher


@dataclass(frozen=True)
class Members:
    """Every process of the job, by rank.

    Attributes:
      nodes: its machine.
      shards: what it holds (`shard_name`).
      sizes: bytes of that.
      own: whether copies are made at all.
      partners: whether other machines keep some too.
    """

    nodes: tuple[int, ...]
    shards: tuple[str, ...]
    sizes: tuple[int, ...]
    own: bool = True
    partners: bool = True

    @property
    def keepers(self) -> tuple[int | None, ...]:
        """Whom it sends its copies to; None: nobody needs one."""
        if not (self.own and self.partners):
            return (None,) * len(self.nodes)
        counts = [len(list(same)) for _, same in itertools.groupby(self.nodes)]
        return to_send(counts, self.shards)

    def kept_by(self, rank: int) -> tuple[int, ...]:
        """The processes whose copies a process keeps."""
        return tuple(other for other, keeper in enumerate(self.keepers) if keeper == rank)

    def bytes_on(self, node: int) -> int:
        """Bytes of all copies on a machine."""
        count = GENERATIONS if self.own else 0
        return count * sum(
            self.sizes[rank] + sum(self.sizes[other] for other in self.kept_by(rank))
            for rank, here in enumerate(self.nodes)
            if here == node
        )


def gather(team: Team, environ: Mapping[str, str], shard: str, size: int) -> Members:
    """Hear from all processes; each must call it.

    Args:
      team: the processes.
      environ: the launcher's variables.
      shard: what this process holds.
      size: bytes of that.

    Raises:
      ValueError: in every process, see `within_memory`.
    """
    own = {"node": int(environ["NODE_RANK"]), "shard": shard, "size": size, "memory": machine_memory()}
    own["again"] = environ.get(_RESTARTS, "0") != "0"
    said = team.tell_all("prepare copies of the state in memory", own)
    nodes, shards, sizes = (tuple(each[name] for each in said) for name in ("node", "shard", "size"))
    members = Members(nodes, shards, sizes)
    again = any(each["again"] for each in said)
    members, warning = within_memory(members, {each["node"]: each["memory"] for each in said}, again)
    if warning and team.leads:
        logger.warning("%s", warning)
    return members


def within_memory(members: Members, memory: Mapping[int, int], again: bool) -> tuple[Members, str]:
    """The members, whose copies take no more of any machine's memory than their share, and a warning of what they lack.

    Args:
      members: as they would be.
      memory: bytes of every machine.
      again: whether the job has run already. On fewer machines each may have to keep twice as much: then the job goes on with
        as many copies as fit. At the first start it is refused.

    Raises:
      ValueError: naming the machines whose memory is too small for the copies.
    """
    if not (over := _over(members, memory)):
        return members, ""
    said = f"copies of the state in memory would take {over}, more than {SHARE:.0%}"
    if not again:
        raise ValueError(f"{said}: split the state over more processes (fsdp), or set checkpoint.memory_every=null")
    alone, then = replace(members, partners=False), "goes back to the last checkpoint on disk"
    if _over(alone, memory):
        return replace(alone, own=False), f"{said}: none are made on these machines, and a restart {then}"
    return alone, f"{said}: machines keep no copies of each other's state, and the loss of one {then}"


def _over(members: Members, memory: Mapping[int, int]) -> str:
    """What is too much, by machine."""
    taken = {node: members.bytes_on(node) for node in memory}
    over = {node: size for node, size in taken.items() if size > SHARE * memory[node]}
    lines = [f"{size / 1e9:.3g} GB of {memory[node] / 1e9:.3g} GB on node {node}" for node, size in over.items()]
    return ", ".join(lines)
