"""Compiled programs that outlive their process: JAX's persistent cache, in a folder that is bounded and that the user sees."""

import os
from pathlib import Path

import jax

AUTO = "auto"
"""Stands for the folder of this user's caches."""

MOST = 4 * 2**30
"""Bytes that the folder may hold when a run starts; those whose last use is the longest ago go first."""


def keep_compiled(folder: str | None) -> None:
    """Have JAX look for compiled programs in a folder, and leave there those that took a second or longer.

    A folder that JAX was given already (`JAX_COMPILATION_CACHE_DIR`), and the switch `JAX_ENABLE_COMPILATION_CACHE`, hold.

    Args:
      folder: which; "auto": `axonml_jax/compiled` in the user's caches (`XDG_CACHE_HOME`), and none where it cannot be
        written; None: JAX's own setting.

    Raises:
      ValueError: when the given folder cannot be written.
    """
    if folder is None or not jax.config.jax_enable_compilation_cache or kept_in() is not None:
        return
    path = _caches() if folder == AUTO else Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(f"{path} is not writable")
        _trim(path)
    except OSError as error:
        if folder == AUTO:
            return
        raise ValueError(f"output.compiled={folder}: {error}; give a folder that can be written, or null") from error
    jax.config.update("jax_compilation_cache_dir", str(path))


def kept_in() -> Path | None:
    """The folder in which JAX keeps compiled programs; None: nowhere."""
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) if folder and jax.config.jax_enable_compilation_cache else None


def in_words() -> str:
    """Where compiled programs are kept, and how many are there."""
    folder = kept_in()
    if folder is None:
        return "programs are compiled anew by every run"
    sizes = [each.stat().st_size for each in folder.glob("*-cache")]
    return f"programs are kept in {folder}: {len(sizes)} there, {sum(sizes) / 1e6:,.1f} MB"


def _caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "axonml_jax" / "compiled"


def _trim(folder: Path) -> None:
    """Remove the programs whose last use is the longest ago, until the others fit; other processes may do the same."""
    found = sorted((each.stat().st_atime, each.stat().st_size, each) for each in folder.glob("*-cache"))
    over = sum(size for _, size, _ in found) - MOST
    for _, size, path in found:
        if over <= 0:
            break
        path.unlink(missing_ok=True)
        over -= size
