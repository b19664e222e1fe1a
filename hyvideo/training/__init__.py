"""Training: the one courier between rooms; one file per part of a GRPO step."""
