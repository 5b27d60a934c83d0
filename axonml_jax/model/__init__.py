"""THINK: a Flax model as pure functions, its precision, and rewriting of its trace."""
