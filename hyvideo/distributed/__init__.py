"""Ranks: which process does what, and how processes communicate; knows meshes, never the model."""
