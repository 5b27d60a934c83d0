"""Attention in models that others wrote: found in a traced program in any spelling, told in one form, and replaced."""
