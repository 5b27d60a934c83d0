"""The training step: state, gradients, update, metrics."""
