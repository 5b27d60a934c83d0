"""The optimizer that a configuration describes: a named one, any factory or chain of them, others for groups of parameters."""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, cast

import jax
import optax

from axonml_jax._types import PyTree, named_leaves, path_name
from axonml_jax.launch.config.sections.optim_config import DEFAULTS, NAMED_ONLY, OptimConfig
from axonml_jax.launch.objects.import_rules import is_named
from axonml_jax.launch.objects.leaf_mask import leaf_mask, path_finder
from axonml_jax.launch.objects.named_object import find, make, takes
from axonml_jax.launch.objects.own_dims import MUON, NO_STACKS, Stacks, muon_dims

MOMENTS = {"adamw": 2, "lion": 1}
"""Values that an optimizer keeps per parameter."""

_NAMED = {"adamw": optax.adamw, "lion": optax.lion}
_REST = "rest"


def make_optimizer(config: OptimConfig, steps: int, stacks: Stacks = NO_STACKS) -> optax.GradientTransformation:
    """The optimizer with the configured learning rate; clipping is the trainer's (`max_grad_norm`).

    Args:
      config: the section `optim`.
      steps: length of the run, at whose end a cosine schedule reaches a tenth of the learning rate.
      stacks: of the model: each layer of a stack and each expert is treated as if it were alone.

    Raises:
      ValueError: naming what cannot be found or made, and groups that say what no group can.
    """
    rest = _one(config, steps, "optim", stacks)
    if not config.groups:
        return rest
    groups = {f"optim.groups[{number}]": group for number, group in enumerate(config.groups)}
    finders = _finders(config)
    parts = {key: _one(_of_group(config, group, key), steps, key, stacks) for key, group in groups.items()}

    def label(path: tuple, _: Any) -> str:
        return next((key for key, found in finders.items() if found(path_name(path))), _REST)

    def labels(params: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(label, params)

    return optax.multi_transform({_REST: rest, **parts}, labels)


def require_members(config: OptimConfig, params: PyTree) -> None:
    """Refuse groups that no parameter belongs to: of a parameter that several groups name, the first counts.

    Raises:
      ValueError: naming every such group, and the paths that there are.
    """
    names, finders = [*named_leaves(params)], _finders(config)
    first = {next((key for key, found in finders.items() if found(name)), _REST) for name in names}
    if empty := [key for key in finders if key not in first]:
        raise ValueError(
            f"{', '.join(empty)}: no parameter is left for it by its paths; the parameters are "
            f"{', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
        )


def moments(config: OptimConfig, steps: int, params: PyTree, stacks: Stacks = NO_STACKS) -> int:
    """Values that the optimizer keeps per parameter, on average and rounded.

    Args:
      config: the section `optim`.
      steps: length of the run.
      params: the model's parameters or their shapes.
      stacks: of the model.
    """
    if not config.links and not config.groups:
        return MOMENTS[config.name]
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    kept = jax.eval_shape(make_optimizer(config, steps, stacks).init, shapes)
    elements = [sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree)) for tree in (kept, shapes)]
    return round(elements[0] / max(elements[1], 1))


def learning_rate(config: OptimConfig, steps: int) -> optax.Schedule:
    """The learning rate at every step: up from 0 along a line, then as the schedule says; or the configured schedule's.

    Raises:
      ValueError: naming what of a schedule cannot be found or made.
    """
    if isinstance(config.learning_rate, Mapping):
        made = make(config.learning_rate, "optim.learning_rate")
        if not callable(made):
            raise ValueError("optim.learning_rate: must be a number, or the class_path of a schedule and its init_args")
        return cast("optax.Schedule", made)
    peak, warmup = config.learning_rate, config.warmup_steps
    after = {
        "cosine": optax.cosine_decay_schedule(peak, max(steps - warmup, 1), alpha=0.1),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    # Counting from 1: a first step with a learning rate of 0 would be lost.
    rising = lambda count: peak * (count + 1) / (warmup + 1)
    return optax.join_schedules([rising, after], [warmup])


def _finders(config: OptimConfig) -> dict[str, Callable[[str], bool]]:
    groups = enumerate(config.groups or ())
    return {
        f"optim.groups[{number}]": path_finder(group.get("paths"), f"optim.groups[{number}].paths")
        for number, group in groups
    }


def _one(config: OptimConfig, steps: int, key: str, stacks: Stacks) -> optax.GradientTransformation:
    schedule, links = learning_rate(config, steps), {f"{key}{at}": link for at, link in config.links}
    if config.class_path is None and config.chain is None:
        b1, b2 = config.betas
        matrices = leaf_mask({"matrices": True}, "weight_decay", stacks)
        return _NAMED[config.name](schedule, b1=b1, b2=b2, weight_decay=config.weight_decay, mask=matrices)
    if strange := [at for at, link in links.items() if not is_named(link)]:
        raise ValueError(f"{', '.join(strange)}: each must be a class_path and its init_args")
    if own := [at for at, link in links.items() if "learning_rate" in (link.get("init_args") or {})]:
        raise ValueError(
            f"{', '.join(own)}: init_args hold a learning_rate; give optim.learning_rate, a number or a schedule"
        )
    paths = [link["class_path"] for link in links.values()]
    if not any(takes(find(path, f"{at}.class_path"), "learning_rate") for at, path in zip(links, paths, strict=True)):
        raise ValueError(
            f"{key}.learning_rate has no effect: none of {', '.join(paths) or 'an empty chain'} takes a learning_rate; end "
            "the chain with optax.scale_by_learning_rate"
        )
    given = {"learning_rate": schedule, MUON: muon_dims(stacks)}
    made = [make(link, at, given, stacks) for at, link in links.items()]
    kinds = {path: type(one).__name__ for path, one in zip(paths, made, strict=True)}
    wrong = [f"{path} makes a {kinds[path]}" for path, one in zip(paths, made, strict=True) if not _updates(one)]
    if wrong:
        raise ValueError(f"{key}: {'; '.join(wrong)}, not an optax.GradientTransformation")
    return made[0] if len(made) == 1 else optax.chain(*made)


def _updates(made: Any) -> bool:
    return isinstance(made, optax.GradientTransformation | optax.GradientTransformationExtraArgs)


def _of_group(config: OptimConfig, group: Mapping[str, Any], key: str) -> OptimConfig:
    """The section with a group's own keys."""
    own = {name: value for name, value in group.items() if name != "paths"}
    known = {field.name for field in fields(OptimConfig)} - {"groups", "max_grad_norm"}
    if strange := sorted(set(own) - known):
        raise ValueError(f"{key}: {', '.join(strange)}: a group has paths and may have {', '.join(sorted(known))}")
    base: dict[str, Any] = {"groups": None}
    if {"name", "class_path", "chain"} & set(own):  # another optimizer: nothing of the section's is meant for it
        base |= {"class_path": None, "init_args": None, "chain": None} | {name: DEFAULTS[name] for name in NAMED_ONLY}
    if isinstance(own.get("learning_rate"), Mapping):
        base |= {name: DEFAULTS[name] for name in ("warmup_steps", "schedule")}
    if "betas" in own:
        own["betas"] = tuple(own["betas"])
    try:
        return replace(config, **base | own)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from error
