"""Rewards that another process computes: the server, its client, and what goes between them."""
