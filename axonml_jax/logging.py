"""Messages that know their rank: a logger that prefixes it, printing once, and one seed for everything."""

import logging
import random
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import jax

logger = logging.getLogger("axonml_jax")
"""The library's logger. With several processes (or ranks of `spawn`) a message starts with its rank, as `[2/8] `."""


def print0(*args: Any, **kwargs: Any) -> None:
    """`print` in the main process only (under `spawn`: in rank 0 only)."""
    if _place()[0] == 0:
        print(*args, **kwargs)


def seed(n: int) -> "jax.Array":
    """Seed Python's and NumPy's generators, and give JAX's key: the same in every process.

    Args:
      n: an int from 0 to 2**32 - 1.

    Returns:
      `jax.random.key(n)`. Split or fold in a rank's index where ranks should differ.

    Raises:
      ValueError: when n is out of range.
    """
    if not 0 <= n < 2**32:
        raise ValueError(f"seed({n}): NumPy takes seeds from 0 to 2**32 - 1; choose one of those")
    import jax

    random.seed(n)
    np.random.seed(n)
    return jax.random.key(n)


def _place() -> tuple[int, int]:
    """Which process this is, and of how many; asking must not start JAX's devices in a process that is alone."""
    thread = threading.current_thread()
    if hasattr(thread, "rank"):  # a rank of `spawn` (mesh/ranks/spawn.py)
        return thread.rank, thread.world_size  # pyright: ignore[reportAttributeAccessIssue]
    if (jax := sys.modules.get("jax")) is None or not jax.distributed.is_initialized():
        return 0, 1
    return jax.process_index(), jax.process_count()


def _prefix_rank(record: logging.LogRecord) -> bool:
    index, count = _place()
    if count > 1:
        record.msg = f"[{index}/{count}] {record.msg}"
    return True


logger.addFilter(_prefix_rank)
