"""The picture of memory by kind: its bars are the estimate's bytes, and what is on the host stands below zero."""

import re
import sys
from types import SimpleNamespace

import pytest

import axonml_jax as ax
from axonml_jax.ledger.memory import MIB, measure


def stats(offload=ax.CPUOffload.NONE):
    return ax.FSDPMemoryStats(10, 1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, offload)


def test_bars_are_labelled_with_what_a_device_holds(tmp_path):
    pytest.importorskip("matplotlib")
    ax.plot_memory({"kept": stats(), "moved": stats(ax.CPUOffload.FULL)}, tmp_path / "memory.svg")
    drawn = re.findall(r"<!-- (.*?) -->", (tmp_path / "memory.svg").read_text())
    assert {"kept", "moved", "15", "8", "parameters", "on the host", "MB per device", "10 parameters"} <= set(drawn)
    assert not any(words.startswith("a device has") for words in drawn)


def test_a_picture_has_its_title_the_budget_and_no_kind_that_nobody_holds(tmp_path):
    pytest.importorskip("matplotlib")
    none = ax.FSDPMemoryStats(10, 1 * MIB, 2 * MIB, 4 * MIB, 0, 16 * MIB)
    ax.plot_memory({"kept": none}, tmp_path / "memory.svg", title="GPT on fsdp 8", budget=32 * MIB)
    drawn = re.findall(r"<!-- (.*?) -->", (tmp_path / "memory.svg").read_text())
    assert {"GPT on fsdp 8", "a device has 32", "optimizer"} <= set(drawn) and "gathered for use" not in drawn


@pytest.mark.parametrize(
    ("offload", "host"), [("none", 0), ("params", 1), ("optimizer_states", 4), ("full", 7)], ids=str
)
def test_offloaded_kinds_are_not_on_the_device(offload, host):
    held = stats(ax.CPUOffload(offload))
    assert held.host_bytes == host * MIB and held.total_bytes == (15 - host) * MIB
    assert held.total_memory_mb == 15 - host and held.memory_savings == 1 - (15 - host) / 16


def test_small_estimates_print_in_kilobytes():
    assert "MB" in str(stats()) and "on the host" not in str(stats())
    assert "KB" in str(ax.FSDPMemoryStats(10, 1024, 1024, 2048, 0, 8192))


def test_a_picture_without_bars_or_matplotlib_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="none was given"):
        ax.plot_memory({}, tmp_path / "memory.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"axonml-jax\[plots\]"):
        ax.plot_memory({"kept": stats()}, tmp_path / "memory.svg")


def test_a_process_without_devices_of_a_mesh_measures_nothing():
    found = measure(SimpleNamespace(local_devices=[]), None)  # pyright: ignore[reportArgumentType]
    assert (found.current_allocation_mb, found.peak_memory_mb) == (0, None)
