"""The nouns every room shares."""

from torch import Tensor

Params = dict[str, Tensor]  # one model, or K of them stacked on a leading axis
