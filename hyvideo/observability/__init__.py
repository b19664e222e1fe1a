"""What a run shows of itself: metrics, progress line, curves and videos. Knows files and numbers, never the model."""
