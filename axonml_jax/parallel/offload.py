"""What rests in host memory between its uses, by JAX's memory kinds."""

import enum

from axonml_jax.synonyms import member


class CPUOffload(enum.Enum):
    """What is kept in host memory (names as in AxonML; PyTorch's `CPUOffload(offload_params=True)` is FULL).

    NONE: nothing. PARAMS: parameters. OPTIMIZER_STATES: the optimizer's state. FULL: both, and gradients once they are
    reduced. Results are the same; the device holds less, and every step moves what was offloaded to it and back.
    """

    NONE = "none"
    PARAMS = "params"
    OPTIMIZER_STATES = "optimizer_states"
    FULL = "full"

    @classmethod
    def _missing_(cls, value: object) -> "CPUOffload | None":
        return member(cls, "offload", value)

    @property
    def params(self) -> bool:
        """Whether parameters rest on the host."""
        return self in (CPUOffload.PARAMS, CPUOffload.FULL)

    @property
    def optimizer(self) -> bool:
        """Whether the optimizer's state rests on the host."""
        return self in (CPUOffload.OPTIMIZER_STATES, CPUOffload.FULL)

    @property
    def gradients(self) -> bool:
        """Whether reduced gradients go to the host."""
        return self is CPUOffload.FULL
