"""What the cost model assumes beside the hardware's figures, stated once."""

from dataclasses import dataclass

from axonml_jax.planner.hardware import Hardware

_NO_SHARES = ("host_bandwidth", "imbalance")


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Assumptions of the time that a plan takes.

    Attributes:
      efficiency: share of the peak FLOP/s that products reach while nothing is waited for.
      overlap: share of the compute time behind which gathers of parameters and reductions of gradients can hide.
      layer_overlap: the same of what the layers send themselves; 0, as a product waits for its input.
      blocks: of the efficiency, what attention reaches that reads positions of other ranks: it is computed block by block,
        where TPUs and GPUs have kernels for the positions of one rank. Not measured.
      imbalance: tokens of the busiest rank's experts over the mean, by which their products take longer; a round of a dispatch
        has slots for 1.25. Not measured.
      memory_margin: share of a device's memory that a plan may fill; the rest is for fragmentation and the runtime.
      host_bandwidth: bytes per second between a device and its host's memory.
    """

    efficiency: float = 0.5
    overlap: float = 0.7
    layer_overlap: float = 0.0
    blocks: float = 0.5
    imbalance: float = 1.25
    memory_margin: float = 0.9
    host_bandwidth: float = 16e9

    @classmethod
    def on(cls, hardware: Hardware, efficiency: float | None = None, **given: float) -> "Assumptions":
        """The defaults, but for what is given, with the efficiency that hardware reached which was measured with a model.

        On CPUs nothing overlaps: XLA:CPU begins no collective before it needs the result.
        """
        known = cls.efficiency if hardware.reached is None else hardware.reached
        hidden = {"overlap": 0.0} if hardware.platform == "cpu" else {}
        return cls(efficiency=known if efficiency is None else efficiency, **(hidden | given))

    def __post_init__(self):
        wrong = {name: value for name, value in vars(self).items() if not value >= 0 or value != value}
        wrong |= {name: value for name, value in vars(self).items() if name not in _NO_SHARES and value > 1}
        if wrong or self.imbalance < 1 or not self.efficiency or not self.blocks or not self.host_bandwidth:
            raise ValueError(
                f"Assumptions: {wrong or vars(self)}: shares lie between 0 and 1, and efficiency and blocks above 0; imbalance "
                "is at least 1"
            )
