"""Tensors by name, random numbers keyed by purpose, names and atomic files; nothing here knows of learning."""
