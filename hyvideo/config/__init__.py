"""Configuration: every setting, documented; strict loading from YAML and flags; checks before anything is built."""
