"""Layers of Megatron's 1-D tensor and sequence parallelism, and its losses."""
