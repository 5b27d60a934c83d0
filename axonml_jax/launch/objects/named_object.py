"""Makes what a configuration describes: `{class_path: package.module.Name, init_args: {...}}`, as Lightning writes it too."""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from axonml_jax.launch.objects.import_rules import is_named
from axonml_jax.launch.objects.leaf_mask import is_mask, leaf_mask
from axonml_jax.launch.objects.own_dims import NO_STACKS, Stacks

_NOT_FOR_USERS = ("rngs", "parent", "name")
"""Arguments of Flax models that a configuration does not give."""


def find(path: str, key: str) -> Any:
    """What a dotted path names; its package must be allowed (see `import_problems`).

    Raises:
      ValueError: when there is no such module or name, with the nearest one; or when the object is another package's, which
        the user was not asked about.
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


def make(value: Any, key: str, given: Mapping[str, Any] | None = None, stacks: Stacks = NO_STACKS) -> Any:
    """The value with every described object made, from the inside out.

    Args:
      value: of a configuration.
      key: of the value, for messages.
      given: arguments for the outermost object that it does not have and takes.
      stacks: of the model, for masks of matrices.

    Raises:
      ValueError: for what cannot be found, and arguments that it does not take or lacks.
    """
    if is_mask(value):
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
    """The described class or function with its arguments, to be called later; `rngs` are given then.

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
    """Whether a factory has a parameter of that name."""
    return name in _parameters(factory)


def _described(value: Mapping[str, Any], key: str, stacks: Stacks = NO_STACKS) -> tuple[Callable, dict[str, Any]]:
    """The class or function of a description, and its arguments with what they describe made."""
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
