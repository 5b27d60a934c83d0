"""Layers whose parameters are split over mesh axes: Megatron's 1-D tensor parallelism and AxoNN's 3-D.

They are Flax NNX modules. Parameters are whole (global) arrays; how each is split is written in its metadata (`whole.py`).
Where a layer's axes are bound, that is inside `shard_map` over them, it sees its shards and communicates; anywhere else it
is the plain Flax layer with the same parameters.
"""
