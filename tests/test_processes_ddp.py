"""DDP on two real processes (jax.distributed, gloo) equals one device, and every part of the face works there.

Four processes, and the other kinds of parallelism, are in test_launcher_hosts.py.
"""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from workers.ddp_rank import BATCHES, RUNS, TX, plan_of
from workers.launch import launch

from axonml_jax.model.view import functionalize
from axonml_jax.testing.equality import Oracle, OracleParts

SCRIPT = pathlib.Path(__file__).parent / "workers" / "ddp_rank.py"
TIME_LIMIT = 240
pytestmark = pytest.mark.slow  # whichever comes first waits for the processes
PROCESSES = 2


@functools.cache
def outcomes():
    """What each process printed."""
    ends = launch(str(SCRIPT), PROCESSES, TIME_LIMIT)
    assert [code for code, _, _ in ends] == [0] * PROCESSES, "\n".join(error[-3000:] for _, _, error in ends)
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ends]


@functools.cache
def wanted(name):
    """The same run on one device; for independent models a list of runs."""
    make, loss_fn, _, accumulate = RUNS[name]
    view, variables = functionalize(make())
    plan, key = plan_of(name), jax.random.key(0)
    parts = OracleParts(1 if plan.independent else PROCESSES, accumulate)
    oracle = Oracle(view, loss_fn, TX, parts, precision=plan.precision)
    if not plan.independent:
        return [oracle.run(variables, BATCHES, key)]

    def rows(batch, rank):
        each = len(batch["x"]) // PROCESSES
        return jax.tree.map(lambda x: x[rank * each : (rank + 1) * each] if np.ndim(x) else x, batch)

    return [oracle.run(variables, [rows(batch, rank) for batch in BATCHES], key, rank) for rank in range(PROCESSES)]


def close(got, want):
    """Trees of lists against trees of arrays."""
    want = jax.tree.map(np.asarray, want)
    jax.tree.map(lambda w, g: np.testing.assert_allclose(np.asarray(g), w, rtol=1e-9, atol=1e-9), want, got)


@pytest.mark.parametrize("name", [name for name in RUNS if name != "independent"])
def test_five_steps_equal_one_device(name):
    (want,) = wanted(name)
    for seen in (process[name] for process in outcomes()):
        close({"a": seen["loss"], "b": seen["grad_norm"]}, {"a": np.stack(want.losses), "b": np.stack(want.norms)})
        close(seen["gradients"], want.grads)
        close(seen["parameters"], want.variables.params)
        close(seen["state"], want.variables.state)
        close(seen["first_loss"], want.losses[0])


def test_independent_models_equal_independent_runs_until_synchronized():
    runs = wanted("independent")
    seen = [process["independent"] for process in outcomes()]
    for each in seen:
        close(each["loss"], np.stack([run.losses for run in runs], 1))
        close(each["parameters"], jax.tree.map(lambda *x: np.stack(x), *(run.variables.params for run in runs)))
    bits = [process["bits"] for process in outcomes()]
    assert len({tuple(each["own"]) for each in bits}) == PROCESSES
    assert {tuple(each["synced"]) for each in bits} == {tuple(bits[0]["own"])}


def test_rows_loaded_by_each_process_train_as_whole_batches_do():
    for process in outcomes():
        close(process["loader"], np.stack(wanted("overlapped")[0].losses))


def test_evaluation_outputs_and_state_dict_equal_one_device():
    make, loss_fn, _, _ = RUNS["accumulated"]
    model = functionalize(make())[0].module(wanted("accumulated")[0].variables)
    model.eval()
    loss = loss_fn(model, BATCHES[0])
    odd = {name: x[:-1] for name, x in BATCHES[1].items() if np.ndim(x)}  # 11 rows over two processes
    both = {name: np.concatenate([BATCHES[0][name], x]) for name, x in odd.items()}
    for process in outcomes():
        close(process["face"]["evaluation"], loss.value)
        close(process["face"]["outputs"], model(BATCHES[0]["x"]))
        close(process["face"]["predictions"], model(both["x"]))
        close(process["face"]["validation"], loss_fn(model, both).value)
        assert set(process["face"]["state_dict"]) >= {"first/kernel", "norm/mean"}
        close(process["face"]["state_dict"]["norm/mean"], model.norm.mean[...])
