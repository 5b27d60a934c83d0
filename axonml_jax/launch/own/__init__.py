"""A model, a loss and data of one's own, as a configuration names them, and what a run trains of them."""
