"""`train` with copies of its state in memory: restarted workers end as if nothing had happened."""

import pytest
from test_train_resume import arrays, losses, place, train, uninterrupted  # noqa: F401

from axonml_jax.cli.records import JsonLines
from axonml_jax.launch.leftovers import MARK
from axonml_jax.launch.standby import HostMemory
from axonml_jax.launch.workers import RESTART_COUNT
from axonml_jax.mesh.environment import MEMORY


@pytest.mark.slow
@pytest.mark.parametrize("dies", [6, 1])
def test_restarted_workers_go_on_from_memory_and_end_bit_for_bit_like_an_uninterrupted_run(
    place,  # noqa: F811
    uninterrupted,  # noqa: F811
    monkeypatch,
    capsys,
    dies,
):
    """Also where they die before there is anything to go on from: the model, made of shapes first, is made anew then."""
    write = JsonLines.write

    def write_or_die(self, record):
        if record.step == dies:
            raise InterruptedError
        write(self, record)

    name = f"copied-{dies}"
    options = [f"--name={name}", "--checkpoint.memory_every=2"]
    with HostMemory([1], 0) as memory, monkeypatch.context() as patched:
        for variable, value in {
            MEMORY: memory.of(0).text(),
            "NODE_RANK": "0",
            MARK: "a launch",
            RESTART_COUNT: "0",
        }.items():
            patched.setenv(variable, value)
        with patched.context() as dying:
            dying.setattr(JsonLines, "write", write_or_die)
            with pytest.raises(InterruptedError):
                train(place, *options)
        patched.setenv(RESTART_COUNT, "1")
        assert train(place, *options) == 0
    said = capsys.readouterr().out
    # Step 3 is the newest on disk.
    assert ("resumed after step 4, from memory" in said) == (dies == 6) and ("resumed" in said) == (dies == 6)
    assert "copied every 2 steps; process 0 keeps 2 x 0.1 MB of its own state" in said
    # What a step sends is said by the first attempt, which traces it for that.
    assert said.count("against published") == 1 and said.count("step       as before the restart") == 1
    folder = place / "runs" / name
    assert losses(folder) == losses(uninterrupted)
    assert arrays(folder, 9) == arrays(uninterrupted, 9)
