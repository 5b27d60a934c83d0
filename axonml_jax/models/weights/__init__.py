"""Arrays of a model, part by part, from files and into them."""
