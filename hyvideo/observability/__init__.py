"""What a run shows: metrics, progress line, curves and videos. Knows files and numbers, never the model."""
