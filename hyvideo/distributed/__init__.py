"""Ranks: which process does what, and what processes tell each other; knows meshes, never the model."""
