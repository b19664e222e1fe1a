"""Configuration: every knob with its manual, strict loading from YAML and flags, checks before anything is built."""
