"""How large the numbers of stacked clients are, and what a codec does not take."""

import sys

import torch
from torch import Tensor

from fedshift.codecs.base import NOT_FINITE, Codec
from fedshift.codecs.exact import Cast
from fedshift.core.types import Params


def largest(u: Params) -> Tensor:
    """The largest magnitude of every tensor and client (tensors, n), NaN or infinity where it holds one."""
    return torch.stack(
        [
            torch.linalg.vector_norm(flat(x), torch.inf, dim=1).double()
            if x.is_floating_point() and x.numel()
            else torch.zeros(len(x), dtype=torch.float64, device=x.device)
            for x in u.values()
        ]
    )


def flat(x: Tensor) -> Tensor:
    """(K, ...) -> (K, n), in float32 at least"""
    rows = x.reshape(len(x), -1)
    return rows if rows.dtype == torch.float64 else rows.float()


def most(codec: Codec) -> float:
    """The largest magnitude that a codec takes."""
    quantizer = codec.quantizer
    return torch.finfo(quantizer.dtype).max if isinstance(quantizer, Cast) else sys.float_info.max


def refusal(codec: Codec, x: Tensor) -> str:
    """What the codec has against a tensor that it does not take."""
    if not codec.quantizer.lossy:
        return "holds NaN or infinity"
    try:
        codec.encode(x[None], torch.zeros(1, dtype=torch.int64))
    except ValueError as problem:
        return str(problem)
    return NOT_FINITE
