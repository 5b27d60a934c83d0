"""From a YAML file and the command line to a `RunConfig`: every wrong key is named with the nearest known one."""

import difflib
import inspect
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import SUPPRESS, ArgumentError, ArgumentParser, Namespace

from axonml_jax.launch.config.choice import Choice, values_of
from axonml_jax.launch.config.nearest_file import nearest_file, not_a_file, shipped_config
from axonml_jax.launch.config.numbers import unusable
from axonml_jax.launch.config.plain_yaml import yaml_in
from axonml_jax.launch.config.run_config import ConfigError, RunConfig
from axonml_jax.launch.config.sections.diloco_config import DiLoCoConfig
from axonml_jax.launch.config.sections.finetune_config import LoraConfig
from axonml_jax.launch.config.sections.optim_config import OTHERS
from axonml_jax.launch.config.sections.own_config import OwnModel
from axonml_jax.launch.config.structure import Structure, as_yaml, is_structure, plain
from axonml_jax.launch.objects.import_rules import import_problems
from axonml_jax.models.config import TransformerConfig
from axonml_jax.synonyms import AXES, KEYS, NO_AXIS, SAME_KEYS, SECTIONS

_SHOWN = 20
_NOT_SETTINGS = ("help", "print_config", "config")


def read_config(command: str, argv: Sequence[str], more: str = "", imports: Collection[str] = ()) -> RunConfig:
    """The configuration of `axonml-jax COMMAND CONFIG [--section.key value ...]`; the command line wins over the file.

    Args:
      command: the subcommand, for its usage text.
      argv: what follows it: the path of a file, or the name of a configuration that comes with the package, and flags.
      more: text below the help, of flags that are not keys of a configuration.
      imports: packages that the configuration may import besides optax.

    Raises:
      ConfigError: for a missing or broken file, unknown keys (each with the nearest known one), wrong types and values, and
        objects of packages that it may not import.
      SystemExit: after `--help`.
    """
    if not argv or argv[0].startswith("-"):
        if {"-h", "--help"} & set(argv):
            config_parser(command, more).parse_args(["--help"])
        raise ConfigError(f"give a configuration file first: axonml-jax {command} configs/quickstart.yaml")
    path, flags = argv[0], _with_bare_switches(argv[1:])
    if not Path(path).is_file():
        path = str(shipped_config(path) or path)
    in_file, flags = _keys_of(path), [_by_our_name(flag) for flag in flags]
    in_flags = _flags_of(flags)
    keys, named = list(in_file), list(in_flags)
    _refuse_unknown(keys, named, path)
    _refuse_imports(_nested(in_file | in_flags), imports)  # before a parser sees a value
    if own := _OWN_MODEL in {*keys, *named}:
        _refuse_of_transformer(keys, named, path)
    try:
        values = config_parser(command, more, own).parse_args(["--config", _by_our_names(path), *flags])
    except (ArgumentError, TypeError, ValueError) as error:
        raise ConfigError(_explained(str(error))) from error
    config = _build(RunConfig, values)
    _refuse_imports(as_dict(config), imports)
    return config


def as_dict(config: RunConfig) -> dict[str, Any]:
    """A configuration as plain values, as a YAML file holds it."""
    values = plain(asdict(config))
    for section, kind in _SECTIONS.items():
        for each in fields(kind) if section else ():
            if "section" in each.metadata:  # a section of its own already
                values[section].pop(each.name, None)
    return values


def config_parser(command: str, more: str = "", own: bool = False) -> ArgumentParser:
    """The parser with one flag for every configuration key, its help taken from the docstrings.

    Args:
      command: for its usage text.
      more: text below the help.
      own: the model is one's own: the transformer's keys are left out.
    """
    parser = ArgumentParser(
        prog=f"axonml-jax {command}",
        usage=f"axonml-jax {command} CONFIG [--section.key value ...]",
        description="CONFIG is a YAML file, or the name of one that comes with the package, such as quickstart; every key of "
        "it can be given as a flag, which wins over the file.",
        epilog=more,
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help=SUPPRESS)
    groups: dict[str, Any] = {}
    for key, kind, default, text in settings():
        section, _, name = key.rpartition(".")
        if section not in groups:
            title = _SECTIONS[section].__doc__ or ""
            groups[section] = parser.add_argument_group(section or "run", title.split("\n")[0])
        if own and section == "model" and key not in _OF_OWN_MODEL:
            continue
        needed = default is MISSING and key not in _OF_OWN_MODEL
        required: dict[str, Any] = (
            {"required": True} if needed else {"default": None if default is MISSING else default}
        )
        taken = Structure(kind, _in_words(kind)) if is_structure(kind) else kind
        taken = Choice(key, kind, _in_words(kind)) if values_of(kind) else taken
        groups[section].add_argument(f"--{key}", type=taken, help=text, metavar=name.upper(), **required)
    return parser


def settings() -> Iterator[tuple[str, Any, Any, str]]:
    """Every configuration key with its type, default (or `MISSING`) and help."""
    for section, cls in _SECTIONS.items():
        kinds, texts = typing.get_type_hints(cls), attribute_docs(cls)
        for each in fields(cls):
            key = f"{section}.{each.name}" if section else each.name
            if key not in _SECTIONS and "section" not in each.metadata:
                yield key, kinds[each.name], each.default, texts[each.name]
        if section == "model":
            kinds, texts = typing.get_type_hints(OwnModel), attribute_docs(OwnModel)
            yield from ((f"model.{name}", kinds[name], MISSING, texts[name]) for name in kinds)


def attribute_docs(cls: type) -> dict[str, str]:
    """The `Attributes:` of a class docstring by name, each on one line."""
    _, _, block = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    entries = re.findall(r"^ {2}(\w+): (.*(?:\n {4}.*)*)", block, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


_SECTIONS: dict[str, Any] = {"": RunConfig} | {
    name: TransformerConfig if name == "model" else kind
    for name, kind in typing.get_type_hints(RunConfig).items()
    if name == "model" or is_dataclass(kind)
}
_SECTIONS["finetune.lora"] = LoraConfig
_SECTIONS["plan.diloco"] = DiLoCoConfig
_OF_OWN_MODEL = ("model.class_path", "model.init_args")
_OWN_MODEL = _OF_OWN_MODEL[0]


def _keys_of(path: str) -> dict[str, Any]:
    """What a file gives, by key."""
    if kind := not_a_file(Path(path)):
        raise ConfigError(
            f"{path} is {kind}: give a configuration file, or the name of one that comes with the package"
        )
    if not Path(path).is_file():
        near = nearest_file(Path(path))
        raise ConfigError(f"no such configuration file: {path}" + (f"; did you mean {near}?" if near else ""))
    try:
        content = yaml_in(Path(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} holds no keys: give a YAML file with sections such as model and train")
    return _renamed(dict(_flat(content)), path)


def _renamed(given: dict[str, Any], path: str) -> dict[str, Any]:
    """Values by our names of the keys.

    Raises:
      ConfigError: one is given by two names.
    """
    if twice := [f"{other} and {ours}" for other, ours in SAME_KEYS.items() if other in given and ours in given]:
        raise ConfigError(f"{path} gives {', '.join(twice)}, which are one: give one of them")
    return {SAME_KEYS.get(key, key): value for key, value in given.items()}


def _by_our_names(path: str) -> str:
    """A file that the parser can read: itself, or, where it has other names for keys, its content with ours."""
    content = yaml_in(Path(path))
    others = {other: ours for other, ours in SAME_KEYS.items() if other in dict(_flat(content))}
    for other, ours in others.items():
        section, name = other.split(".")
        content[section][ours.partition(".")[2]] = content[section].pop(name)
    return yaml.safe_dump(content) if others else path


def _by_our_name(flag: str) -> str:
    key, equals, value = flag[2:].partition("=")
    return f"--{SAME_KEYS[key]}{equals}{value}" if flag.startswith("--") and key in SAME_KEYS else flag


def _flat(content: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key in _SECTIONS:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _flags_of(flags: Sequence[str]) -> dict[str, Any]:
    """What `--key value` and `--key=value` give, by key."""
    pairs = ((*flag[2:].partition("="), after) for flag, after in pairwise([*flags, ""]) if flag.startswith("--"))
    return {key: as_yaml(text if equals else after) for key, equals, text, after in pairs}


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by key as a file has them, section by section."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (found.setdefault(section, {}) if section else found)[name] = value
    return found


def _refuse_imports(values: Any, allowed: Collection[str]) -> None:
    if problems := import_problems(values, allowed):
        raise ConfigError("\n".join(problems))


def _with_bare_switches(flags: Sequence[str]) -> list[str]:
    """`--profile` alone means `--profile true`, for every yes-or-no setting."""
    switches = {f"--{key}" for key, kind, _, _ in settings() if kind is bool}
    pairs = pairwise([*flags, "--"])
    return [f"{flag}=true" if flag in switches and after.startswith("--") else flag for flag, after in pairs]


def _refuse_unknown(keys: Sequence[str], flags: Sequence[str], path: str) -> None:
    known = [key for key, *_ in settings()]
    strange = [key for key in keys if key not in known]
    problems = [f"unknown key {key!r} in {path}{_nearest(key, known)}" for key in strange[:_SHOWN]]
    problems += [f"and {len(strange) - _SHOWN} more"] * (len(strange) > _SHOWN)
    unknown = [flag for flag in flags if flag not in known and flag not in _NOT_SETTINGS]
    problems += [f"unknown flag --{flag}{_nearest(flag, known, '--')}" for flag in unknown]
    if problems:
        raise ConfigError("\n".join(problems))


def _refuse_of_transformer(keys: Sequence[str], flags: Sequence[str], path: str) -> None:
    """The transformer's keys describe nothing of a model of one's own."""
    beside = dict.fromkeys(key for key in (*keys, *flags) if key.startswith("model.") and key not in _OF_OWN_MODEL)
    if beside:
        raise ConfigError(
            f"{', '.join(beside)}: the transformer's, without effect beside {_OWN_MODEL} in {path}; give your model's own "
            "arguments under model.init_args"
        )


def _nearest(key: str, known: Sequence[str], dashes: str = "") -> str:
    """The nearest known key: the whole key's, or that of its last part, when somebody forgot the section."""
    if key in _SECTIONS:
        first = next(name for name in known if name.startswith(f"{key}."))
        what = "; over which devices a model is split stands in mesh, such as mesh.fsdp" * (key == "plan")
        return f": {key} is a section, give its keys, such as {first}{what}"
    if not dashes and key in SECTIONS:
        return f": did you mean the section {SECTIONS[key]}?"
    whole, _, part = key.rpartition(".")
    if "mapping" in next((_in_words(kind) for name, kind, *_ in settings() if name == whole), ""):
        return f": give {dashes}{whole} as a mapping, '{{{part}: ...}}'"
    lasts, named = {name.rpartition(".")[2]: name for name in reversed(known)}, key.rpartition(".")[2].lower()
    if why := NO_AXIS.get(named):
        return f": {why}"
    if other := lasts.get(AXES.get(named) or KEYS.get(named, "")):
        return f": did you mean {dashes}{other}?"
    last = difflib.get_close_matches(key.rpartition(".")[2], lasts, n=1, cutoff=0.75)
    whole = difflib.get_close_matches(key, [*known, *_SECTIONS], n=1, cutoff=0.6)
    near = lasts[last[0]] if last and "." not in key else whole[0] if whole else lasts[last[0]] if last else None
    return f": did you mean {dashes}{near}?" if near else "; --help lists all"


def _explained(message: str) -> str:
    """jsonargparse's message on one line; a value of the wrong type is told the type as people write it."""
    message = " ".join(message.split())
    found = re.match(r'(?:Parser key "|argument --)([\w.]+)"?: .*(?:Got|Given) value: (.*)', message)
    kinds = {key: kind for key, kind, *_ in settings()}
    if found is None or found[1] not in kinds:
        return message.replace('Key "', 'key "').replace("unrecognized arguments", "not understood")
    section, _, name = found[1].rpartition(".")
    return f"{found[1]}={found[2]}: must be {_in_words(kinds[found[1]])}{OTHERS.get(name, '') if section == 'optim' else ''}"


def _in_words(kind: Any) -> str:
    """A type as people write it: `one of float32, bf16, or null`."""
    parts = typing.get_args(kind)
    if kind in _WORDS:
        return _WORDS[kind]
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(map(str, parts))}"
    if typing.get_origin(kind) is tuple:
        return f"a list such as [{', '.join(_EXAMPLES[part] for part in parts)}]"
    return ", or ".join(_in_words(part) for part in parts)


_EXAMPLES = {int: "2", float: "0.9", str: "ring"}
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    dict[str, Any]: "a mapping such as {key: value}",
    dict[str, float]: "a mapping such as {path: 0.5}",
    dict[str, str]: "a mapping such as {query/kernel: in out out}",
    tuple[str, ...]: "a list such as [text]",
    list[dict[str, Any]]: "a list of mappings",
}


def _build(cls: type, values: Namespace, section: str = "") -> Any:
    """The dataclass from parsed values; the problems of all its sections are reported together."""
    kinds, arguments, problems = typing.get_type_hints(cls), {}, []
    if cls is RunConfig:
        own = values["model"]["class_path"] is not None
        kinds["model"] = OwnModel if own else TransformerConfig
        if not own and values["model"]["init_args"] is not None:
            problems.append("model.init_args has no effect without model.class_path")
    for each in fields(cls):
        if "section" in each.metadata:
            continue
        value, key = values[each.name], f"{section}{each.name}"
        problems += unusable(key, value)
        try:
            inside = is_dataclass(kinds[each.name])
            arguments[each.name] = _build(kinds[each.name], value, f"{key}.") if inside else value
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return cls(**arguments)
    except ValueError as error:
        raise ConfigError(str(error)) from error
