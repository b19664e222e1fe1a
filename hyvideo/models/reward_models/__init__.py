"""Reward models: what turns generated videos and their prompts into scores per metric."""
