"""Benchmarks: ratios of times measured in one process, sizes and memory, with targets."""
