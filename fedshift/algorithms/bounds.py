"""Bounds on one client's influence in a round, as pure functions of norms, weights and integers.

    m_k = max(reach_k * lower median of d, floor_k), where d_k = |w_k - w|
    upload k is left out where d_k > bound * m_k
    floor_k = max(reach_k * |w| / bound, |Q(w) - w|)
    reach_k = 1 for most clients, and more for those with more local steps (`reaches`)
    p_k = min(p_k, cap * lower median of p)
    n = lower median of n_k, element by element, for integer tensors

Medians are those of honest clients as long as more than half of a round's uploads are honest. With fewer than
`QUORUM` uploads there is no majority to compare with, and nothing is bounded. A bound limits the effect of one upload
on the mean; it is no defence against many small poisoned updates.
"""

import math
from collections.abc import Sequence
from statistics import median_low

import torch
from torch import Tensor

BOUND = 50.0  # default of `bound`
CAP = 10.0  # default of `cap`
QUORUM = 3  # number of uploads from which there is a majority
VARIANCES = "*running_var"  # names of buffers that are never negative


def middle(norms: Sequence[float]) -> float:
    """Lower median of the finite norms, 0 without any.

    >>> middle([1.0, 2.0, 4.0, math.inf]), middle([math.nan])
    (2.0, 0.0)
    """
    return median_low([norm for norm in norms if math.isfinite(norm)] or [0.0])


def reference(norms: Sequence[float], floor: float = 0.0) -> float:
    """Typical norm of a round: max(lower median, floor), or the lower median of the nonzero norms.

    The latter if both are zero; 0 if all norms are zero. NaN and infinite norms do not count.

    >>> reference([1.0, 2.0, 4.0, 1e38]), reference([1.0, 2.0, 4.0], floor=3.0)
    (2.0, 3.0)
    >>> reference([0.0, 0.0, 0.0, 5.0]), reference([0.0, 0.0, 0.0])
    (5.0, 0.0)
    """
    return max(middle(norms), floor) or middle([norm for norm in norms if norm])


def update_floor(model: float, bound: float, error: float = 0.0) -> float:
    """Floor of updates to a model of norm |w|: max(|w| / bound, error).

    An update that is no larger than the model is thus never left out, however small the others are. `error` is
    |Q(w) - w| for clients that send weights with a lossy codec Q: their uploads differ from w by that much even
    without training, and with small learning rates by far more than those of exact clients.

    >>> update_floor(8.0, bound=20), update_floor(8.0, bound=20, error=3.0), update_floor(8.0, bound=0)
    (0.4, 3.0, 0.0)
    """
    return max(model / bound, error) if bound else error


def reaches(travels: Sequence[float], bound: float) -> list[float]:
    """max(1, sqrt(r_k), r_k / bound), r_k = s_k / (lower median of s): how much farther than typical a client may move.

    s_k is the travel of a client's plan, which the server draws, or a number in proportion to its steps. Steps in one
    direction move a client by s_k |g|; steps that are mostly noise, or that end near a minimum, by about sqrt(s_k) or
    less, as measured with 2 to 2,000 examples per client. The last term admits a straight path of any length. A reach
    in proportion to s_k would allow a client with many steps hundreds of times the distance of an honest one.

    >>> reaches([2.0, 0.5, 2.0, 32.0], bound=50), reaches([1.0, 1.0, 10_000.0], bound=50)
    ([1.0, 1.0, 1.0, 4.0], [1.0, 1.0, 200.0])
    """
    typical = middle(travels)
    ratios = [travel / typical if typical else 1.0 for travel in travels]
    return [max(1.0, math.sqrt(ratio), ratio / bound if bound else 1.0) for ratio in ratios]


def outliers(norms: Sequence[float], bound: float, floor: float = 0.0) -> list[bool]:
    """d_k > bound * reference(d) for each upload; NaN and infinity exceed every bound.

    All are False with `bound` 0, which switches it off, or with fewer than `QUORUM` uploads.

    >>> outliers([1.0, 2.0, 41.0], bound=20), outliers([1.0, 2.0, 39.0], bound=20)
    ([False, False, True], [False, False, False])
    >>> outliers([1.0, 1e38], bound=20), outliers([1.0, 2.0, 1e38], bound=0)
    ([False, False], [False, False, False])
    """
    if not bound or len(norms) < QUORUM:
        return [False] * len(norms)
    most = bound * reference(norms, floor)
    return [not (math.isfinite(norm) and norm <= most) for norm in norms]


def refusal(kind: str, norm: float, typical: float, bound: float) -> str:
    """Reason for leaving out an upload whose norm is an outlier; `typical` is the reference of the round.

    >>> refusal("update", 1.2e38, 3.0, 20)
    "update norm 1.2e+38 is 4e+37 times the round's typical norm 3; at most 20 times is allowed"
    >>> refusal("update", math.nan, 3.0, 20)
    'update contains NaN, infinity or numbers too large to be squared'
    """
    if not math.isfinite(norm):
        return f"{kind} contains NaN, infinity or numbers too large to be squared"
    times = norm / typical if typical else math.inf
    seen = f"{kind} norm {norm:.3g} is {times:.3g} times the round's typical norm {typical:.3g}"
    return f"{seen}; at most {bound:g} times is allowed"


def shortened(norms: Sequence[float], bound: float) -> list[float]:
    """Factors min(1, bound * reference(d) / d_k) that make each vector of norm d_k at most as long as the bound allows.

    All are 1 with `bound` 0 or fewer than `QUORUM` vectors.

    >>> shortened([1.0, 2.0, 400.0], bound=50), shortened([0.0, 0.0, 3.0], bound=50), shortened([1.0, 1e9], bound=50)
    ([1.0, 1.0, 0.25], [1.0, 1.0, 1.0], [1.0, 1.0])
    """
    most = bound * reference(norms)
    return [most / norm if out else 1.0 for norm, out in zip(norms, outliers(norms, bound), strict=True)]


def capped(weights: Sequence[float], cap: float) -> list[float]:
    """min(p_k, cap * lower median of p) for each upload; unchanged with `cap` 0 or fewer than `QUORUM` uploads.

    If most weights are zero, the median is that of the others.

    >>> capped([3.0, 1.0, 2.0, 1e18], cap=10)
    [3.0, 1.0, 2.0, 20.0]
    >>> capped([1.0, 1e18], cap=10), capped([1.0, 2.0, 1e18], cap=0)
    ([1.0, 1e+18], [1.0, 2.0, 1e+18])
    >>> capped([0.0, 0.0, 0.0, 1.0, 1e18], cap=10)
    [0.0, 0.0, 0.0, 1.0, 10.0]
    """
    if not cap or len(weights) < QUORUM:
        return list(weights)
    most = cap * reference(weights)
    return [min(weight, most) for weight in weights]


def median_integers(stack: Tensor) -> Tensor:
    """Lower median over the first axis (K, ...) of integers; of booleans the majority, False in a tie.

    >>> median_integers(torch.tensor([[7, 1], [9, 2], [900, 3], [8, 4]]))
    tensor([8, 2])
    >>> median_integers(torch.tensor([[True, True], [True, False], [False, False]]))
    tensor([ True, False])
    """
    values = stack.byte() if stack.dtype == torch.bool else stack
    return values.sort(0).values[(len(stack) - 1) // 2].to(stack.dtype)
