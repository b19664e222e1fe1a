"""The knobs themselves: ten documented groups in three files (method, machine, run)."""
