"""Measurements, each runnable alone."""
