"""How close a parallel run must be to the single-device run: constants, never relaxed in a test."""

FLOAT64 = 1e-9
"""Tables of plans compare in float64: max|a - b| <= FLOAT64 * max(1, max|b|) per leaf."""

FLOAT32 = 1e-5
"""Float32 compares per leaf: max|a - b| <= FLOAT32 * max|b|, for loss, gradients and parameters trained by SGD."""

LOW_PRECISION = 5e-2
"""With a bfloat16 or float16 dtype anywhere in the policy: max|a - b| <= LOW_PRECISION * max|b| per leaf."""
