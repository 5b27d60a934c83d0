"""PLACE: specs, layouts, placing arrays on a mesh and checking that they fit."""
