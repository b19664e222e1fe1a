"""Pipelines: from prompts to videos and the records of how they came about; blind to parallelism."""
