"""The commands of `axonml-jax`, each from its flags to what it prints."""
