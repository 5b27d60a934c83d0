"""AxoNN's communication model (Singh et al. 2024): bytes that a GPU sends for one layer of its 3-D tensor parallelism."""

from dataclasses import dataclass
from fractions import Fraction

from axonml_jax.cost.wire import Amount, exact


@dataclass(frozen=True, kw_only=True)
class GridDegrees:
    """Degrees of AxoNN's four dimensions: Gd, Gr, Gc inside a layer, Gdata around it."""

    data: int = 1
    depth: int = 1
    row: int = 1
    col: int = 1


def layer_volumes(
    grid: GridDegrees, batch: int, length: int, inputs: int, outputs: int, transposed: bool = False
) -> dict:
    """Bytes per GPU and step of one fully connected layer, forward and backward, by dimension.

    bf16 weights and activations, float32 gradients over data. B sequences of S, weight K x N:

    | dimension | bytes |
    | --- | --- |
    | data | 4 (Gdata-1)/Gdata KN/(Gc Gr Gd) 2: gradients, all-reduced |
    | depth | 3 (Gd-1)/Gd KN/(Gc Gr) 2: the weight gathered twice, its gradient scattered |
    | row | 2 (Gr-1)/Gr B/(Gdata Gd) S K/Gc 2: the input's gradient, all-reduced |
    | col | 2 (Gc-1)/Gc B/(Gdata Gd) S N/Gr 2: the output, all-reduced |

    Args:
      grid: the degrees.
      batch: B, sequences of the global batch.
      length: S.
      inputs: K.
      outputs: N.
      transposed: the layer splits its inputs over row and its outputs over col.

    Returns:
      Bytes by axis name: data, depth, row, col.
    """
    row, col = (grid.col, grid.row) if transposed else (grid.row, grid.col)
    rows = Fraction(batch, grid.data * grid.depth) * length
    weight = Fraction(inputs * outputs, grid.row * grid.col)
    moved = lambda ranks: Fraction(ranks - 1, ranks)
    by_role = {
        "data": 4 * moved(grid.data) * weight / grid.depth * 2,
        "depth": 3 * moved(grid.depth) * weight * 2,
        "row": 2 * moved(row) * rows * Fraction(inputs, col) * 2,
        "col": 2 * moved(col) * rows * Fraction(outputs, row) * 2,
    }
    if transposed:
        by_role["row"], by_role["col"] = by_role["col"], by_role["row"]
    return {axis: exact(amount) for axis, amount in by_role.items()}


def shared_bandwidth(link: float, devices_per_node: int, inner: int) -> Amount | float:
    """Bandwidth of one GPU across nodes: the node's link over the groups that use it at once.

    Args:
      link: bandwidth between nodes.
      devices_per_node: GPUs of a node.
      inner: product of the dimensions inside this one (a group's members are that many GPUs apart).
    """
    return link / min(devices_per_node, inner)
