"""Object stores, and the copies of a run's checkpoints that are kept there."""
