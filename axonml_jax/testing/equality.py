"""`assert_equals_single_device`: a plan changes where work happens, never what is computed."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from axonml_jax._types import LossFn, PyTree
from axonml_jax.facade.parallelize import parallelize
from axonml_jax.model.functional import Trainable, Variables
from axonml_jax.model.functionalize import functionalize
from axonml_jax.parallel.plan import Plan
from axonml_jax.sharding.check_batch import check_batch
from axonml_jax.sharding.place import to_host
from axonml_jax.testing.oracle import Oracle, OracleParts, OracleRun
from axonml_jax.testing.trees_close import assert_trees_close


def assert_equals_single_device(
    model: Any,
    loss_fn: LossFn,
    batch: PyTree | Sequence[PyTree],
    plan: Plan | None = None,
    *,
    mesh: Any = None,
    params: PyTree | None = None,
    tx: optax.GradientTransformation | None = None,
    steps: int = 5,
    max_grad_norm: float | None = None,
    trainable: Trainable = None,
    seed: int = 0,
) -> None:
    """Assert that a model trains under a plan as it does on one device: loss, gradients, metrics, buffers, parameters.

    The single-device run uses the same rows, microbatches and dropout keys (see `testing/oracle.py`). Models in float64
    are held to 1e-9; others per leaf to max|a-b| <= 1e-5 max|b|. Under NO_SYNC every rank is held to a run of its own. A
    float32 gradient that is truly zero, such as that of a bias before BatchNorm, is nothing but rounding and fails that rule:
    leave such a bias out (`use_bias=False`), or test in float64.

    Args:
      model: an NNX module, or a Linen module with `params=`.
      loss_fn: `loss_fn(model, batch) -> loss` or `(loss, metrics)`.
      batch: a global batch, used in every step, or a list of one for each step.
      plan: the plan; None is DDP on all devices.
      mesh: where; None: the plan's degrees, or all devices.
      params: a Linen module's variables.
      tx: the optimizer; None: SGD with momentum (Adam divides float32 rounding noise by itself).
      steps: number of updates.
      max_grad_norm: clip to this norm.
      trainable: which parameters train.
      seed: of dropout.

    Raises:
      AssertionError: naming every leaf that differs.
      TypeError, ValueError: when model, plan, mesh and batch do not fit.

    Example::

        def test_my_model_under_ddp(fake_mesh):
            assert_equals_single_device(MyModel(rngs=nnx.Rngs(0)), loss_fn, batch, ax.Plan(), mesh=fake_mesh)
    """
    tx = tx or optax.sgd(0.05, momentum=0.9)
    batches = list(batch) if isinstance(batch, (list, tuple)) else [batch] * steps
    parallel = parallelize(model, mesh, plan, params=params, trainable=trainable, seed=seed)
    plan = parallel.plan
    view, variables = functionalize(model, params, trainable)
    for each in batches:
        check_batch(parallel._placement.batch_layout, each, plan.microbatches)
    wanted = _run_oracle(parallel, view, variables, loss_fn, batches, tx, max_grad_norm, seed)
    got = _run_parallel(parallel, loss_fn, batches, tx, max_grad_norm)
    if parallel._placement.buffer_axes is not None and not parallel._placement.own_axes:
        got["state"] = jax.tree.map(lambda x: x[0], got["state"])
    low = any(
        d in ("bfloat16", "float16") for d in (*vars(plan.precision).values(), plan.data.wire_dtype("float32").name)
    )
    for what in wanted:
        assert_trees_close(got[what], wanted[what], what, low_precision=low)


def _run_oracle(
    parallel: Any,
    view: Any,
    variables: Variables,
    loss_fn: LossFn,
    batches: list,
    tx: Any,
    max_grad_norm: Any,
    seed: int,
) -> dict[str, Any]:
    plan, placement = parallel.plan, parallel._placement
    degree = placement.joined_rows
    key, options = jax.random.key(seed), {"precision": plan.precision, "max_grad_norm": max_grad_norm}
    joined = plan.batch_stats == "global" and (degree > 1 or not placement.own_axes)
    oracle = Oracle(
        view, loss_fn, tx, OracleParts(degree, plan.microbatches, "joined" if joined else "first"), **options
    )
    if not placement.own_axes:
        return _as_tree(oracle.run(variables, batches, key))
    models = placement.ranks(placement.own_axes)
    if placement.batch_axes[: len(placement.own_axes)] != placement.own_axes:
        raise ValueError(
            f"the oracle of independent ranks takes rows side by side, but {placement.own_axes} are not the outermost of "
            f"the batch axes {placement.batch_axes}"
        )
    rows = [[_rows_of(b, model, models) for b in batches] for model in range(models)]
    runs = [_as_tree(oracle.run(variables, b, key, model * degree)) for model, b in enumerate(rows)]
    return jax.tree.map(lambda *x: np.stack(x), *runs) | {"frozen": runs[0]["frozen"]}


def _run_parallel(
    parallel: Any, loss_fn: LossFn, batches: list, tx: Any, max_grad_norm: float | None
) -> dict[str, Any]:
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    trainer = parallel.trainer(optax.chain(_remember(), tx), loss_fn, max_grad_norm=max_grad_norm)
    metrics, grads = [to_host(trainer.step(batches[0]))], trainer.opt_state[0]
    if parallel.plan.pipe is None:  # a pipeline's is the optimizer's own tree already
        grads = parallel._rest.outside(grads, parallel.mesh)
    grads = to_host(grads)
    metrics += [to_host(trainer.step(b)) for b in batches[1:]]
    losses = [m.pop("loss") for m in metrics]
    norms = [m.pop("grad_norm") for m in metrics]
    frozen = parallel._rest.outside_frozen(parallel.variables.frozen, parallel.mesh)
    held = Variables(parallel.parameters(), frozen, parallel.variables.state)
    return _as_tree(OracleRun(losses, norms, metrics, grads, held))


def _remember() -> optax.GradientTransformation:
    """Hands gradients on and keeps them as its state, so that those of a step can be seen afterwards."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda updates, state, params=None: (updates, updates)
    )


def _as_tree(run: OracleRun) -> dict[str, Any]:
    v: Variables = run.variables
    tree = {
        "loss": run.losses,
        "gradient norm": run.norms,
        "metrics": run.metrics,
        "gradients": run.grads,
        "parameters": v.params,
        "frozen": v.frozen,
        "state": v.state,
    }
    return to_host(tree)


def _rows_of(batch: PyTree, rank: int, degree: int) -> PyTree:
    def rows(x):
        size = jnp.shape(x)[0] // degree if jnp.ndim(x) else 0
        return x[rank * size : (rank + 1) * size] if jnp.ndim(x) else x

    return jax.tree.map(rows, batch)
