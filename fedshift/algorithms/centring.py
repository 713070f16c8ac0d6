"""Filter centring: subtract the mean of each filter from the aggregated weights.

    server:  w = sum_k p_k w_k                       or the result of another algorithm
             w_hat_f = w_f - share * mean(w_f)       for every filter f of every weight

A filter is all weights that one output unit multiplies its inputs with: a row of a linear layer, a kernel of a
convolution, the row of one gate and unit of a recurrent layer. The rule is not in the paper: FedShift
(`fedshift.algorithms.fedshift`) subtracts a share of the mean of a whole layer, namely that of the quantized uploads.
Here the share is 1 by default, does not depend on quantization, and needs no cap. The rule adds nothing to an upload,
no work for clients, and one pass over the model on the server.

Related are networks that are centred in every step of training: centred weight normalization (Huang et al., ICCV 2017)
and weight standardization (Qiao et al., 2019) compute with w_f - mean(w_f), and FedWSQ (2025) combines the latter with
quantized uploads. Here the forward pass is unchanged, and the mean is subtracted once per round.

A filter of few inputs needs its mean: without it, a 3x3 kernel on one channel cannot see brightness. Weights with
fewer than `FAN_IN` inputs per filter are not centred, unless they are named. A filter of one input is its own mean, and
so is each value of a bias: these are never centred.
"""

from collections.abc import Mapping

from fedshift.algorithms.weights import FAN_IN, Filters, likely_filters
from fedshift.core.types import Params


def centre(params: Params, share: float = 1.0, filters: Mapping[str, Filters] | None = None) -> Params:
    """w_f - share * mean(w_f) for each filter f of the weights in `filters`; other tensors are unchanged.

    Without `filters`, names and shapes decide which tensors are weights and where their filters are.

    >>> import torch
    >>> w = torch.arange(64.0).view(2, 32)
    >>> centre({"weight": w, "bias": torch.ones(2)}, share=0.5)["weight"][:, 0]  # means are 15.5 and 47.5
    tensor([-7.7500,  8.2500])
    """
    chosen = wide(params, likely_filters(params)) if filters is None else filters
    return {name: chosen[name].centred(w, share) if share and name in chosen else w for name, w in params.items()}


def wide(params: Params, filters: Mapping[str, Filters], least: int = FAN_IN) -> dict[str, Filters]:
    """Select the weights whose filters have at least `least` inputs (default: the minimum for weights not named)."""
    present = {name: at for name, at in filters.items() if name in params}
    return {name: at for name, at in present.items() if at.fan_in(params[name].shape) >= least}
