"""The K-means quantizer: the codebook of a row contains its k means, and codes are indices into it."""

from fedshift.codecs.kmeans.quantizer import KMeans

__all__ = ["KMeans"]
