"""Canaries about `compat/processes/`: how processes start and meet, and the compiled programs that they keep."""

import inspect
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from axonml_jax.compat.canaries.canary import Canary, expect
from axonml_jax.compat.processes.coordination import CoordinatorClient
from axonml_jax.compat.processes.kept_programs import keep_in_every_process
from axonml_jax.compat.processes.platform import backend_started, let_gloo_listen_on

_SECOND = 1000


@contextmanager
def _alone() -> Iterator[CoordinatorClient]:
    """A client of a coordinator of one process."""
    from jax._src import distributed
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    expect(hasattr(distributed.global_state, "client"), "jax.distributed's state has no client")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, 1)
    client = _jax.get_distributed_runtime_client(address, 0, init_timeout=10, shutdown_on_destruction=False)
    client.connect()
    try:
        yield client
    finally:
        client.shutdown()
        service.shutdown()


def _coordinator() -> None:
    with _alone() as client:
        client.key_value_set("canary/a", "1")
        client.key_value_set("canary/a", "2", allow_overwrite=True)
        expect(_refused(lambda: client.key_value_set("canary/a", "3")), "a key is set twice without a word")
        counts = [client.key_value_increment("canary/n", by) for by in (1, 2)]
        expect(counts == [1, 3], f"counting 1 and 2 more gives {counts}")
        held = dict(client.key_value_dir_get("canary/"))
        expect(held == {"canary/a": "2", "canary/n": "3"}, f"a folder of two keys holds {held}")
        expect(
            client.blocking_key_value_get("canary/a", _SECOND) == "2",
            "a key that is set is not found by waiting for it",
        )
        expect(_refused(lambda: client.blocking_key_value_get("canary/b", 1)), "a key that is not set is found")
        client.key_value_delete("canary/a")
        expect(len(client.key_value_dir_get("canary/")) == 1, "a deleted key is still there")
        client.wait_at_barrier("canary", _SECOND)
        client.wait_at_barrier("canary of some", _SECOND, [0])


def _refused(call: Any) -> bool:
    try:
        call()
    except jax.errors.JaxRuntimeError:
        return True
    return False


def _gloo() -> None:
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    class Asked(Exception):
        pass

    asked: list[dict[str, Any]] = []

    def make(**given: Any) -> None:
        asked.append(given)
        raise Asked

    state, flag = distributed.global_state, "jax_cpu_collectives_implementation"
    made, client, chosen = _jax.make_gloo_tcp_collectives, state.client, getattr(jax.config, flag)
    expect("hostname" in str(made.__doc__) and "interface" in str(made.__doc__), f"gloo's maker takes {made.__doc__}")
    try:
        _jax.make_gloo_tcp_collectives, state.client = make, "client"
        jax.config.update(flag, "gloo")
        let_gloo_listen_on(hostname="canary")
        xla_bridge.make_cpu_client()
    except Asked:
        expect(asked[0].get("hostname") == "canary", f"JAX's CPU client makes gloo's collectives with {asked}")
    finally:
        _jax.make_gloo_tcp_collectives, state.client = made, client
        jax.config.update(flag, chosen)
    expect(bool(asked), "JAX's CPU client does not ask for gloo's collectives where we answer")


def _written_by_any() -> None:
    from jax._src import compilation_cache, compiler, distributed

    written: list[str] = []
    cpu, usual, state = jax.local_devices(backend="cpu")[0].client, compiler._cache_write, distributed.global_state
    put, process = compilation_cache.put_executable_and_time, state.process_id
    try:
        compilation_cache.put_executable_and_time = lambda key, *rest: written.append(key)
        state.process_id = 1
        keep_in_every_process()
        given: dict[str, Any] = {"cache_key": "canary", "compile_time_secs": 1e6, "module_name": "", "backend": cpu}
        given |= {"executable": None, "host_callbacks": []}
        takes = inspect.signature(compiler._cache_write).parameters  # jax 0.10 is told of callbacks too
        compiler._cache_write(**{name: given[name] for name in takes})
    finally:
        compilation_cache.put_executable_and_time, state.process_id = put, process
        compiler._cache_write = usual
    called = compiler._compile_and_write_cache.__code__.co_names
    expect("_cache_write" in called, f"what compiles and writes calls {called}")
    expect(written == ["canary"], f"process 1 has written {written}")


def _started() -> None:
    jax.devices()
    expect(backend_started(), "JAX has devices and says that no backend has started")


def _threads() -> None:
    asked, threads = os.environ.get("NPROC", ""), Path("/proc/self/task")
    if jax.devices()[0].platform != "cpu" or not asked or not threads.exists():
        return  # no simulated devices, or no way to see threads
    pool = [thread for thread in threads.glob("*/comm") if _name(thread).startswith("tf_XLAEigen")]
    expect(len(pool) >= int(asked), f"with NPROC={asked} XLA:CPU has {len(pool)} threads in its pool")


def _name(thread: Path) -> str:
    try:
        return thread.read_text()
    except OSError:
        return ""  # it has just ended


CANARIES = (
    Canary(
        "the coordinator's store",
        "The client of jax.distributed sets, counts, lists, waits for and deletes keys, and meets at barriers.",
        "Processes miss each other's word: a watchdog that hears nothing, checkpoints that wait in vain.",
        _coordinator,
    ),
    Canary(
        "where gloo listens",
        "JAX's CPU client calls make_gloo_tcp_collectives in jaxlib's module, which takes a host name or an interface.",
        "CPU processes of several machines cannot reach each other.",
        _gloo,
    ),
    Canary(
        "compiled programs of all processes",
        "JAX writes what it has compiled by `_cache_write` of its compiler, which asks whether this is process 0.",
        "CPU processes but the first compile everything anew at every start.",
        _written_by_any,
    ),
    Canary(
        "whether a backend has started",
        "JAX knows whether it has started a backend without starting one.",
        "Simulated devices are asked for too late, and are not there.",
        _started,
    ),
    Canary(
        "threads of simulated devices",
        "The environment variable NPROC sizes XLA:CPU's pool of threads when the backend starts (seen on Linux only).",
        "Simulated devices wait for each other for ever on machines with few cores.",
        _threads,
    ),
)
