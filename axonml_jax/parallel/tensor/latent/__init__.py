"""Attention whose keys and values are made of a latent (DeepSeek-V2 and V3), and what it consists of."""
