"""What connects the devices of a mesh, as far as defaults of strategies depend on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The devices of a mesh and their network.

    Attributes:
      devices: of the mesh.
      torus: dims of the torus that TPU chips form; 0 for other devices.
      gloo: whether CPU processes talk over gloo, where many small reductions are slow.
    """

    devices: int
    torus: int = 0
    gloo: bool = False

    @classmethod
    def of(cls, devices: Sequence[Any]) -> "Fabric":
        """Of JAX devices."""
        processes = {device.process_index for device in devices}
        return cls(
            devices=len(devices), torus=_torus(devices), gloo=devices[0].platform == "cpu" and len(processes) > 1
        )


def _torus(devices: Sequence[Any]) -> int:
    if any(device.platform != "tpu" for device in devices):  # other devices may have coordinates of another meaning
        return 0
    return sum(len(set(along)) > 1 for along in zip(*(device.coords for device in devices), strict=True))
