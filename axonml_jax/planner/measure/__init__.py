"""What this machine's own devices do, measured: products, memory, collectives, and steps of a model."""
