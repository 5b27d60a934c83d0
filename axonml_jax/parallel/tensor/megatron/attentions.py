"""The forms of attention by name: read by configurations, which must not start JAX."""

ATTENTIONS = ("auto", "xla", "blocks", "splash", "cudnn")
"""What a configuration may ask for: the best that applies, the einsum form, the blockwise form, or one of the kernels."""
