"""The short version of benchmarks/fault_campaign.py: real processes, faults, and a run that ends bit for bit as it should."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[1] / "benchmarks" / "fault_campaign.py"


@pytest.fixture(scope="module")
def campaign():
    spec = importlib.util.spec_from_file_location("fault_campaign", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fault_campaign"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fault_campaign"]


def test_a_campaign_is_the_same_for_the_same_seed_and_tries_every_kind(campaign):
    drawn = campaign.draw(60, 3)
    assert drawn == campaign.draw(60, 3) != campaign.draw(60, 4)
    assert {fault.kind for fault in drawn} == {*campaign.ON_ONE_RANK, *campaign.OTHERS}
    assert all(fault.rank == 0 for fault in drawn if fault.kind in campaign.IN_THE_MAIN_PROCESS)


def test_a_rank_that_hangs_is_named_and_the_restarted_run_ends_as_it_should(campaign):
    problems, _, said = campaign.survive(campaign.Fault("sleep", 1, 8, "fsdp"))
    assert not problems, said[-4000:]
    warning = (
        r"^\[rank 0\].*rank\(s\) \[1\] are missing: rank 1 has begun step \d only and is in before at .* the job ends"
    )
    assert len(re.findall(warning, said, re.MULTILINE)) == 1, said[-4000:]  # long before, once, by one process


def test_a_save_that_one_rank_alone_cannot_write_is_passed_over_by_all(campaign):
    """Rank 1 may write no file of more than 16 bytes for a step, and the run goes on; the others hear of it at once."""
    problems, seconds, said = campaign.survive(campaign.Fault("file-too-large-passes", 1, 6, "fsdp"))
    assert not problems and seconds < 300, said[-4000:]
