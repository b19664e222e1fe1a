"""Pipelines: from prompts to videos and the records of how they were made; unaware of parallelism."""
