"""A model and a loss of one's own in a configuration: what takes the place of the section `model`, and the section `loss`."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """A model of one's own, in place of the transformer's keys.

    Attributes:
      class_path: a Flax model of one's own by the path of its class, in place of the transformer that the other keys describe.
      init_args: its arguments, without rngs.
    """

    class_path: str
    init_args: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss, where it is not the cross entropy of the next token.

    Attributes:
      class_path: a function (model, batch), or a class whose objects are called so; null takes the cross entropy of tokens.
      init_args: its other arguments by name, or those of the class.
    """

    class_path: str | None = None
    init_args: dict[str, Any] | None = None

    def __post_init__(self):
        if self.class_path is None and self.init_args is not None:
            raise ValueError("loss.init_args has no effect without loss.class_path")


NO_LOSS = LossConfig()
"""The section where nothing is said."""
