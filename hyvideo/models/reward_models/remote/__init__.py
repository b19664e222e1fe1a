"""Rewards that another process computes: the server, its client, and their messages."""
