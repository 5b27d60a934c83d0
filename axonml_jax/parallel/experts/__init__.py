"""Mixture-of-experts layers: routers choose experts for tokens, which travel to the ranks that hold them, and back."""
