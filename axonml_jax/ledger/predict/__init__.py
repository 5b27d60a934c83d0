"""What a plan will hold and send, from the shapes of a model alone: no devices, no trace, no program."""
