"""READ: attention in programs of models that others wrote: found, told in one form whatever its spelling, and replaced."""
