"""Compiled programs that outlive their process: read again by the next one, in a folder that is bounded, or not kept at all."""

import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest

from axonml_jax.cli import run as compiled_programs
from axonml_jax.cli.run import compiled_in_words as in_words
from axonml_jax.cli.run import keep_compiled, kept_in

ROOT = Path(__file__).resolve().parents[1]
COMPILES = """
import jax
from axonml_jax.cli.run import compiled_in_words, keep_compiled

keep_compiled("auto")
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
print(jax.jit(lambda x: x * 2 + 1)(3.0))
print(events.count("/jax/compilation_cache/cache_hits"), compiled_in_words())
"""


@pytest.mark.slow
def test_a_later_process_reads_what_an_earlier_one_compiled(tmp_path):
    said = []
    environment = {"XDG_CACHE_HOME": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "1"}
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", COMPILES], env=os.environ | environment, capture_output=True, text=True, check=True
        )
        said.append(run.stdout.split("\n"))
    folder = tmp_path / "axonml_jax" / "compiled"
    assert [result for result, *_ in said] == ["7.0", "7.0"]
    assert said[0][1].startswith(f"0 programs are kept in {folder}: 1 there") and said[1][1].startswith("1 programs")
    assert folder.stat().st_mode & 0o077 == 0  # a program is code: nobody else may write one


JOB = """
import jax
import numpy as np
import axonml_jax as ax

world = ax.init()
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rsplit("/", 1)[1]))
mesh = ax.make_mesh(data=-1)
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
x = jax.make_array_from_callback((4, 3), rows, lambda index: np.arange(12.0, dtype="float32").reshape(4, 3)[index])
local = jax.jit(lambda x: x * 2 + 1)(3.0)  # on this process's own device
total = jax.jit(lambda x: (x * x).sum())(x)  # on both
print(float(local), float(total), events.count("cache_hits"), flush=True)
"""


@pytest.mark.slow
def test_every_process_of_a_cpu_job_finds_again_what_it_has_compiled(tmp_path):
    """JAX has process 0 write for all, and its keys on the CPU differ by process: the others would find nothing."""
    (tmp_path / "job.py").write_text(JOB)
    own = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"), "JAX_ENABLE_COMPILATION_CACHE": "1"}
    own |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_", "NPROC"))}
    command, said = ["-m", "axonml_jax", "launch", "--nproc-per-node=2", str(tmp_path / "job.py")], []
    for _ in range(2):
        run = subprocess.run([sys.executable, *command], env=kept | own, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr[-3000:]
        said.append(sorted(line.split() for line in run.stdout.splitlines()))
    results = ["7.0", "506.0"]
    assert said[0] == [["[rank", f"{rank}]", *results, "0"] for rank in (0, 1)]
    assert said[1] == [["[rank", f"{rank}]", *results, "2"] for rank in (0, 1)]


@pytest.fixture
def enabled():
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def test_the_switches_hold(enabled, tmp_path, monkeypatch):
    keep_compiled(None)
    assert kept_in() is None and in_words() == "programs are compiled anew by every run"
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"output\.compiled=.*file/folder: .*give a folder that can be written, or null"
    ):
        keep_compiled(str(tmp_path / "file" / "folder"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compiled("auto")
    assert kept_in() is None
    keep_compiled(str(tmp_path / "mine"))
    keep_compiled(str(tmp_path / "another"))  # JAX has one folder, and asks for it once
    assert kept_in() == tmp_path / "mine" and not (tmp_path / "another").exists()
    jax.config.update("jax_enable_compilation_cache", False)
    assert kept_in() is None


def test_a_user_without_a_home_keeps_none(enabled, monkeypatch):
    def homeless(*_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(Path, "expanduser", homeless)
    keep_compiled("auto")
    assert kept_in() is None
    with pytest.raises(ValueError, match=r"output\.compiled=~/x: Could not determine .* Give a folder from the root"):
        keep_compiled("~/x")


def test_a_folder_that_others_may_write_is_refused_and_auto_does_without(enabled, tmp_path, monkeypatch, caplog):
    for mode, inner in ((0o777, ""), (0o770, ""), (0o777, "mine")):
        folder = tmp_path / f"{mode:o}{inner}" / inner
        folder.mkdir(parents=True)
        (tmp_path / f"{mode:o}{inner}").chmod(mode)
        where = f"{mode:o}{inner} above it" if inner else f"{mode:o} "
        with pytest.raises(
            ValueError, match=rf"output\.compiled=.*others may write .*{where}.*\(mode 0{mode:o}\).*chmod go-w"
        ):
            keep_compiled(str(folder))
        assert kept_in() is None
    (tmp_path / "axonml_jax" / "compiled").mkdir(parents=True)
    (tmp_path / "axonml_jax" / "compiled").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled("auto")
    assert kept_in() is None and "others may write" in caplog.text
    (tmp_path / "axonml_jax" / "compiled").chmod(0o755)
    keep_compiled("auto")
    assert kept_in() == tmp_path / "axonml_jax" / "compiled"


@pytest.mark.parametrize(("mapped", "said"), [("0 1000 1 1 100000 65536", False), ("0 0 4294967295", True)])
def test_the_hosts_root_may_own_what_is_above_in_a_rootless_container(mapped, said, tmp_path, monkeypatch):
    folder, usual = tmp_path / "above" / "mine", Path.stat
    folder.mkdir(parents=True)

    def stat(path, **more):
        found = usual(path, **more)
        owner = 65534 if path == owned else found.st_uid
        return types.SimpleNamespace(st_uid=owner, st_mode=found.st_mode)

    for name, text in (("_UID_MAP", mapped), ("_OVERFLOW", "65534\n")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(compiled_programs, name, tmp_path / name, raising=False)
    monkeypatch.setattr(Path, "stat", stat)
    owned = folder.parent
    assert compiled_programs.shared_with(folder) == (f"{owned} above it belongs to user 65534" if said else None)
    owned = folder
    assert compiled_programs.shared_with(folder) == f"{owned} belongs to user 65534"


def test_a_program_that_another_process_removes_meanwhile_is_passed_over(enabled, tmp_path):
    (tmp_path / "gone-cache").symlink_to(tmp_path / "nowhere")  # listed, and gone when one looks at it
    (tmp_path / "here-cache").write_bytes(b"12")
    keep_compiled(str(tmp_path))
    assert in_words() == f"programs are kept in {tmp_path}: 1 there, 0.0 MB"


def test_what_was_not_read_for_longest_goes_first(enabled, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_programs, "MOST", 250)
    for age, name in enumerate(("read last", "read before", "forgotten")):
        path = tmp_path / f"{name}-cache"
        path.write_bytes(bytes(100))
        os.utime(path, (1000 - age, 2000 + age))
    (tmp_path / "notes").write_bytes(bytes(1000))
    keep_compiled(str(tmp_path))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes", "read before-cache", "read last-cache"]
