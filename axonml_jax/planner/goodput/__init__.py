"""Goodput: which share of its time a job trains, by how often devices fail, how it recovers and how often it saves."""
