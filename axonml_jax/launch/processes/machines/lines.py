"""The lines of one launcher to others of its job: what is told to all, what each has said, and whose line is dead."""

from collections.abc import Sequence

from axonml_jax.launch.processes.machines.connection import SILENCE, Connection
from axonml_jax.launch.processes.machines.news import is_news
from axonml_jax.launch.processes.supervise import print_note


class Lines:
    """One line to each of some nodes; close them when nothing more is said.

    Args:
      nnodes: number of machines of the job, the largest.
    """

    def __init__(self, nnodes: int):
        self._nnodes = nnodes
        self._lines: dict[int, Connection] = {}

    def add(self, node: int, line: Connection) -> None:
        """A launcher has called, or was called."""
        self._lines[node] = line

    def drop(self, node: int, farewell: dict | None = None) -> None:
        """Hang up on one, with a last word where there is one; nothing, where that has been done."""
        if (line := self._lines.pop(node, None)) is not None:
            if farewell is not None:
                line.send(farewell)
            line.close()

    def sources(self) -> Sequence[Connection]:
        """What to select on."""
        return [line for line in self._lines.values() if not line.cut]

    def tell(self, message: dict, but: int | None = None) -> None:
        """Say something to all but one."""
        for node, line in self._lines.items():
            if node != but:
                line.send(message)

    def beat(self) -> None:
        """Show all that this launcher does not stand still."""
        for line in self._lines.values():
            line.beat()

    def hear(self) -> list[tuple[int, dict]]:
        """What the others have said since the last call; what no launcher says is ignored, with a word."""
        heard = []
        for node, line in self._lines.items():
            for message in line.messages():
                if is_news(message, self._nnodes):
                    heard.append((node, message))
                else:
                    said = list(message)[:5]
                    print_note(f"ignored what the launcher of node {node} said, which no launcher says: {said}")
        return heard

    def dead(self, silent: bool = True) -> list[tuple[int, str]]:
        """The nodes whose line is cut, and what has become of each, in words.

        Args:
          silent: whether those count too that stand still.
        """
        cut = "has gone without a word: killed, or its machine lost"
        still = f"has said nothing for {SILENCE:g} s: it was stopped, or writes to what takes nothing"
        return [
            (node, f"the launcher of node {node} {cut if line.cut else still}")
            for node, line in self._lines.items()
            if line.cut or (silent and line.silent)
        ]

    def close(self) -> None:
        """Hang up on all."""
        for line in self._lines.values():
            line.close()
