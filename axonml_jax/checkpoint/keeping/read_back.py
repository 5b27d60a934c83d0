"""A checkpoint that was just written is read again from its disk before it counts.

Checksums are made of what the system gives back right after the write, which is its page cache. So they find what happens
to files later, and not what the disk made of the write itself. That is what reading back finds.
"""

import errno
import os
from pathlib import Path

from axonml_jax.checkpoint.manifest import DamagedCheckpoint, Manifest, damage

PAST_THE_CACHE = hasattr(os, "posix_fadvise")
"""Whether this system can be asked to forget what it keeps of a file (Linux; not macOS)."""


def read_back(folder: Path, manifest: Manifest) -> None:
    """Compare all files of a checkpoint with its manifest, as its disk has them.

    What it cannot find: what a disk's own cache, or a server behind a network's file system, answers without asking the
    medium, and what was wrong before it was written. A file system in memory (tmpfs) has no disk to ask.

    Args:
      folder: the checkpoint, under whatever name.
      manifest: what was written as its manifest.

    Raises:
      OSError: EIO, naming every file that is not what was written.
    """
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        _forget(path)
    try:
        Manifest.read(folder)
        lines = [f"  {line}" for line in damage(folder, manifest, manifest.files)]
    except DamagedCheckpoint as error:
        lines = str(error).splitlines()[1:]
    if lines:
        said = f"{folder} was written, and its disk gives something else back: try another disk"
        raise OSError(errno.EIO, "\n".join([said, *lines]))


def _forget(path: Path) -> None:
    """Make sure that a file is on disk, and let the page cache drop it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)  # pages that are not on disk are not dropped
        if PAST_THE_CACHE:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
