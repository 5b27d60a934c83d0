"""Parameters that layers split and that all other code sees whole."""
