"""TALK: every communicating primitive of JAX that this library calls is called here."""
