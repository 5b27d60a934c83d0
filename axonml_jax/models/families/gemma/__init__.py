"""The families of Gemma: the second and the third, which have most in common."""
