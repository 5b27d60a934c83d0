"""What carries the messages: gloo (CPU processes), NCCL (GPU), the TPU's own network (simulated: mock, in world.py)."""

import abc

import jax
import jaxlib

from axonml_jax.compat.versions import installed


class Backend(abc.ABC):
    """The transport under a world. Its collectives are JAX's; this says which ones they are and on which devices.

    Subclass it to bring your own (`init(backend=YourBackend())`): `devices` then decides the world.

    Attributes:
      name: its short name, such as `gloo`.
    """

    name: str

    @property
    @abc.abstractmethod
    def version(self) -> str:
        """The version of the library that carries the messages."""

    @property
    @abc.abstractmethod
    def devices(self) -> tuple:
        """The device of every rank, in rank order (other processes' devices too)."""

    def synchronize(self) -> None:
        """Wait for everything this process has dispatched."""
        jax.effects_barrier()
        for array in jax.live_arrays():
            try:
                array.block_until_ready()
            except RuntimeError:
                # Another thread may have donated it meanwhile; its computation's results are in the list too.
                if not array.is_deleted():
                    raise

    def __eq__(self, other):
        return type(self) is type(other) and self.devices == other.devices

    def __hash__(self):
        return hash((type(self), self.devices))

    def __repr__(self):
        return f"{type(self).__name__}(name={self.name!r}, version={self.version!r}, devices={len(self.devices)})"


class _JaxBackend(Backend):
    """All devices of JAX's default platform, which must be the one the transport is for."""

    platform: str

    @property
    def version(self) -> str:
        """The version of jaxlib, which holds the transport."""
        return jaxlib.__version__  # pyright: ignore[reportPrivateImportUsage]

    @property
    def devices(self) -> tuple:
        """Every device of the job."""
        devices = tuple(jax.devices())
        if devices[0].platform != self.platform:
            raise ValueError(
                f"backend {self.name} needs {self.platform} devices, but JAX runs on {devices[0].platform}: leave "
                f"backend=None to take what fits, or set JAX_PLATFORMS={self.platform} before Python starts"
            )
        return devices


class GlooBackend(_JaxBackend):
    """CPU devices of several processes, talking over TCP."""

    name = "gloo"
    platform = "cpu"


class NCCLBackend(_JaxBackend):
    """GPUs."""

    name = "nccl"
    platform = "gpu"

    @property
    def version(self) -> str:
        """NCCL's version where its package is installed, else jaxlib's."""
        for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
            if found := installed(package):
                return found
        return super().version


class TPUBackend(_JaxBackend):
    """TPU chips over their inter-chip links."""

    name = "tpu"
    platform = "tpu"

    @property
    def version(self) -> str:
        """libtpu's version where its package is installed, else jaxlib's."""
        return installed("libtpu") or super().version
