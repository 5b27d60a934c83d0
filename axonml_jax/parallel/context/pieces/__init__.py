"""Attention of queries to pieces of the keys, tile by tile, and what is merged, added to scores or dropped there."""
