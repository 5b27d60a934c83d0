"""What a query sees of the keys: read from the program, classified, told in terms."""
