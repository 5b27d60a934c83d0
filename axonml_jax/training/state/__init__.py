"""What a run is between two steps, and how it begins."""
