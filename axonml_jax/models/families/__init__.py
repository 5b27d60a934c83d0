"""Published families of models, one in each file: their configurations and the names of their arrays."""
