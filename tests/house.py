"""Figures about the structure of the package: its size, its arrows, its interfaces, and how far one has to walk."""

import ast
import collections
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "axonml_jax"
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
}

CPU_PASSES = re.compile(r"on_cpu|cpu_passes|collective_order|kernel_gradients")
"""Files of passes that only XLA:CPU needs: a step on other devices does not enter them."""

CAPABILITIES = re.compile(
    r"lora|adapt|float8|fp8|diloco|(^|[/_])round|feedback|left_out|offload|streamed|context|expert|pipeline|executor|staged|whole|partition"
    r"|nonfinite|guard|loss_scale|moving_average|batch_norm|rematerial|remat\b|spikes"
)
"""Files of capabilities that a plain step does not ask for."""


def code_lines(path: Path) -> int:
    """Lines with code: no blank line, no comment, no docstring."""
    text, lines, documented = path.read_text("utf-8"), set(), set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | DEFINITIONS)
            and ast.get_docstring(node, clean=False) is not None
        ):
            documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def methods(node: ast.ClassDef) -> int:
    """How many methods a class defines, those with double underscores apart."""
    return sum(isinstance(each, DEFINITIONS) and not each.name.startswith("__") for each in node.body)


def written(arrows: int) -> dict[str, int]:
    """Figures of the source as it is written; `arrows` is how often a file of the package imports another."""
    files = sorted(PACKAGE.rglob("*.py"))
    code = [code_lines(path) for path in files]
    classes = [
        node for path in files for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)
    ]
    return {
        "files with more than five lines of code": sum(lines > 5 for lines in code),
        "lines of code": sum(code),
        "arrows between files": arrows,
        "methods of the widest class": max(map(methods, classes)),
        "modules that `ax.DDP` imports": imported_by_ddp(),
    }


def imported_by_ddp() -> int:
    """Modules of the package in a process that has asked for `ax.DDP`."""
    code = "import sys, axonml_jax as ax; ax.DDP; print(sum(name.startswith('axonml_jax') for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return int(done.stdout)


class Followed:
    """The package's files on a call's way with their numbers of calls, and the frames of the package above the user's loss."""

    def __init__(self):
        self.files, self.frames, self._in_passes = collections.Counter(), 0, 0

    def __call__(self, call):
        """Runs `call` and returns what it returns."""
        before = sys.getprofile()
        sys.setprofile(self._event)
        try:
            return call()
        finally:
            sys.setprofile(before)

    def _event(self, frame, event, _):
        path = frame.f_code.co_filename
        if not path.startswith(f"{PACKAGE}/"):
            if event == "call" and frame.f_code.co_name == "followed_loss":
                self.frames = max(self.frames, _own_frames(frame))
            return
        passes = bool(CPU_PASSES.search(path))
        if event == "call":
            if not passes and not self._in_passes:
                self.files[path.removeprefix(f"{PACKAGE}/")] += 1
            self._in_passes += passes
        elif event == "return":
            self._in_passes -= passes

    @property
    def calls(self) -> int:
        """How many calls of the package's functions."""
        return self.files.total()


def _own_frames(frame) -> int:
    frames = 0
    while (frame := frame.f_back) is not None:
        frames += frame.f_code.co_filename.startswith(f"{PACKAGE}/")
    return frames


def followed_loss(model, batch):
    """The loss whose frames `Followed` counts."""
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def walked_anew() -> dict[str, int]:
    """`walked` in a process of its own: what other tests have cached takes no calls."""
    code = (
        "import json, axonml_jax as ax; ax.fake_devices(8); import jax; jax.config.update('jax_enable_x64', True); "
        "import house; print(json.dumps(house.walked()))"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def walked() -> dict[str, int]:
    """Figures of the making and the first step of three small trainers, tracing included, passes for XLA:CPU left out."""
    import numpy as np
    import optax
    from flax import nnx

    import axonml_jax as ax

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(4)])

        def __call__(self, x):
            for block in self.blocks:
                x = x + nnx.relu(block(x))
            return x

    x = np.ones((32, 16), np.float32)
    plans = {
        "DDP": lambda: ax.DDP(Net(nnx.Rngs(0)), ax.make_mesh(data=8)),
        "FSDP": lambda: ax.FSDP(Net(nnx.Rngs(0)), ax.make_mesh(fsdp=8)),
        "a pipeline": lambda: ax.Pipeline(Net(nnx.Rngs(0)), ax.make_mesh(data=4, pipe=2), num_microbatches=4),
    }
    figures = {}
    for name, make in plans.items():
        model, making, step = make(), Followed(), Followed()
        trainer = making(lambda model=model: model.trainer(optax.adam(1e-3), followed_loss))
        step(lambda trainer=trainer: trainer.step({"x": x, "y": x}))
        figures[f"calls of trainer(), {name}"] = making.calls
        figures[f"files of a first step, {name}"] = len(step.files)
        if name == "DDP":
            figures["frames between Trainer.step and the loss"] = step.frames
            figures["files of other capabilities in a DDP step"] = sum(
                bool(CAPABILITIES.search(file)) for file in step.files
            )
    return figures
