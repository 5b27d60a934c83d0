"""Cutting a model, or its traced microbatch, into stages."""
