"""What a run writes about itself: metrics, progress line, phase times. Knows files and numbers, never the model."""
