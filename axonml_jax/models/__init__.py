"""Reference models: a decoder-only transformer and an MLP."""
