"""Forecast what a run will gain, before it is paid for."""
