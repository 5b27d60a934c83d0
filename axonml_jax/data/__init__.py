"""Samplers, loaders and text: global batches built from process-local rows."""
