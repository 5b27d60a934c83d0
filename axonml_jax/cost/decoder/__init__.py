"""What only the library's decoders have: weights by configuration, what layers send and keep, how pipelines cut them."""
