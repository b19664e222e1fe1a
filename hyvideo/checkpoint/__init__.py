"""Checkpoint: everything that decides the future of a run, saved and restored; sees only state dicts."""
