"""Triton kernels for the paper's CNN, behind the interface `Kernels`; nothing else in the engine knows that model."""

from fedshift.engines.gpu.paper_cnn.net import stack, supports

__all__ = ["stack", "supports"]
