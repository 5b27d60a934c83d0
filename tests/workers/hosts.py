"""Two hosts on one machine: network namespaces joined by a cable (Linux, root)."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

ADDRESS = "10.77.0.1"
"""The first one's."""


class NoHosts(Exception):
    """Why this machine has no network namespaces."""


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces with an address each; yields their names, for `ip netns exec NAME command`.

    Raises:
      NoHosts: where there can be none.
    """
    if not shutil.which("ip") or os.geteuid() != 0:
        raise NoHosts("network namespaces need root and the command ip")
    names = [f"axn{os.getpid()}-{number}" for number in (1, 2)]
    cable = [f"ax{os.getpid()}-{number}"[-15:] for number in (1, 2)]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
            for number, (name, end) in enumerate(zip(names, cable, strict=True), start=1):
                _ip("link", "set", end, "netns", name)
                _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
                for device in (end, "lo"):
                    _ip("-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            raise NoHosts(f"no network namespaces here: {error.stderr.decode().strip()}") from error
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
