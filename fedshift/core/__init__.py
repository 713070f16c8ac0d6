"""Named tensors, counter-based random numbers, names, units, text tables and atomic files; nothing about learning."""
