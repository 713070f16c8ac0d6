"""Measurements: ratios of times taken in one process, and what they were taken on."""
