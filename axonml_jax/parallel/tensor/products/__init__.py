"""What parallel layers are made of: products that communicate, the borders of regions, lookups."""
