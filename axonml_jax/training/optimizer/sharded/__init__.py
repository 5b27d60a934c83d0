"""An update read from what was traced, and run on the parts that ranks hold."""
