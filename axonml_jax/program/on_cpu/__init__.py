"""What a traced program is changed to before XLA:CPU compiles it."""
