"""Checkpoints: what a run is between two steps, on disk, whole and independent of the plan."""
