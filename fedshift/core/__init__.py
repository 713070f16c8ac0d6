"""Tensors by name, random numbers keyed by purpose, names, units, text tables, atomic files; nothing of learning."""
