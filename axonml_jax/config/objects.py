"""Objects that a configuration names by `class_path` and `init_args`."""

import difflib
import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from axonml_jax.base import PyTree, named_leaves, path_name
from axonml_jax.config.config import is_named
from axonml_jax.config.sections import DEFAULTS, NAMED_ONLY, OptimConfig

# --------------------------------------------------------------------------------------------------
# The dims of parameters without those that number layers or experts: what is a matrix, for masks and for Muon.
# --------------------------------------------------------------------------------------------------

Stacks = Mapping[str, int]
"""How many first dims of a parameter number layers or experts, by path (`Functional.stacked_dims`)."""

NO_STACKS: Stacks = MappingProxyType({})
"""The `Stacks` of a model without stacked layers or experts."""

MUON = "muon_weight_dimension_numbers"
"""The argument by which `optax.contrib.muon` takes the dims of every parameter that are a matrix."""


def own_dims(params: PyTree, stacks: Stacks) -> PyTree:
    """The number of dims of each parameter without its stacked ones: of one layer, or one expert.

    >>> own_dims({"blocks": {"scale": jnp.ones((2, 8))}, "scale": jnp.ones(8)}, {"blocks/scale": 1})
    {'blocks': {'scale': 1}, 'scale': 1}
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: jnp.ndim(leaf) - stacks.get(path_name(path), 0), params)


def muon_dims(stacks: Stacks) -> Callable[[PyTree], PyTree]:
    """The dims that Muon orthogonalizes: the last two of every matrix, per layer and expert; None for other parameters."""

    def numbers(params: PyTree) -> PyTree:
        last_two = optax.contrib.MuonDimensionNumbers(-2, -1)
        return jax.tree.map(lambda dims: last_two if dims == 2 else None, own_dims(params, stacks))

    return numbers


# --------------------------------------------------------------------------------------------------
# Which parameters an option applies to, as a configuration says it: by their paths, or matrices only.
# --------------------------------------------------------------------------------------------------

KINDS = ("paths", "not_paths", "matrices")
"""`{paths: [...]}`: leaves whose path one of the expressions finds; `{not_paths: [...]}`: the others; `{matrices: true}`:
leaves of two dims or more, of one layer of a stack and one expert."""


def is_mask(value: Any) -> bool:
    """Whether a value of a configuration describes a mask.

    >>> is_mask({"paths": ["kernel$"]}), is_mask({"learning_rate": 1.0})
    (True, False)
    """
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in KINDS


def leaf_mask(value: Mapping[str, Any], key: str, stacks: Stacks = NO_STACKS) -> Callable[[PyTree], PyTree]:
    """Make a function from parameters to a tree of booleans, as optax takes masks.

    >>> leaf_mask({"not_paths": ["bias$"]}, "mask")({"up": {"kernel": 1.0, "bias": 1.0}})
    {'up': {'bias': False, 'kernel': True}}

    Args:
      value: one of `KINDS` and its argument.
      key: for messages.
      stacks: of the model.

    Raises:
      ValueError: for what is no regular expression, or no truth value of `matrices`.
    """
    [(kind, given)] = value.items()
    if kind == "matrices":
        if not isinstance(given, bool):
            raise ValueError(f"{key}.matrices={given}: must be true or false")
        return lambda params: jax.tree.map(lambda dims: (dims > 1) is given, own_dims(params, stacks))
    found = path_finder(given, f"{key}.{kind}")
    wanted = kind == "paths"
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: found(path_name(path)) is wanted, params)


def path_finder(expressions: Any, key: str) -> Callable[[str], bool]:
    """A predicate of paths: whether one of the regular expressions is found in the path.

    Raises:
      ValueError: naming every one that is no regular expression.
    """
    listed = [expressions] if isinstance(expressions, str) else expressions
    if not isinstance(listed, list | tuple) or not listed or not all(isinstance(each, str) for each in listed):
        raise ValueError(f"{key}={expressions}: must be a list of regular expressions, such as ['bias$', 'norm']")
    problems, compiled = [], []
    for each in listed:
        try:
            compiled.append(re.compile(each))
        except re.error as error:
            problems.append(f"{each!r} ({error})")
    if problems:
        raise ValueError(f"{key}: no regular expression: {', '.join(problems)}")
    return lambda path: any(each.search(path) for each in compiled)


# --------------------------------------------------------------------------------------------------
# Makes what a configuration describes: `{class_path: package.module.Name, init_args: {...}}`, as Lightning writes it
# too.
# --------------------------------------------------------------------------------------------------

_NOT_FOR_USERS = ("rngs", "parent", "name")
"""Arguments of Flax models that a configuration does not give."""


def find(path: str, key: str) -> Any:
    """Import the object of a dotted path; its package must be allowed (see `import_problems`).

    Raises:
      ValueError: when there is no such module or name, with the nearest one; when it is no class or function; or when the
        object is another package's, which the user has not allowed.
    """
    parts = path.split(".")
    module, rest = _module(parts, path, key)
    found: Any = module
    for name in rest:
        if not hasattr(found, name):
            near = difflib.get_close_matches(name, [each for each in dir(found) if each[0] != "_"], n=1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise ValueError(f"{key}={path}: {getattr(found, '__name__', found)} has no {name!r}{hint}")
        found = getattr(found, name)
        if inspect.ismodule(found) and found.__name__.partition(".")[0] != parts[0]:
            raise ValueError(
                f"{key}={path}: leads into another package, {found.__name__!r}; give the path where it is defined"
            )
    owner = (getattr(found, "__module__", None) or "").partition(".")[0]
    if inspect.ismodule(found) or not callable(found):
        raise ValueError(f"{key}={path}: is no class or function")
    if owner != parts[0]:
        raise ValueError(f"{key}={path}: is an object of {owner!r}; give the path where it is defined")
    return found


def make(value: Any, key: str, given: Mapping[str, Any] | None = None, stacks: Stacks | None = None) -> Any:
    """Make every object that a value describes, from the inside out; an optimizer's masks become functions of parameters.

    Args:
      value: of a configuration.
      key: of the value, for messages.
      given: arguments for the outermost object that it does not have and takes.
      stacks: of the model, for masks of matrices; None: not of an optimizer, and nothing is a mask (`is_mask`).

    Raises:
      ValueError: for what cannot be found, and arguments that it does not take or lacks.
    """
    if stacks is not None and is_mask(value):
        return leaf_mask(value, key, stacks)
    if isinstance(value, list | tuple):
        return [make(inner, f"{key}[{number}]", stacks=stacks) for number, inner in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if not is_named(value):
        return {name: make(inner, f"{key}.{name}", stacks=stacks) for name, inner in value.items()}
    factory, own = _described(value, key, stacks)
    taken = {name: one for name, one in (given or {}).items() if name not in own and takes(factory, name)}
    _check_arguments(factory, own | taken, value["class_path"], key)
    return factory(**own, **taken)


def made_by(value: Mapping[str, Any], key: str, leaving: int = 0) -> partial:
    """The described class or function with its arguments bound, to be called later with `rngs` if it takes them.

    Args:
      value: `{class_path, init_args}`.
      key: of the value, for messages.
      leaving: so many first arguments are given later too.

    Raises:
      ValueError: for what cannot be found, and arguments that it does not take or lacks.
    """
    factory, own = _described(value, key)
    positional = [name for name, each in _parameters(factory).items() if each.kind is not each.KEYWORD_ONLY][:leaving]
    if taken := [name for name in positional if name in own]:
        raise ValueError(f"{key}.init_args: {', '.join(taken)} of {value['class_path']} is given in every call")
    later = {*positional, *(["rngs"] if takes(factory, "rngs") and "rngs" not in own else [])}
    _check_arguments(factory, own | dict.fromkeys(later), value["class_path"], key)
    return partial(factory, **own)


def takes(factory: Callable, name: str) -> bool:
    """Whether a factory has a parameter with this name."""
    return name in _parameters(factory)


def _described(value: Mapping[str, Any], key: str, stacks: Stacks | None = None) -> tuple[Callable, dict[str, Any]]:
    """The class or function of a description, and its arguments, with the objects in them made."""
    if strange := sorted(set(value) - {"class_path", "init_args"}):
        raise ValueError(f"{key}: {', '.join(strange)} beside class_path; arguments go under init_args")
    if not isinstance(value["class_path"], str):
        raise ValueError(f"{key}.class_path={value['class_path']}: must be a dotted path")
    factory = find(value["class_path"], f"{key}.class_path")
    return factory, {
        name: make(inner, f"{key}.init_args.{name}", stacks=stacks)
        for name, inner in (value.get("init_args") or {}).items()
    }


def _module(parts: list[str], path: str, key: str) -> tuple[Any, list[str]]:
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        try:
            return importlib.import_module(name), parts[end:]
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # a module that exists imports one that does not
    raise ValueError(f"{key}={path}: there is no package {parts[0]!r} (searched: {', '.join(sys.path[:3])}, ...)")


def _parameters(factory: Callable) -> Mapping[str, inspect.Parameter]:
    # NNX modules are made by a metaclass that takes anything; Linen's ask its metaclass for nothing.
    own = inspect.isclass(factory) and type(factory).__call__ is not type.__call__
    try:
        known = inspect.signature(factory.__init__ if own else factory).parameters
        return dict([*known.items()][own:])
    except (TypeError, ValueError):  # made in C: nothing is known
        return {}


def _check_arguments(factory: Callable, given: Mapping[str, Any], path: str, key: str) -> None:
    known = _parameters(factory)
    if not known or any(each.kind is each.VAR_KEYWORD for each in known.values()):
        unknown = []
    else:
        unknown = [name for name in given if name not in known]
    problems = []
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1)
        listed = ", ".join(each for each in known if each not in _NOT_FOR_USERS)
        hint = f"did you mean {near[0]}? It takes {listed}" if near else f"it takes {listed or 'none'}"
        problems.append(f"{key}.init_args.{name}: {path} takes no such argument; {hint}")
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    lacking = [
        name
        for name, each in known.items()
        if each.default is each.empty and each.kind not in variadic and name not in given
    ]
    if lacking:
        problems.append(f"{key}.init_args: {path} needs {', '.join(lacking)} too")
    if problems:
        raise ValueError("\n".join(problems))


# --------------------------------------------------------------------------------------------------
# The optimizer that a configuration describes: a named one, any factory or chain of them, others for groups of
# parameters.
# --------------------------------------------------------------------------------------------------

MOMENTS = {"adamw": 2, "lion": 1}
"""Values that an optimizer keeps per parameter."""

_NAMED = {"adamw": optax.adamw, "lion": optax.lion}
_REST = "rest"


def make_optimizer(config: OptimConfig, steps: int, stacks: Stacks = NO_STACKS) -> optax.GradientTransformation:
    """Make the optimizer with the configured learning rate; the trainer does the clipping (`max_grad_norm`).

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
    """Refuse groups without parameters; a parameter that several groups match belongs to the first.

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
    """The rounded average number of values that the optimizer keeps per parameter.

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
    """The learning-rate schedule: a linear warmup, in which step k of W has k / (W + 1) of the rate, then the named schedule.

    A configured object takes the place of all of it.

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
    """The optimizer section with a group's own keys applied."""
    own = {name: value for name, value in group.items() if name != "paths"}
    known = {field.name for field in fields(OptimConfig)} - {"groups", "max_grad_norm"}
    if strange := sorted(set(own) - known):
        raise ValueError(f"{key}: {', '.join(strange)}: a group has paths and may have {', '.join(sorted(known))}")
    base: dict[str, Any] = {"groups": None}
    if {"name", "class_path", "chain"} & set(own):  # another optimizer: nothing of the section's is meant for it
        base |= {"class_path": None, "init_args": None, "chain": None} | {name: DEFAULTS[name] for name in NAMED_ONLY}
    if isinstance(own.get("learning_rate"), Mapping):
        base |= {name: DEFAULTS[name] for name in ("warmup_steps", "schedule")}
    if isinstance(own.get("betas"), list):
        own["betas"] = tuple(own["betas"])
    try:
        return replace(config, **base | own)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from error
