"""Which of a run's checkpoints stay on disk."""
