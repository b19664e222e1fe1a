"""Sampling a model for generate.py, and how good it is, with the uncertainty of the answer."""
