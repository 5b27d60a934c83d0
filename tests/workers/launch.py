"""Real processes for a test: a free port, a time limit, no child left behind, and flags by which XLA compiles them quickly."""

import contextlib
import importlib.metadata
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

OLDER_EMITTERS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
if tuple(map(int, importlib.metadata.version("jax").split(".")[:2])) >= (0, 11):
    OLDER_EMITTERS = {}  # jax 0.12 has the newer emitters of kernels only
EMITTERS = " ".join(f"--{name}={value}".lower() for name, value in OLDER_EMITTERS.items())
QUICK = f"--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true {EMITTERS}".strip()
"""XLA's flags for a program that runs a few times: compiling it well costs more than it gives."""


def launch(script, num_processes, timeout, *more):
    """Run `script PORT NUM_PROCESSES PROCESS_ID *MORE` as that many processes of one CPU device each.

    Returns: [(exit code, standard output, standard error)] by process. Raises TimeoutError after `timeout` seconds;
    every child is dead when this returns.
    """
    port = free_port()
    environment = {name: text for name, text in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    environment["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        paths = [(pathlib.Path(folder, f"{i}.out"), pathlib.Path(folder, f"{i}.err")) for i in range(num_processes)]
        children = []
        try:
            for i, (out, err) in enumerate(paths):
                command = [sys.executable, script, str(port), str(num_processes), str(i), *more]
                with out.open("w") as stdout, err.open("w") as stderr:
                    children.append(subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr))
            finished = wait(children, timeout)
        finally:
            for child in children:
                child.kill()
                child.wait()
        results = [
            (child.returncode, out.read_text(), err.read_text())
            for child, (out, err) in zip(children, paths, strict=True)
        ]
    if not finished:
        raise TimeoutError(f"{script} on {num_processes} processes took over {timeout} s:\n{results}")
    return results


def wait(children, timeout):
    """Whether all ended in time; a failure of one leaves the others five seconds."""
    deadline = time.monotonic() + timeout
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
        if any(child.poll() for child in children):
            deadline = min(deadline, time.monotonic() + 5)
    return all(child.poll() is not None for child in children)


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@contextlib.contextmanager
def hearing_ctrl_c():
    """Processes started here hear SIGINT, even where this one was told to ignore it (nohup, a shell's background)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
