"""Triton kernels for the paper's CNN, with the interface `Kernels`; the rest of the engine does not know that model."""

from fedshift.engines.gpu.paper_cnn.net import stack, supports

__all__ = ["stack", "supports"]
