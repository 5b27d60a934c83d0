"""Strategies: how parameters live on a mesh axis. The contract, and those of the library; one of your own is their equal."""
