"""Models: the one room that knows both networks and devices (loading, attention, freezing, LoRA, rewards)."""
