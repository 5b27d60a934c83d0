"""Where configuration, data, training and files meet: the CLI's commands."""
