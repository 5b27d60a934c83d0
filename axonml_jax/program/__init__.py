"""READ: traced programs as values: one representation, one table of primitives, one analysis, one interpreter."""
