"""What a machine's workers would run, in a few words that launchers compare before they let a machine in.

A machine that comes to a running job ends its attempt. One that would run something else would end it for nothing.
"""

import hashlib
import hmac
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from axonml_jax.launch.processes.launch_options import LaunchOptions

_PACKAGES = ("axonml_jax", "jax", "jaxlib", "flax", "optax")
_CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml")
_LARGEST = 2**20
_WORDS = {
    "program": "its script or module is another one than on node 0",
    "arguments": "its arguments, or a configuration that they name, are others than on node 0",
}


def likeness(options: LaunchOptions, token: bytes) -> dict[str, str]:
    """What must be alike where machines come and go.

    A script and the configurations among the arguments count by what they hold, not by where they are.

    Args:
      options: of this launcher.
      token: the job's; without it nobody can guess arguments from what is said of them.
    """
    script = b"" if options.module else _held_by(options.target)
    program = [b"module" if options.module else b"script", script or options.target.encode()]
    arguments = [_configuration(each) or each.encode() for each in options.arguments]
    return {
        "program": _digest(token, program),
        "arguments": _digest(token, arguments),
        "versions": f"Python {sys.version_info[0]}.{sys.version_info[1]}, {', '.join(map(_installed, _PACKAGES))}",
    }


def unlike(there: Mapping[str, str], here: Mapping[str, str], node: int) -> list[str]:
    """What of a machine is not as it is on node 0, in words.

    >>> one = {"program": "1", "arguments": "2", "versions": "jax 0.10.2"}
    >>> unlike(one, one, 3), unlike(one | {"program": "4"}, one, 3)
    ([], ['its script or module is another one than on node 0'])
    >>> unlike(one | {"versions": "jax 0.12.0"}, one, 3)
    ['it has jax 0.12.0 on node 3 and jax 0.10.2 on node 0']

    Args:
      there, here: what both launchers say of themselves.
      node: the other one.
    """
    found = [words for name, words in _WORDS.items() if there[name] != here[name]]
    if there["versions"] != here["versions"]:
        found.append(f"it has {there['versions']} on node {node} and {here['versions']} on node 0")
    return found


def _digest(token: bytes, parts: list[bytes]) -> str:
    found = hmac.new(token, digestmod=hashlib.sha256)
    for part in parts:
        found.update(b"%d " % len(part) + part)
    return found.hexdigest()


def _configuration(argument: str) -> bytes:
    """What an argument's file holds, after the name of its flag; empty where it names no configuration."""
    flag, equals, path = argument.rpartition("=")
    held = _held_by(path) if Path(path).suffix in _CONFIGURATIONS else b""
    return (flag + equals).encode() + held if held else b""


def _held_by(path: str) -> bytes:
    try:
        given = Path(path)
        return given.read_bytes() if given.is_file() and given.stat().st_size <= _LARGEST else b""
    except OSError:  # whoever runs it will say so
        return b""


def _installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"
