"""Watching a job from inside: which rank is missing or slow, and where each one stands."""
