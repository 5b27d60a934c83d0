"""`python -m axonml_jax.compat`: runs every canary on the JAX that is installed, on two simulated CPU devices.

Run it when a new JAX comes out. It prints one line per canary; for one that fails, what was found and what would go wrong, and
the exit status is 1.
"""

import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires

import jax

from axonml_jax.compat.canaries import CANARIES, CanaryError
from axonml_jax.compat.versions import installed

LIBRARIES = ("jax", "jaxlib", "flax")


def main() -> int:
    """Runs every canary and prints its result.

    Returns:
      0 when all are well, 1 when one fails.
    """
    os.environ.setdefault("NPROC", "16")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    found = ", ".join(f"{name} {installed(name) or 'of unknown version'}" for name in LIBRARIES)
    print(f"{found} on Python {platform.python_version()}; supported: {_supported()}")
    width, failed = max(len(canary.name) for canary in CANARIES), 0
    for canary in CANARIES:
        try:
            canary.check()
        except CanaryError as error:
            failed += 1
            print(f"{canary.name:{width}}  FAILED: {' '.join(error.found.split())}")
            print(f"{'':{width}}  relied on: {canary.relies}\n{'':{width}}  otherwise: {canary.otherwise}")
        else:
            print(f"{canary.name:{width}}  ok")
    print(f"{failed} of {len(CANARIES)} failed" if failed else f"all {len(CANARIES)} are well")
    return int(failed > 0)


def _supported() -> str:
    """The versions of libraries that this package requires."""
    try:
        wanted = requires("axonml-jax") or []
    except PackageNotFoundError:
        return "see pyproject.toml (axonml-jax is not installed as a package)"
    ours = [each.replace(" ", "") for each in wanted if re.split(r"[^\w-]", each)[0] in LIBRARIES and ";" not in each]
    return ", ".join(ours)


if __name__ == "__main__":
    sys.exit(main())
