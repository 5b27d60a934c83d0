"""Long sequences: positions split over the ranks of an axis, and attention across them."""
