"""What a run does about what goes wrong in it."""
