"""Sections of a configuration, one class each: keys, defaults, and what each refuses."""
