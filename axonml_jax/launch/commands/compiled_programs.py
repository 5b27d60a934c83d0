"""Compiled programs that outlive their process: JAX's persistent cache, in a folder that is bounded and that the user sees."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import jax

from axonml_jax.logging import logger

AUTO = "auto"
"""Stands for the folder of this user's caches."""

MOST = 4 * 2**30
"""Bytes that the folder may hold when a run starts; those whose last use is the longest ago go first."""

_LEAST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


def keep_compiled(folder: str | None) -> None:
    """Have JAX look for compiled programs in a folder, and leave there what it compiles.

    Small programs too, unlike JAX by itself: making a model and its state compiles dozens of them, for seconds together. A
    folder that JAX was given already (`JAX_COMPILATION_CACHE_DIR`), what it shall leave out
    (`JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS`), and the switch `JAX_ENABLE_COMPILATION_CACHE`, hold.

    Args:
      folder: which; "auto": `axonml_jax/compiled` in the user's caches (`XDG_CACHE_HOME`), and none where it cannot be
        written; None: JAX's own setting.

    Raises:
      ValueError: when the given folder cannot be written, or others may write into it: a program is code that runs.
    """
    if folder is None or not jax.config.jax_enable_compilation_cache or kept_in() is not None:
        return
    path = _caches() if folder == AUTO else Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(f"{path} is not writable")
        if why := shared_with(path):
            raise _Shared(f"{why}, and a program is code that runs")
        _trim(path)
    except OSError as error:
        if folder != AUTO:
            remedy = f"; give a folder that can be written, or null{_Shared.remedy * isinstance(error, _Shared)}"
            raise ValueError(f"output.compiled={folder}: {error}{remedy}") from error
        if isinstance(error, _Shared):
            logger.warning("compiled programs are not kept in %s: %s%s", path, error, _Shared.remedy)
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    if _LEAST not in os.environ:
        jax.config.update(_LEAST.lower(), 0)


def kept_in() -> Path | None:
    """The folder in which JAX keeps compiled programs; None: nowhere."""
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) if folder and jax.config.jax_enable_compilation_cache else None


def in_words() -> str:
    """Where compiled programs are kept, and how many are there."""
    folder = kept_in()
    if folder is None:
        return "programs are compiled anew by every run"
    sizes = [about.st_size for _, about in _programs(folder)]
    return f"programs are kept in {folder}: {len(sizes)} there, {sum(sizes) / 1e6:,.1f} MB"


class _Shared(OSError):
    """A folder that others may write."""

    remedy = "; chmod go-w it. JAX_COMPILATION_CACHE_DIR takes a folder as it is"


def shared_with(folder: Path) -> str | None:
    """Who else may put files into a folder, in words; None: only this user and root.

    Folders above it count too: whoever may write one of these, unless its sticky bit is set, may put another in this one's
    place. What their groups may write is left out, as many users are alone in theirs.
    """
    inner, *above = (folder.resolve(), *folder.resolve().parents)
    about = inner.stat()
    if about.st_uid not in (os.geteuid(), 0):
        return f"{inner} belongs to user {about.st_uid}"
    if about.st_mode & 0o022:
        return f"others may write {inner} (mode {stat.S_IMODE(about.st_mode):04o})"
    for each in above:
        about = each.stat()
        if about.st_uid not in (os.geteuid(), 0):
            return f"{each} above it belongs to user {about.st_uid}"
        if about.st_mode & 0o002 and not about.st_mode & stat.S_ISVTX:
            return f"others may write {each} above it (mode {stat.S_IMODE(about.st_mode):04o})"
    return None


def _caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "axonml_jax" / "compiled"


def _programs(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The programs in a folder, but for those that another process removes meanwhile."""
    for path in folder.glob("*-cache"):
        with suppress(FileNotFoundError):
            yield path, path.stat()


def _trim(folder: Path) -> None:
    """Remove the programs whose last use is the longest ago, until the others fit; other processes may do the same."""
    found = sorted((about.st_atime, about.st_size, path) for path, about in _programs(folder))
    over = sum(size for _, size, _ in found) - MOST
    for _, size, path in found:
        if over <= 0:
            break
        path.unlink(missing_ok=True)
        over -= size
