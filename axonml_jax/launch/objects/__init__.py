"""Objects that a configuration names by `class_path` and `init_args`: how they are made, and whether they may be imported."""
