"""The face: models wrapped PyTorch-style; each facade only names a plan."""
