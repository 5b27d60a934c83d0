"""A dict of arrays as a dataset: sample i holds row i of each."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from axonml_jax._types import PyTree, named_leaves


class Columns:
    """Samples whose values are the rows of arrays that lie side by side.

    >>> columns = Columns({"x": np.arange(6).reshape(3, 2), "y": [7, 8, 9]})
    >>> len(columns), columns[1]["x"].tolist(), int(columns[1]["y"])
    (3, [2, 3], 8)

    Args:
      arrays: a dict, or a nest of dicts, of arrays [n, ...] on the host (NumPy's, memory-mapped ones too, or what becomes one).

    Raises:
      ValueError: the lengths differ, or there is none; lists every array by path.
    """

    def __init__(self, arrays: Mapping[str, Any]):
        self.arrays: PyTree = jax.tree.map(np.asarray, dict(arrays), is_leaf=lambda x: not isinstance(x, Mapping))
        shapes = {name: array.shape for name, array in named_leaves(self.arrays).items()}
        lengths = {shape[:1] for shape in shapes.values()}
        if len(lengths) != 1 or () in lengths:
            given = ", ".join(f"{name}: {shape[0] if shape else 'a scalar'}" for name, shape in shapes.items())
            raise ValueError(
                f"a dict of arrays must hold one row per sample in each, but their lengths are {given or 'none'}. "
                "Give arrays of one length"
            )
        [(self._length,)] = lengths

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> PyTree:
        """Row `index` of every array."""
        return jax.tree.map(lambda array: array[index], self.arrays)

    def __getitems__(self, indices: Sequence[int]) -> list[PyTree]:
        """Several samples by one copy of each array's rows (the protocol of PyTorch's fetcher)."""
        rows = jax.tree.map(lambda array: array[np.asarray(indices)], self.arrays)
        return [jax.tree.map(lambda array, i=i: array[i], rows) for i in range(len(indices))]
