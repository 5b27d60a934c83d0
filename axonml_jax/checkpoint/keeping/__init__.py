"""Which of a run's checkpoints stay on disk, which one it goes on from, and what comes of a save that fails."""
