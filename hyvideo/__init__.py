"""SAGE-GRPO: reinforcement-learning post-training of HunyuanVideo-1.5, one folder per part of a training step."""
