"""What surrounds the code that is being traced: its trace, JAX's settings, the mesh axes that are bound, the platform."""

from collections.abc import Hashable
from typing import Any

import jax
from jax._src.config import trace_context
from jax._src.core import trace_state_clean
from jax.extend.core import get_opaque_trace_state
from jax.sharding import Mesh


def current_trace() -> Any:
    """The trace that this code runs in: equal to another exactly where values of one may be used in the other.

    Inside `jax.checkpoint`, a scan's body or another traced function it differs from what is around them.
    """
    return get_opaque_trace_state()


def is_traced_around() -> bool:
    """Whether a function of JAX's (`jit`, `grad`, `vmap`, `scan`) is tracing this code: what it makes may be no arrays."""
    return not trace_state_clean()


def trace_settings() -> Hashable:
    """JAX's settings that a traced program depends on, such as `jax.default_matmul_precision`, in this thread, as one value.

    `jax.jit` traces anew where they differ; so must whoever keeps what was traced.
    """
    return trace_context()


def manual_axes() -> frozenset[str]:
    """The mesh axes over which the code being traced runs inside `shard_map`: those that varying types are about.

    Axes that `shard_map` leaves to the partitioner are none of them, nor is an axis that only `vmap` names.
    """
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def platform_around(mesh: Mesh | None = None) -> str:
    """What is compiled for, as devices name it ("cpu", "gpu", "tpu").

    Args:
      mesh: where the program will run; None: the mesh around this code, if any, else the default backend.
    """
    around = jax.sharding.get_abstract_mesh() if mesh is None else mesh.abstract_mesh
    device = None if around.empty else around.abstract_device
    return jax.default_backend() if device is None else device.platform
