"""The ways in which a step's loss is differentiated: one interface, one file a way."""
