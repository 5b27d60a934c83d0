"""Processes at JAX's edge: the coordination service, the cache of compiled programs, the choice of platform."""

import ctypes
import functools
import gc
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from types import FunctionType, SimpleNamespace
from typing import Any, NoReturn, Protocol

# --------------------------------------------------------------------------------------------------
# JAX's connection to the coordinator of a job of several processes: its key-value store and its barriers.
# --------------------------------------------------------------------------------------------------

# "Task 1 heartbeat timeout" of jax 0.12, "/job:jax_worker/replica:0/task:1" before it.
_TASK = re.compile(r"\b[Tt]ask[ :](\d+)")


class CoordinatorClient(Protocol):
    """Protocol of the coordinator's client, as far as it is used; failures raise `jax.errors.JaxRuntimeError`."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Sets a key; one that is set already only with `allow_overwrite`."""
        ...

    def key_value_increment(self, key: str, increment: int) -> int:
        """Adds to a key's number, 0 at first, and returns the sum."""
        ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """All whole keys under a folder (`key` ends with a slash), with their values."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Waits until a key is set, for at most the timeout in milliseconds, and returns its value."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Deletes a key, or the folder of that name."""
        ...

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int, process_ids: Sequence[int] | None = None) -> None:
        """Waits until these processes, or all, have called it; a name (`barrier_id`) can be used once. Milliseconds."""
        ...


def lost_processes(error: BaseException) -> list[int]:
    """The processes that JAX names as lost in an error; empty where it names none, as at a timeout.

    >>> lost_processes(RuntimeError("UNAVAILABLE: Task 1 heartbeat timeout. This indicates that the remote task has failed"))
    [1]
    """
    text = str(error)
    return sorted({int(number) for number in _TASK.findall(text)}) if "heartbeat" in text or "task has" in text else []


def coordinator_client() -> CoordinatorClient:
    """This process's client of the coordinator; only after `jax.distributed` has started."""
    # jax.distributed has no public handle to its key-value store and barriers; Orbax reads the same attribute.
    from jax._src import distributed

    client: Any = distributed.global_state.client
    assert client is not None, "several processes without jax.distributed"
    return client


def joined_as() -> tuple[int, int]:
    """(number of this process, number of processes) as given to `jax.distributed`; starts no backend."""
    from jax._src import distributed

    return distributed.global_state.process_id, distributed.global_state.num_processes


def cloud_tpu_place(environ: Mapping[str, str], timeout: float) -> tuple[str, int, int] | None:
    """(address of process 0, number of processes, number of this one) from the metadata of Google's cloud.

    Args:
      environ: environment variables.
      timeout: seconds to wait until the name of process 0's machine resolves.

    Returns:
      None where this is no virtual machine with TPUs, where the TPUs are of this machine alone, and where the metadata server
      does not answer or `TPU_SKIP_MDS_QUERY` is set.
    """
    # JAX looks for the chips when it is imported, and only its own detection knows how to ask the metadata.
    from jax._src import cloud_tpu_init
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster

    if not cloud_tpu_init.running_in_cloud_tpu_vm or "TPU_SKIP_MDS_QUERY" in environ:
        return None
    try:
        if not GceTpuCluster.is_env_present() or (count := GceTpuCluster.get_process_count()) == 1:
            return None
        address = GceTpuCluster.get_coordinator_address(round(timeout), environ.get("JAX_COORDINATOR_PORT"))
        return address, count, GceTpuCluster.get_process_id()
    except (ImportError, OSError):
        # No `requests`, or no metadata. Devices of several processes are then noticed when the backend starts (`sees_others`).
        return None


# --------------------------------------------------------------------------------------------------
# The persistent cache of compiled programs on the CPU: every process writes to it, where JAX lets process 0 alone write.
# --------------------------------------------------------------------------------------------------


def keep_in_every_process() -> None:
    """Makes every process write what it compiles for the CPU to JAX's persistent cache.

    JAX lets process 0 write for all. But a program's key on the CPU depends on which devices are the process's own, so the
    others never find what process 0 has written, and compile everything anew at every start. On other platforms, where keys
    agree, process 0 still writes alone.
    """
    from jax._src import compiler

    if not isinstance(compiler._cache_write, _Write):
        compiler._cache_write = _Write(compiler._cache_write)


class _Write:
    """JAX's function that writes a compiled program to its cache, in which every process writes programs for CPUs."""

    def __init__(self, usual: Callable):
        assert isinstance(usual, FunctionType)
        first = SimpleNamespace(global_state=SimpleNamespace(process_id=0))
        self._usual, self._takes = usual, inspect.signature(usual)
        self._as_first = FunctionType(usual.__code__, usual.__globals__ | {"distributed": first}, usual.__name__)

    @property
    def __signature__(self) -> inspect.Signature:
        return self._takes

    def __call__(self, *args: Any, **options: Any) -> None:
        backend = self._takes.bind(*args, **options).arguments["backend"]
        write = self._as_first if backend.platform == "cpu" else self._usual
        write(*args, **options)


# --------------------------------------------------------------------------------------------------
# Whether JAX has started its devices, and where gloo, which connects CPU processes, listens.
# --------------------------------------------------------------------------------------------------


def backend_started() -> bool:
    """Whether JAX has started a backend, which fixes the devices of this process."""
    # JAX has no public way to ask without starting one.
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def sees_others() -> bool:
    """Whether JAX has started with devices of several processes, which a slice of TPUs may have without a coordinator."""
    import jax

    return backend_started() and jax.process_count() > 1


def only_cpu() -> bool:
    """Whether JAX will start on CPUs: its options say so, or no accelerator's plugin is installed."""
    import jax  # the launcher reads this file and must not wait for JAX

    if jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        return jax.config.jax_platforms.split(",")[0] == "cpu"  # pyright: ignore[reportAttributeAccessIssue]
    found = (importlib.util.find_spec(name) for name in ("libtpu", "jax_plugins"))
    return not any(found) and not entry_points(group="jax_plugins")


def let_gloo_listen_on(**where: str) -> None:
    """Chooses where gloo listens. Call it before JAX's devices start; a call replaces earlier ones.

    Args:
      **where: `interface`, a network interface's name, or `hostname`, an address of this machine.
    """
    # JAX has no public option for it: its CPU client calls this function with the coordinator's client only.
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    make = _jax.make_gloo_tcp_collectives
    make = make.func if isinstance(make, functools.partial) else make
    _jax.make_gloo_tcp_collectives = functools.partial(make, **where)  # pyright: ignore[reportAttributeAccessIssue]


# --------------------------------------------------------------------------------------------------
# The status of a process that ends by SystemExit, which neither `sys.excepthook` nor `atexit` is given.
# --------------------------------------------------------------------------------------------------


def when_exiting(tell: Callable[[Any], None]) -> None:
    """Calls `tell` with the `code` of a SystemExit that nobody catches, before any function of `atexit` runs.

    CPython reads `code` when no frames of the program are left. This replaces that attribute's descriptor in the dict under the
    type's read-only view, in the whole process. On interpreters without that dict nothing is changed, and `tell` is not called.
    """
    members: Any = next(iter(gc.get_referents(SystemExit.__dict__)), None)
    own = members.get("code") if isinstance(members, dict) else None
    if own is None or not hasattr(own, "__set__"):
        return

    def code(error: SystemExit) -> Any:
        found = own.__get__(error)
        try:
            sys._getframe(1)
        except ValueError:  # nobody has called this but Python itself
            tell(found)
        return found

    members["code"] = property(code, own.__set__, own.__delete__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
    if sys.version_info < (3, 12):  # whose `sys.exit` raises the type and a status, of which no exception is made
        sys.exit = _exit


def _exit(status: Any = None, /) -> NoReturn:
    raise SystemExit(status)
