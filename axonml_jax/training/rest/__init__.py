"""The forms in which a model's variables and an optimizer's state rest between steps: one interface, one file a form."""
