"""Optimizers on what ranks hold: read, checked, run on shards, streamed from the host."""
