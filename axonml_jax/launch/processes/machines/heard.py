"""What the launchers of a job have said, kept by attempt, because others may be an attempt ahead of this launcher."""

from collections import defaultdict

from axonml_jax.launch.processes.machines.start import Start
from axonml_jax.launch.processes.supervise import print_note
from axonml_jax.launch.processes.worker import Failure


class Heard:
    """What was said so far.

    Attributes:
      starts: the attempts that node 0 has announced.
      alarms: attempts in which a worker has failed.
      regroups: attempts that shall end because machines come or go.
      ended: by attempt and node, what failed there first when all workers had ended.
      well: by attempt, the machines on which all workers have ended with 0.
      gone: by attempt, the machines that have left it.
      lost: why no further attempt makes sense, in words; None while there may be one.
      status: the job's exit status, for those that wait for a place in it; None while it goes on.
    """

    def __init__(self):
        self.starts: dict[int, Start] = {}
        self.alarms: set[int] = set()
        self.regroups: set[int] = set()
        self.ended: defaultdict[int, dict[int, Failure | None]] = defaultdict(dict)
        self.well: defaultdict[int, set[int]] = defaultdict(set)
        self.gone: defaultdict[int, set[int]] = defaultdict(set)
        self.lost: str | None = None
        self.status: int | None = None

    def take(self, message: dict) -> None:
        """Take in a message that `is_news`."""
        if "alarm" in message:
            self.alarms.add(message["alarm"])
        elif "ended" in message:
            failure = message["failure"]
            lines = {"lines": tuple(failure["lines"])} if failure else {}
            self.ended[message["ended"]][message["node"]] = failure and Failure(**failure | lines)
            if message["well"]:
                self.well[message["ended"]].add(message["node"])
        elif "leave" in message:
            self.lost = self.lost or message["leave"]
        elif "start" in message:
            self.starts[message["start"]] = Start.of(message)
        elif "regroup" in message:
            self.regroups.add(message["regroup"])
        elif "gone" in message:
            print_note(message["why"])
            newest = max(self.starts, default=None)
            if newest is not None and message["gone"] in self.starts[newest].nodes:
                self.gone[newest].add(message["gone"])
        elif "over" in message:
            self.status = message["over"]

    def newest_with(self, node: int) -> int:
        """The newest attempt to which a machine belongs; -1: there is none."""
        return max((number for number, start in self.starts.items() if node in start.nodes), default=-1)

    def ends(self, number: int) -> bool:
        """Whether an attempt ends anyway."""
        return bool(number in self.regroups | self.alarms or self.gone[number] or self.ended[number])

    def all_ended(self, start: Start) -> bool:
        """Whether the workers of all machines that are left of an attempt have ended."""
        return set(start.nodes) - self.gone[start.number] <= self.ended[start.number].keys()
