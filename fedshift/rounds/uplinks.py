"""Named uplinks: settings of `[uplink]` that were measured together.

    uplink = "lean"                 in a file, --uplink lean on the command line, QuantizeMod("lean") on Flower

A name sets only the uploads of clients; the shift of the server keeps its default.
"""

from typing import Any

# updates, all tensors of them; random errors cancel in the mean of a round, so clients keep nothing between rounds
UPDATES: dict[str, Any] = {"coder": "range", "biases": True, "send": "updates", "feedback": False}
UPLINKS: dict[str, dict[str, Any]] = {
    # every client uploads exact weights
    "exact": {"bits": 32},
    # as in the paper: half of the clients upload weights as 4-bit K-means codes
    "paper": {"bits": "32+4", "quantizer": "kmeans", "coder": "bitpack", "send": "weights", "feedback": False},
    "lean": {"quantizer": "step-random", "rate": 0.8} | UPDATES,
    "extreme": {"quantizer": "step-random", "rate": 0.3} | UPDATES,
}

QUANTIZERS = "quantizer", "step", "rate", "keep"  # settings that choose a quantizer
REPLACED = *QUANTIZERS, "coder", "per"  # settings that a codec replaces
DOWNLINKS = "exact", "lean", "extreme"


def expanded(name: str) -> dict[str, Any]:
    """Settings of a named uplink; ValueError for an unknown name.

    >>> expanded("exact")
    {'bits': 32}
    """
    if name not in UPLINKS:
        raise ValueError(f"must be a table, or one of {', '.join(UPLINKS)}")
    return dict(UPLINKS[name])


def expanded_down(name: str) -> dict[str, Any]:
    """The same for the downlink, with nearest codes: an update contains the error of the one before, which must shrink.

    >>> expanded_down("lean")["quantizer"], expanded("lean")["quantizer"]
    ('step', 'step-random')
    """
    if name not in DOWNLINKS:
        raise ValueError(f"must be a table, or one of {', '.join(DOWNLINKS)}")
    return expanded(name) | ({"quantizer": "step"} if name != "exact" else {})
