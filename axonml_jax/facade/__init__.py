"""Facades: models wrapped as in PyTorch, each of which only names a plan; trainers, and text from models."""
