"""Gradients summed or averaged over ranks: pairs of forward and backward, buckets, synchronizers."""
