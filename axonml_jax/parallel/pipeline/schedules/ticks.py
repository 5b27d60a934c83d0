"""At which tick of the executed loop every action of a pipeline happens."""

from typing import NamedTuple

import numpy as np


class Ticks(NamedTuple):
    """At which tick of the executed loop every action happens: integers [stage, microbatch].

    Attributes:
      forward: of F.
      backward: of B, or of I where `weight` is given; None: forwards only.
      weight: of W; None: a backward is whole.
    """

    forward: np.ndarray
    backward: np.ndarray | None
    weight: np.ndarray | None = None
