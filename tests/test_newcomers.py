"""Machines that come to a running job: they run what it runs, or are sent away, and never take it with them."""

import contextlib
import threading

import pytest
from test_launcher_nodes import Silence
from test_machines import LIMIT, Launchers, starts, until

from axonml_jax.config.config import ConfigError
from axonml_jax.launch import machines as trial
from axonml_jax.launch.machines import Nodes, Start, likeness
from axonml_jax.launch.options import read_options
from axonml_jax.launch.workers import Failure

FAILURE = Failure(0, "here", 1, 1, 1.0, ("ValueError: boom",))


@pytest.fixture
def job():
    with contextlib.ExitStack() as stack:
        yield lambda *flags: Launchers(stack, *flags)


def end(failure, *launchers):
    """All workers have ended, those of the first launcher by a failure."""
    threads = [
        threading.Thread(target=each.verdict, args=(failure if each is launchers[0] else None,)) for each in launchers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)


def refused(made, head, *given):
    """What a launcher is told that calls, while node 0's looks after its workers."""
    said = []

    def call():
        options = read_options([f"--rdzv-endpoint=127.0.0.1:{made.port}", *given], {})
        with contextlib.closing(Silence()) as silence, pytest.raises(ConfigError) as error:
            Nodes(options, 2, silence).__enter__()
        said.append(str(error.value))

    calling = threading.Thread(target=call)
    calling.start()
    while calling.is_alive():
        assert not head.poll(False)
    return said[0]


def like(folder, script="pass", config="steps: 1", arguments=("{}/a.yaml", "--more={}/a.yaml"), token=b""):
    folder.mkdir(exist_ok=True)
    (folder / "work.py").write_text(script)
    (folder / "a.yaml").write_text(config)
    return likeness(read_options([str(folder / "work.py"), *(each.format(folder) for each in arguments)], {}), token)


def test_scripts_and_configurations_count_by_what_they_hold(tmp_path):
    one = like(tmp_path / "here")
    assert one == like(tmp_path / "there") and "jax " in one["versions"] and max(map(len, one.values())) < 300
    for name, change in (
        ("program", {"script": "pass "}),
        ("arguments", {"config": "steps: 2"}),
        ("arguments", {"arguments": ("{}/a.yaml",)}),
        ("arguments", {"arguments": ("{}/a.yaml", "--less={}/a.yaml")}),
        ("arguments", {"arguments": ("{}/a.yaml", "--more={}/b.yaml")}),
    ):
        other = like(tmp_path / "there", **change)
        assert [each for each in one if one[each] != other[each]] == [name]
    sealed = like(tmp_path / "here", token=b"hush")
    assert sealed["program"] != one["program"] and sealed["arguments"] != one["arguments"]


def test_a_machine_that_would_run_something_else_is_refused_and_harms_nobody(job, tmp_path):
    made = job("--nnodes=1:2", "--last-call=0")
    [head] = made.come(0)
    assert starts(0, head) == [Start(0, 30000, (0,), (2,))]
    (tmp_path / "other.py").touch()
    said = refused(made, head, "--nnodes=1:2", "--node-rank=1", str(tmp_path / "other.py"), "--lr=1")
    assert "its script or module is another one than on node 0" in said
    assert "its arguments, or a configuration that they name, are others than on node 0" in said
    assert not head.changed


def test_machines_whose_first_attempt_fails_are_sent_away_and_the_others_go_on(job, monkeypatch):
    made = job("--nnodes=1:3", "--last-call=0")
    [head] = made.come(0)
    starts(0, head)
    [one] = made.come(1, to=(head,))
    until(lambda: head.poll(False))
    starts(1, head, one)
    [two] = made.come(2, to=(head, one))
    until(lambda: head.poll(False) and one.poll(False))
    assert starts(2, head, one, two) == [Start(2, 30002, (0, 1, 2), (2, 2, 2))] * 3
    end(FAILURE, head, one, two)
    assert not one.send_away() and head.send_away() and head.changed
    until(lambda: two.poll(False) and two.lost)
    assert two.lost == "the first attempt with node 2 has failed, and the others go on without it"
    assert starts(3, head, one) == [Start(3, 30003, (0, 1), (2, 2))] * 2
    again = ["--nnodes=1:3", "--node-rank=2", made.target]
    assert (
        "the first attempt with node 2 failed, " in (said := refused(made, head, *again))
        and " may come again in " in said
    )
    end(FAILURE, head, one)
    assert not head.send_away() and not head.changed  # nobody is new any more
    monkeypatch.setattr(trial, "TRIAL", 0.0)
    made.come(2, to=(head, one))


def test_a_machine_without_which_there_are_too_few_stays(job):
    made = job("--nnodes=2:3", "--last-call=0")
    head, one = made.come(0, 1)
    starts(0, head, one)
    one.leave("asked to")
    until(lambda: head.poll(False))
    [two] = made.come(2, to=(head,))
    assert starts(1, head, two) == [Start(1, 30001, (0, 2), (2, 2))] * 2
    end(FAILURE, head, two)
    assert not head.send_away() and not head.changed


def test_what_goes_wrong_later_is_not_laid_to_machines_that_came(monkeypatch):
    seen = trial.Trial()
    seen.begin((), (0, 1))
    assert seen.blamed == ()  # the first attempt of all
    seen.begin((0, 1), (0, 2, 3))
    assert seen.blamed == (2, 3)
    monkeypatch.setattr(trial, "TRIAL", 0.0)
    assert seen.blamed == ()
