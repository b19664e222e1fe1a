"""Measurements, each runnable alone: `python -m benchmarks.<name>`."""
