"""The groups of settings, one file each: `cfg.rollout` is described in `rollout.py`."""
