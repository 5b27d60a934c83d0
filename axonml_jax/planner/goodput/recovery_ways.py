"""`Recovery`: what one way of getting a job back after a failure takes, part by part, and what its copies cost."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One way of recovery. Times are seconds, sizes bytes of one device, bandwidths bytes per second of one device.

    Copies of the state are made as the training goes on: a copy stops it for `blocked` seconds and can be returned to
    `commit` seconds after it began. A failure before that goes back to the copy before.

    Attributes:
      name: what it is called.
      notice: from a failure until it is known.
      replace: until a machine takes the place of the failed one; 0: a spare one waits.
      start: until all processes run and have found each other.
      compile: until their programs are compiled, or read from where they were kept.
      size: bytes of the state of one device.
      read: at which a device reads its state back.
      write: at which a device's copy is written behind the training's back; infinite: it is there when the training goes on.
      blocked: for which a copy stops the training.
      shrinks: whether the replicas of the model that live go on in the step that failed, without a copy, and are joined by the
        failed one when its machine is replaced. Else everybody waits for that machine and returns to the last copy.
    """

    name: str
    notice: float = 0.0
    replace: float = 0.0
    start: float = 0.0
    compile: float = 0.0
    size: float = 0.0
    read: float = float("inf")
    write: float = float("inf")
    blocked: float = 0.0
    shrinks: bool = False

    def __post_init__(self):
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, float | int)}
        wrong = {name: value for name, value in numbers.items() if not value >= 0}
        wrong |= {name: getattr(self, name) for name in ("read", "write") if not getattr(self, name) > 0}
        if wrong:
            raise ValueError(f"Recovery {self.name!r}: {wrong}: seconds and bytes are 0 or more, bandwidths above 0")

    @property
    def restore(self) -> float:
        """Seconds to read the state back."""
        return self.size / self.read

    @property
    def commit(self) -> float:
        """Seconds from the beginning of a copy until it can be returned to."""
        return self.blocked + self.size / self.write

    @property
    def pause(self) -> float:
        """Seconds from a failure until the training goes on."""
        if self.shrinks:
            return self.notice + self.compile
        return self.notice + self.replace + self.start + self.compile + self.restore

    @property
    def growing(self) -> float:
        """Seconds for which everybody waits when a replica joins again."""
        return self.start + self.compile + self.restore if self.shrinks else 0.0
