"""Text from a causal model, token by token."""
