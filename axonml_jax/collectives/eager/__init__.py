"""What only eager ranks do: send to one another, exchange objects, join unequal batches."""
