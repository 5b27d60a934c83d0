"""Layers of AxoNN's 3-D tensor parallelism."""
