"""What the processes of a dying run leave in its folder, and who can leave nothing: real processes under the launcher."""

import json
import os
import re
from pathlib import Path

import pytest
from test_launcher_training import ROOT, SMALL, axonml

from axonml_jax.mesh import watch as flight
from axonml_jax.mesh.watch import FlightRecord

WORK = """
import os, signal, sys
from axonml_jax.__main__ import main
from axonml_jax.facade.trainer import Trainer

real = Trainer.step

def step(self, batch):
    if self.step_number == 2 and os.environ["RANK"] == "1":
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("boom")
    return real(self, batch)

Trainer.step = step
if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[2:]]))
"""


@pytest.fixture
def dying(tmp_path, monkeypatch):
    def dying(how):
        (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
        (tmp_path / "work.py").write_text(WORK)
        config = [str(ROOT / "configs" / "quickstart.yaml"), *SMALL, "--data.path=text.txt", "--devices.simulated=null"]
        monkeypatch.setenv("SOMEBODYS_PASSWORD", "hunter2")
        done = axonml("launch", "--nproc-per-node=2", "work.py", how, *config, "--train.steps=6", cwd=tmp_path)
        assert done.returncode, done.stderr[-3000:]
        (folder,) = (tmp_path / "runs").iterdir()
        records = {path.name: path.read_text() for path in folder.glob("flight-rank*.json")}
        assert not any("hunter2" in text for text in records.values())
        return {name: json.loads(text) for name, text in records.items()}, done.stderr

    return dying


@pytest.mark.slow
def test_every_rank_of_a_run_that_fails_leaves_its_record(dying):
    records, said = dying("raise")
    assert sorted(records) == ["flight-rank0.json", "flight-rank1.json"], said[-3000:]
    failed, other = records["flight-rank1.json"], records["flight-rank0.json"]
    assert failed["why"] == "ValueError: boom" and failed["error"][-1] == "ValueError: boom"
    assert "rank 1 has ended: ValueError: boom" in other["why"] or "rank(s) [1]" in other["why"], other["why"]
    for record in records.values():
        assert [step["step"] for step in record["steps"]] in ([1, 2], [1, 2, 3])
        assert all(step["done"] >= step["begun"] for step in record["steps"][:1])
        assert record["others"] and record["configuration"] == failed["configuration"] and record["size"] == 2
        assert record["versions"]["jax"] and record["memory"] and record["variables"]["WORLD_SIZE"] == "2"
        assert any("cli/train.py" in line for line in record["threads"][next(iter(record["threads"]))])
    sent = failed["collectives"]
    assert sent and sent == other["collectives"]
    assert all(each["axes"] and each["bytes"] > 0 and each["ranks"] == 2 for each in sent)
    assert re.search(r"flight records of this machine's ranks: .*flight-rank0\.json, .*flight-rank1\.json", said)


@pytest.mark.slow
def test_a_killed_rank_leaves_none_and_the_others_name_it(dying):
    records, said = dying("kill")
    assert sorted(records) == ["flight-rank0.json"], said[-3000:]
    assert "rank(s) [1] say nothing any more" in records["flight-rank0.json"]["why"]
    assert "rank 1 failed first: signal 9" in said and re.search(r"flight records .*flight-rank0\.json", said)


def test_a_record_that_cannot_be_written_is_a_line_and_no_error(tmp_path, capsys):
    with FlightRecord(Path(tmp_path / "gone")) as record:
        record.write(0, 2, "why")
    assert "no whole flight record: FileNotFoundError" in capsys.readouterr().err

    def collectives():
        raise RuntimeError("not traced")

    with FlightRecord(tmp_path, collectives=collectives) as record:
        record.write(0, 2, "why", steps=[])
    kept = json.loads((tmp_path / "flight-rank0.json").read_text())
    assert kept["why"] == "why" and "collectives" not in kept
    assert "no whole flight record: RuntimeError: not traced" in capsys.readouterr().err


def test_a_disk_that_hangs_is_not_waited_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(flight, "_LIMIT", 0.2)
    hung = tmp_path / "flight-rank0.json.new"
    os.mkfifo(hung)  # whoever opens it waits for a reader
    assert not FlightRecord(tmp_path).write(0, 2, "why")
    assert "no whole flight record after 0.2 s" in capsys.readouterr().err
    hung.read_text()


def test_what_cannot_be_found_out_is_a_line_and_no_error(tmp_path, capsys, monkeypatch):
    def fails():
        raise RuntimeError("no devices")

    monkeypatch.setattr(flight, "_memory", fails)
    assert FlightRecord(tmp_path).write(0, 2, "why")
    assert "no whole flight record: RuntimeError: no devices" in capsys.readouterr().err
