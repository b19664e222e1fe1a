"""Data: prompts from CSV files, their order over rounds and ranks, and the seeds of everything random."""
