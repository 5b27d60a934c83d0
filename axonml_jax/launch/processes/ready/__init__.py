"""Processes that stand by to be the workers of the next attempt."""
