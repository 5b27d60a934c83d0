"""Who is missing when a job stands still, in words; real processes are in test_faults.py."""

import re
import threading

import pytest

import axonml_jax as ax
from axonml_jax.mesh.job.watchdog import explain, where_is


def said(count, begun, at="in train at run.py:1"):
    return {"count": count, "begun": begun, "done": begun - 1, "at": at}


OWN = said(9, 12)
CASES = {
    "behind": (
        {1: said(7, 11)},
        {1: said(9, 11, "in load at data.py:7")},
        r"rank\(s\) \[1\] are missing: rank 1 has begun step 11 only and is in load at data\.py:7$",
    ),
    "silent": ({1: said(7, 12)}, {1: said(7, 12)}, r"rank\(s\) \[1\] are missing: rank 1 says nothing any more"),
    "never heard": ({}, {}, r"rank\(s\) \[1\] are missing: rank 1 says nothing any more"),
    "this one": ({1: said(7, 13)}, {1: said(9, 13)}, r"rank\(s\) \[0\] are missing: rank 0 has begun step 12 only"),
    "nobody": (
        {1: said(7, 12)},
        {1: said(9, 12)},
        r"all ranks have begun the same step, so the network .* rank 1 is in",
    ),
    "coordinator": (
        None,
        None,
        r"rank\(s\) \[0\] are missing: process 0, which holds the coordinator, does not answer",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_report_names_who_is_missing_and_where_it_is(case):
    before, now, wanted = CASES[case]
    own = {0: OWN | {"count": 7}}
    text = explain(0, 2, OWN, before and before | own, now and now | {0: OWN}, 31.4) if before else None
    text = text or explain(0, 2, OWN, before, now, 31.4)
    assert re.search(wanted, text), text
    assert text.startswith("rank 0 has made no progress for 31 s (step 12 begun, 11 done, in train at run.py:1): ")


def test_a_process_alone_is_not_watched_and_numbers_are_checked():
    with ax.Watchdog(0.01, end=lambda text: pytest.fail(text)) as watchdog:
        threading.Event().wait(0.1)
        watchdog.moved()
    with pytest.raises(ValueError, match="timeout=0 must be a positive number of seconds"):
        ax.Watchdog(0)


def test_it_knows_where_a_thread_stands():
    assert re.match(r"in \w+ at \w+\.py:\d+$", where_is(threading.get_ident()))
    assert where_is(-1) == "ended"
