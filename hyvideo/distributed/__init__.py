"""Ranks: which process does what, and how processes communicate; knows meshes, never the model."""

HANGS = "The run hangs. "
"""Beginning of what is said of a rank that waits in a collective. Launchers look for it, and import no PyTorch."""
