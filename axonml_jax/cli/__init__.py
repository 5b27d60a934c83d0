"""The command line: training runs, and the commands of `axonml-jax`."""
