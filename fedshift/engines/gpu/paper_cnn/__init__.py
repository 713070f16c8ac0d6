"""Triton kernels for the paper's CNN; no other model is known here."""
