"""What the processes of a job tell each other before copies are made: machines, shards, sizes."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from axonml_jax.checkpoint.memory.handed import GENERATIONS
from axonml_jax.checkpoint.memory.partners import to_send
from axonml_jax.checkpoint.team import Team
from axonml_jax.mesh.kept_memory import machine_memory

SHARE = 0.5
"""Of a machine's memory, what copies may take at most."""


@dataclass(frozen=True)
class Members:
    """Every process of the job, by rank.

    Attributes:
      nodes: its machine.
      shards: what it holds (`shard_name`).
      sizes: bytes of that.
    """

    nodes: tuple[int, ...]
    shards: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def keepers(self) -> tuple[int | None, ...]:
        """Whom it sends its copies to; None: nobody needs one."""
        counts = [len(list(same)) for _, same in itertools.groupby(self.nodes)]
        return to_send(counts, self.shards)

    def kept_by(self, rank: int) -> tuple[int, ...]:
        """The processes whose copies a process keeps."""
        return tuple(other for other, keeper in enumerate(self.keepers) if keeper == rank)

    def bytes_on(self, node: int) -> int:
        """Bytes of all copies on a machine."""
        return GENERATIONS * sum(
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
      ValueError: in every process, naming the machines whose memory is too small for the copies.
    """
    own = {"node": int(environ["NODE_RANK"]), "shard": shard, "size": size, "memory": machine_memory()}
    said = team.tell_all("prepare copies of the state in memory", own)
    members = Members(*(tuple(each[name] for each in said) for name in ("node", "shard", "size")))
    memory = {each["node"]: each["memory"] for each in said}
    taken = {node: members.bytes_on(node) for node in memory}
    if over := {node: size for node, size in taken.items() if size > SHARE * memory[node]}:
        lines = [f"{size / 1e9:.3g} GB of {memory[node] / 1e9:.3g} GB on node {node}" for node, size in over.items()]
        raise ValueError(
            f"copies of the state in memory would take {', '.join(lines)}, more than {SHARE:.0%}: split the state over more "
            "processes (fsdp), or set checkpoint.memory_every=null"
        )
    return members
