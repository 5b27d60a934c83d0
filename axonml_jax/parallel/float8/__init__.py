"""Products by parameters in 8-bit floats: which they are, how each is computed, and the program that is run with them."""
