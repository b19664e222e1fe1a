"""Training: the only courier between rooms; one file per part of a GRPO step."""
