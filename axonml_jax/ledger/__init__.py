"""What a step costs: every collective, counted from the program and beside its theoretical minimum."""
