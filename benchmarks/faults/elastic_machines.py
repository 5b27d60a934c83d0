"""A small training of the command line on machines that come and go, each with a launcher of its own, all of them here."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
LIMIT = 200
SMALL = (
    *("--model.num_layers=1", "--model.hidden_size=8", "--model.num_heads=1", "--model.mlp_hidden_size=8"),
    *("--model.max_length=8", "--data.length=8", "--data.max_bytes=6_000", "--data.valid_fraction=0.1"),
    *("--train.eval_every=null", "--train.eval_batches=1", "--train.log_every=1", "--sample.count=0"),
    *("--output.plot=false", "--optim.schedule=constant", "--optim.warmup_steps=0"),
)
CALLBACK = """
import os, pathlib, time
import axonml_jax as ax

PACE = pathlib.Path(__file__).with_name("pace")

class Told(ax.Callback):
    def on_step(self, event):
        attempt = os.environ["AXONML_JAX_RESTART_COUNT"]
        print(f"attempt={attempt} step={event.step} pid={os.getpid()}", flush=True)
        time.sleep(float(PACE.read_text() or 0))
"""


class Machines:
    """The machines of one job.

    Args:
      folder: of the text, the runs, the callback and the pace.
      port: where node 0 listens.
      nodes: `--nnodes`.
      options: of the training, besides `SMALL`.
      processes: of a machine.
      launch: more options of the launcher.
    """

    def __init__(
        self,
        folder: Path,
        port: int,
        nodes: str,
        options: Sequence[str],
        *,
        processes: int = 1,
        launch: Sequence[str] = (),
    ):
        self.folder, self.started = folder, list[Machine]()
        launcher = ["launch", f"--nnodes={nodes}", "--last-call=0", f"--rdzv-endpoint=127.0.0.1:{port}", *launch]
        launcher += [f"--nproc-per-node={processes}"] * (processes > 1)
        self.launcher = [sys.executable, "-m", "axonml_jax", *launcher]
        self.training = [
            *("--module", "axonml_jax", "train", QUICKSTART, *SMALL, "--devices.simulated=null"),
            *(f"--data.path={folder / 'text'}", f"--output.dir={folder / 'runs'}", "--output.compiled=null"),
            *("--allow-imports=told", "--callbacks=[{class_path: told.Told}]", *options),
        ]
        (folder / "told.py").write_text(CALLBACK)
        (folder / "text").mkdir()
        for name, words in (("a.txt", "the cat sat on the mat. "), ("b.txt", "the dog sat on the log. ")):
            (folder / "text" / name).write_text(words * 60)
        self.pace(0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in self.started:
            each.process.kill()
            each.process.wait()
            assert each.process.stdout is not None
            each.process.stdout.close()

    def pace(self, seconds: float) -> None:
        """From now on every process stands still so long after a step."""
        own = self.folder / "pace.next"
        own.write_text(f"{seconds}")
        own.replace(self.folder / "pace")

    def start(self, node: int) -> "Machine":
        """A machine comes."""
        command = [*self.launcher, f"--node-rank={node}", *self.training]
        self.started.append(Machine(command, f"{self.folder}:{ROOT}"))
        return self.started[-1]


QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""XLA's flags for programs that run a few times."""


class Machine:
    """One launcher of the job, as if it were a machine of its own."""

    def __init__(self, command: Sequence[str], path: str):
        self.lines, self.changed = list[str](), threading.Condition()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_", "NPROC"))}
        own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
        self.process = subprocess.Popen(
            command, env=kept | {"XLA_FLAGS": QUICK} | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(line)
                self.changed.notify_all()
        with self.changed:
            self.changed.notify_all()

    @property
    def said(self) -> str:
        """What it has printed."""
        return "".join(self.lines)

    @property
    def steps(self) -> list[tuple[int, int, int]]:
        """Attempt, step and process id of every step that its processes say they made."""
        return [tuple(map(int, each)) for each in re.findall(r"attempt=(\d+) step=(\d+) pid=(\d+)", self.said)]  # pyright: ignore[reportReturnType]

    def wait_for(self, words: str, limit: float = LIMIT) -> re.Match[str]:
        """What it says, as soon as it does.

        Raises:
          TimeoutError: when it says nothing like it, with its last words.
        """
        end = time.monotonic() + limit
        with self.changed:
            while not (found := re.search(words, self.said)):
                if not self.changed.wait(max(0, end - time.monotonic())) or self.process.poll() is not None:
                    if found := re.search(words, self.said):
                        break
                    raise TimeoutError(f"nothing like {words!r} was said:\n{self.said[-4000:]}")
        return found
