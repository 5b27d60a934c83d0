"""What the library relies on, each with a small program that tries it; `python -m axonml_jax.compat` runs all."""
