"""Units: parts of a model whose weights are gathered when they are needed, forward and backward (ZeRO-3)."""
