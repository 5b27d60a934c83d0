"""Sources that are walked from their start: iterables, generators, streams; a place in them can be found again."""
