"""Broadcast of the server to the clients of a round: exact, or encoded once per round.

    weights:  clients receive Q(w + e), and the server keeps  e = (w + e) - Q(w + e)  with feedback
    updates:  clients hold v and receive Q(w - v); both ends compute  v = v + Q(w - v)

Updates refer to what clients have decoded; the server adds them to its own model. With updates, a client that missed
rounds receives the frames it missed, or the exact v if that is shorter. Controls are always sent exactly.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.codecs.base import finite, reason
from fedshift.codecs.exact import EXACT
from fedshift.core import rng
from fedshift.core.tree import part, prefixed, tmap
from fedshift.core.types import CPU, Broadcast, Params
from fedshift.rounds.engine import RAISED, TrainingError, describe
from fedshift.rounds.federation import FEEDBACK, HELD, SEEN, TOTAL, Federation, State
from fedshift.rounds.uplink import Sent, send
from fedshift.wire.frame import Header
from fedshift.wire.writer import size


class Sending(NamedTuple):
    """Broadcast of one round."""

    sent: Broadcast  # as clients decode it
    down: Params  # state of the downlink afterwards
    length: int  # bytes to all clients
    frame: bytes | None  # None for an exact downlink


def broadcast(fed: Federation, state: State, clients: Sequence[int]) -> Sending:
    """Encode the model for the clients of the next round."""
    link, model, control = fed.downlink, state.out.params, state.out.control
    header = Header(update=link.update, base=state.number + 1, run=fed.run)
    full = size(EXACT, model, header)
    extra = len(clients) * (size(EXACT, control, header) if control else 0)
    if not link.lossy:
        return Sending(state.out, state.down, len(clients) * full + extra, None)
    home, number = next(iter(model.values())).device, state.number + 1
    down = tmap(lambda x: x.to(CPU), state.down)
    w, held, error = tmap(lambda x: x.to(CPU), model), part(HELD, down), part(FEEDBACK, down)
    key = rng.key(fed.seed, "downlink", number) if link.codec.random else None
    made = _encoded(fed, number, w, held, error, header, key)
    sent = Broadcast(tmap(lambda x: x.to(home), made.decoded), control)
    if not link.update:
        kept = prefixed(FEEDBACK, made.error) if link.feedback else {}
        return Sending(sent, tmap(lambda x: x.to(home), kept), len(clients) * len(made.frame) + extra, made.frame)
    total, seen, cohort = int(down[TOTAL]) + len(made.frame), down[SEEN].clone(), list(clients)
    missed = total - seen[cohort]
    needed = torch.where(seen[cohort] < 0, full, missed.clamp(max=full))
    seen[cohort] = total
    kept = prefixed(HELD, made.decoded) | {TOTAL: torch.tensor(total), SEEN: seen}
    return Sending(sent, tmap(lambda x: x.to(home), kept), int(needed.sum()) + extra, made.frame)


def _encoded(
    fed: Federation, number: int, w: Params, held: Params, error: Params, header: Header, key: Tensor | None
) -> Sent:
    """The encoded model; an exception of the codec, or decoded values that are not finite, are a TrainingError."""
    codec = fed.downlink.codec
    try:
        made = send(fed.downlink, w, held or w, error, fed.task.trained, header, key)
    except ValueError as problem:
        raise TrainingError(f"round {number}, downlink: {codec}: {reason(problem)}") from problem
    except RAISED as problem:  # of a user's codec
        raise TrainingError(f"round {number}, downlink: {codec}: {describe(problem)}") from problem
    for name, x in made.decoded.items() if codec.by_user else ():
        if not finite(x):
            raise TrainingError(f"round {number}, downlink: {codec}: decoded NaN or infinity for {name}")
    return made
