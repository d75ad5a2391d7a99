"""Experiments: one file each, `get_config()`."""
