"""`auto_parallelize`: a Flax NNX model's own layers made tensor-parallel ones in place, without touching its code."""
