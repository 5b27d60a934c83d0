"""Simulated devices in a fresh process: their number, thread pool and time limits, and a loop that is safe."""

import os
import subprocess
import sys

import pytest

FRESH = {
    "fake_devices sizes the thread pool and the time limits": """
        from axonml_jax.mesh.simulate import fake_devices
        fake_devices(12)
        import jax, os
        from axonml_jax.compat.versions import COLLECTIVES_HOLD_THREADS
        threads = str(max(24, len(os.sched_getaffinity(0)))) if COLLECTIVES_HOLD_THREADS else None
        assert jax.device_count() == 12 and os.environ.get("NPROC") == threads
        assert "--xla_cpu_collective_call_terminate_timeout_seconds=600" in os.environ["XLA_FLAGS"]
        jax.jit(lambda x: x + 1)(1)
    """,
    "a larger thread pool and other time limits are kept": """
        import os
        os.environ["NPROC"] = "40"
        os.environ["XLA_FLAGS"] = "--xla_cpu_collective_timeout_seconds=77"
        from axonml_jax.mesh.simulate import fake_devices
        fake_devices(2)
        import jax
        assert jax.device_count() == 2 and os.environ["NPROC"] == "40"
        assert os.environ["XLA_FLAGS"].count("--xla_cpu_collective_timeout_seconds") == 1
        assert "--xla_cpu_collective_timeout_seconds=77" in os.environ["XLA_FLAGS"]
    """,
    "spawn starts the devices it needs": """
        from axonml_jax.mesh.world import spawn
        assert spawn(lambda world: world.rank, 3) == [0, 1, 2]
        import jax
        assert jax.device_count() == 3
    """,
    "spawn starts no fewer devices than were asked for": """
        from axonml_jax.mesh.simulate import fake_devices
        from axonml_jax.mesh.world import spawn
        fake_devices(8)
        assert spawn(lambda world: world.world_size, 3) == [3, 3, 3]
        import jax
        assert jax.device_count() == 8
    """,
    "in one of several processes fake_devices says what each gets": """
        import logging, os
        said = []
        from axonml_jax.base import logger
        logger.addHandler(type("Said", (logging.Handler,), {"emit": lambda self, record: said.append(record.getMessage())})())
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "0"}
        from axonml_jax.mesh.simulate import fake_devices
        fake_devices(3)
        assert "one of 2 processes that torchrun has launched, and each gets 3 simulated devices" in said[0]
        assert "of its own, 6 in all" in said[0]
        os.environ["RANK"] = "1"
        fake_devices(3)
        del os.environ["WORLD_SIZE"], os.environ["RANK"]
        fake_devices(3)
        assert len(said) == 1, said
    """,
    "processes of one machine share its cores": """
        import os
        from axonml_jax.compat.versions import COLLECTIVES_HOLD_THREADS
        from axonml_jax.mesh.simulate import fake_devices
        from axonml_jax.mesh.simulate import pool_threads
        os.sched_getaffinity = lambda process: range(8)
        least = lambda devices, threads: str(max(threads, 2 * devices) if COLLECTIVES_HOLD_THREADS else threads)
        assert pool_threads(1, 2) == {"NPROC": least(1, 4)} and pool_threads(1, 16) == {"NPROC": least(1, 1)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "6", "RANK": "1"}
        os.environ |= {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
        fake_devices(2)
        assert os.environ["NPROC"] == least(2, 2)
        os.environ["NPROC"] = "5"
        assert pool_threads(1, 4).get("NPROC", "5") == "5"
    """,
    "init gives a process its part of the cores before it joins": """
        import os
        import jax
        from axonml_jax.compat.versions import COLLECTIVES_HOLD_THREADS
        from axonml_jax.mesh import init
        os.sched_getaffinity = lambda process: range(8)
        jax.config.update("jax_platforms", "cpu")
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "8", "RANK": "1"}
        os.environ |= {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
        seen = []
        init._join = lambda *given: seen.append(os.environ.get("NPROC"))
        init.init()
        assert seen == ["2" if COLLECTIVES_HOLD_THREADS else "1"], seen
    """,
    "logging and launch variables start no devices": """
        from axonml_jax.base import logger, print0
        from axonml_jax.compat.processes import backend_started
        import axonml_jax.mesh.init, axonml_jax.mesh.world
        print0("x"); logger.warning("y")
        assert not backend_started()
        import jax, socket
        server = socket.create_server(("", 0)); port = server.getsockname()[1]; server.close()
        jax.config.update("jax_platforms", "cpu")
        jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
        print0("x"); logger.warning("y")
        assert not backend_started()
    """,
}


def run(arguments, **variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "NPROC"))}
    done = subprocess.run(
        [sys.executable, *arguments], env=kept | variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("case", FRESH)
def test_in_a_fresh_process(case):
    lines = [line.strip() for line in FRESH[case].splitlines()]
    run(["-c", "\n".join(lines)])


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 8])
def test_steps_that_nobody_waits_for_end_with_the_fewest_threads(devices):
    script = os.path.join(os.path.dirname(__file__), "..", "benchmarks", "faults", "run_ahead.py")
    assert "1500 steps" in run([script, "--devices", str(devices), "--steps", "1500", "--ahead"], NPROC="1")


@pytest.mark.parametrize("devices", [2, 8])
def test_a_plain_training_loop_runs_to_its_end(devices):
    script = os.path.join(os.path.dirname(__file__), "..", "benchmarks", "faults", "run_ahead.py")
    assert "400 steps" in run([script, "--devices", str(devices), "--steps", "400"])
