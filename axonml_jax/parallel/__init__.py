"""Strategies: how parameters live on each mesh axis, and the plan that combines them."""
