"""Arrays in `safetensors` files, of which only those parts are read that are asked for."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from axonml_jax.model.safetensors import opened_safetensors, require_safetensors, safetensors_files


class StoredArrays(Mapping[str, "StoredArray"]):
    """The arrays of some files by name; nothing is read but their names, shapes and dtypes.

    Args:
      path: a file, the index of several (`model.safetensors.index.json`), or a folder with either.
      prefixes: what names may begin with, which is left out.

    Attributes:
      bytes_read: so many bytes of arrays have been read.

    Raises:
      ImportError: without the package safetensors.
      FileNotFoundError: when there is no such file.
      ValueError: saying what is wrong with a file, or for a name that two have; naming arrays of floats in 8 bits and fewer.
    """

    def __init__(self, path: str | os.PathLike, *, prefixes: tuple[str, ...] = ()):
        require_safetensors(str(path))
        self.bytes_read = 0
        self._arrays: dict[str, StoredArray] = {}
        for file in safetensors_files(Path(path)):
            with opened_safetensors(file) as opened:
                kinds = {name: opened.get_slice(name).get_dtype() for name in list(opened.keys())}
                shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in kinds}
            if narrow := [f"{name}: {kind}" for name, kind in kinds.items() if kind.startswith(("F8_", "F6_", "F4"))]:
                more = f" and {len(narrow) - 5} more" * (len(narrow) > 5)
                raise ValueError(
                    f"{file} has weights in few bits, which mean nothing without scales that are not read here: "
                    f"{', '.join(narrow[:5])}{more}; give files of bfloat16, into which their publisher's tools convert them"
                )
            for name, shape in shapes.items():
                short = next((name.removeprefix(each) for each in prefixes if name.startswith(each)), name)
                if short in self._arrays:
                    raise ValueError(f"{file} has {name}, as has {self._arrays[short].file}: which is meant?")
                self._arrays[short] = StoredArray(self, file, name, shape)

    def __getitem__(self, name: str) -> "StoredArray":
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


@dataclass(frozen=True)
class StoredArray:
    """One array.

    Attributes:
      counts: whose `bytes_read` grows with what is read.
      file: where it is.
      name: in the file.
      shape: its shape.
    """

    counts: StoredArrays
    file: Path
    name: str
    shape: tuple[int, ...]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """A part, from where to where in each dim.

        The file is opened for this alone: what is read of one that stays open counts as memory of the process.
        """
        with opened_safetensors(self.file) as opened:
            if 0 in self.shape or not self.shape:  # of which the package slices nothing
                found = np.asarray(opened.get_tensor(self.name)[index])
            else:
                whole: Any = opened.get_slice(self.name)
                found = np.asarray(whole[index])
        self.counts.bytes_read += found.nbytes
        return found
