"""The configuration of a run: its sections and keys, read, checked and merged, and the objects that it names."""
