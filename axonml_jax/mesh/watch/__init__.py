"""Watching a job from inside: which rank is missing, and where each one stands."""
