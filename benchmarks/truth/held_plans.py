"""A case of `random_plans.py` trained under its plan, and on one device."""

from collections.abc import Iterator
from typing import Any

from drawn_mistakes import real, spoiled_batch, spoiled_loss, spoiled_state
from drawn_models import SUBJECTS
from drawn_plans import mesh_of, plan_of, rows_of

LOW = ("bfloat16", "int8", "bf16", "bf16-reduce")


def words_of(tree: Any) -> Iterator[str]:
    """All names and texts of a case."""
    if isinstance(tree, dict):
        yield from tree
        tree = list(tree.values())
    for each in tree if isinstance(tree, list) else ():
        yield from words_of(each)
    if isinstance(tree, str) and len(tree) > 3:
        yield tree


def _not_noise(tree: Any) -> dict[str, Any]:
    """Leaves by name, but for biases of keys: softmax does not see them, so their gradient is rounding and nothing else."""
    from axonml_jax.base import named_leaves

    return {name: leaf for name, leaf in named_leaves(tree).items() if not name.endswith("key/bias")}


def _with_junk(case: dict[str, Any]) -> dict[str, Any]:
    """The case with real objects in the place of words for junk."""

    def replaced(tree, path):
        if not path:
            return real(tree)
        return {**tree, path[0]: replaced(tree.get(path[0]), path[1:])}

    where, name = case.get("junk", ("", ""))
    if where in ("batch", "loss", "load_state_dict", "set_parameters", ""):
        return case
    path = {"trainer": ["trainer"], "mesh": ["mesh"], "model": ["model"], "plan": ["plan"], "diloco": ["plan", "data"]}
    return replaced(case, [*path.get(where, ["plan", where]), *name.split(".")])


def hold(case: dict[str, Any], reached: list[str]) -> None:
    """Hold a case to the single-device run.

    Raises:
      AssertionError: where they differ.
    """
    import axonml_jax as ax
    from axonml_jax.facade.facades import parallelize
    from axonml_jax.model.view import functionalize
    from axonml_jax.testing import equality

    case = dict(_with_junk(case))
    where, how = case.get("junk", ("", ""))
    subject = SUBJECTS[case["family"]](case["model"])
    plan, mesh = plan_of(case), mesh_of(case)
    case["mesh"] = dict(mesh.shape)
    model, options = subject.model, dict(case["trainer"])
    trainable = options.pop("trainable", None)
    if case["family"] == "plain" and "rules" not in case["model"]:
        ax.auto_parallelize(model, mesh, **({"example": subject.batch(2, 0)} if case["model"]["paired"] else {}))
    reached.append("model")
    parallel = parallelize(model, mesh, plan, params=subject.params, trainable=trainable)
    if where in ("load_state_dict", "set_parameters"):
        values = parallel.state_dict() if where == "load_state_dict" else parallel.parameters()
        getattr(parallel, where)(spoiled_state(values, how))
        return
    reached.append("trainer")
    low = any(word in LOW for word in words_of(case["plan"])) or case["plan"].get("wire") is not None
    tx = optimizer("momentum" if low and case["optimizer"] != "clipped" else case["optimizer"])
    batches = [subject.batch(rows_of(case), seed) for seed in range(2)]
    loss = spoiled_loss(subject.loss, how) if where == "loss" else subject.loss
    spoiled = [spoiled_batch(each, how) for each in batches] if where == "batch" else batches
    made = parallel.trainer
    others = {name: options.pop(name) for name in ("ema", "norm_type") if name in options}  # the oracle has neither

    def trainer(*args, max_grad_norm=None, **more):
        given = {"max_grad_norm": max_grad_norm} | options | more
        if others:  # refused here, or legal
            made(*args, **given, **others)
        built = made(*args, **given)
        reached.append("step")
        return built

    parallel.trainer = trainer
    clip = options.get("max_grad_norm")
    got = equality._run_parallel(parallel, loss, spoiled, tx, clip)
    if parallel._placement.axes.buffers is not None and not parallel._placement.axes.independent:
        import jax

        got["state"] = jax.tree.map(lambda x: x[0], got["state"])
    reached.append("oracle")
    view, variables = functionalize(subject.model, subject.params, trainable)
    wanted = equality._run_oracle(parallel, view, variables, loss, spoiled, tx, clip, 0)
    # ax.testing.check_strategy holds wires to their round trip; sums of parts in bfloat16 that cancel have no digit left.
    words = {*words_of(case["plan"])}
    lossy = words & {"wire", "reduce_wire", "bf16-reduce"}
    for what in (name for name in wanted if not (lossy and name == "gradients")):
        mine = got[what]
        if what == "metrics":  # without those that the trainer adds
            mine = [{name: step[name] for name in other} for step, other in zip(got[what], wanted[what], strict=True)]
        mine, theirs = (equality.as_computed(_not_noise(each), parallel.plan) for each in (mine, wanted[what]))
        equality.assert_trees_close(mine, theirs, what, low_precision=low)


def hold_diloco(case: dict[str, Any], reached: list[str]) -> None:
    """Hold a case to a loop over replicas with an outer optimizer of optax.

    Raises:
      AssertionError: where they differ.
    """
    from diloco_runs import INNER, LinenNet, Net, batches, loss_fn, reference

    import axonml_jax as ax
    from axonml_jax.sharding.layout import to_host
    from axonml_jax.testing.equality import assert_trees_close

    case = _with_junk(case)
    own = {name: value for name, value in case["plan"].items() if name != "precision"}
    plan, mesh = plan_of(case | {"plan": own}), mesh_of(case)
    import jax
    import jax.numpy as jnp

    linen = case["model"]["kind"] == "linen"
    params = LinenNet().init(jax.random.key(0), jnp.zeros((1, 6))) if linen else None
    options = {name: value for name, value in case["trainer"].items() if name != "trainable"}
    reached.append("model")
    model = ax.parallelize(LinenNet() if linen else Net(), mesh, plan, params=params)
    start, given = model.parameters(), batches(4)
    rows = rows_of(case)
    given = [{name: jnp.concatenate([leaf] * 12)[:rows] for name, leaf in each.items()} for each in given]
    reached.append("trainer")
    trainer = model.trainer(INNER, loss_fn, **options)
    reached.append("step")
    wanted = reference(to_host(start), given, plan.data, case["mesh"]["data"], max_norm=options.get("max_grad_norm"))
    losses = [trainer.step(batch)["loss"] for batch in given]
    low = plan.data.wire is not None or any(word in LOW for word in words_of(case["plan"]))
    assert_trees_close(to_host(model.parameters()), to_host(wanted[0]), "outer parameters", low_precision=low)
    assert_trees_close(jnp.array(losses), wanted[3], "losses", low_precision=low)


def optimizer(name: str) -> Any:
    """An optimizer of optax."""
    import optax

    return {
        "adamw": optax.adamw(1e-2),
        "momentum": optax.sgd(0.05, momentum=0.9),
        "lamb": optax.lamb(1e-2),
        "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
        "adafactor": optax.adafactor(1e-2),
    }[name]
