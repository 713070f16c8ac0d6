"""Selection of the arrays that are shifted.

Candidates are chosen at the start: by patterns, by the app's module, or by names and shapes. A round shifts the
candidates that at least one client changed; an array that no client changes is a buffer or frozen.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from fedshift.algorithms import Filters, Shift, filters
from fedshift.algorithms.weights import all_names, likely_filters
from fedshift.codecs.base import ends
from fedshift.codecs.codec import Codec, Coded
from fedshift.core import rng
from fedshift.core.types import Params
from fedshift.flower.addon.arrays import described, layout
from fedshift.wire.frame import parse
from fedshift.wire.plan import read_codecs
from fedshift.wire.reader import Part, Reader


def check_module(module: object, tensors: object) -> None:
    """Raise TypeError or ValueError for an invalid `module`, or `module` together with `tensors`."""
    if module is None:
        return
    if not isinstance(module, nn.Module):
        what = f"the class {module.__name__}" if isinstance(module, type) else repr(module)
        raise TypeError(f"FedShift(module={what}): needs an instance of torch.nn.Module, the model that clients train")
    if lazy := [name for name, x in module.state_dict().items() if nn.parameter.is_lazy(x)]:
        kind = type(module).__name__
        raise ValueError(f"FedShift(module={kind}): {lazy[0]} has no shape yet; run the lazy model on one batch first")
    if tensors is not None:
        raise ValueError(f"FedShift(tensors={tensors!r}, module=...): pass only one of tensors and module")


def targets(model: Params, rule: Shift, module: nn.Module | None) -> Shift:
    """Return the rule with the names of the arrays that it may shift and the positions of their filters.

    ValueError if patterns or module do not match the arrays.
    """
    if module is not None:
        known = _of_module(model, module)
        rule = replace(rule, filters={name: at for name, at in known.items() if at is not None})
        return replace(rule, tensors=tuple(known if rule.per == "layer" else rule.chosen(model)))
    rule = replace(rule, filters=likely_filters(model))
    found = rule.chosen(model)
    if rule.tensors is None:
        found = [name for name in found if not _all_alike(model[name])]
    elif not found:
        candidates = f"tensors {', '.join(model)}"
        if rule.per == "filter":
            possible = replace(rule, tensors=("*",)).chosen(model)
            candidates = f"tensors with filters of two or more inputs: {', '.join(possible)}"
        raise ValueError(f"FedShift(tensors={rule.tensors}): no match among the {candidates}")
    return replace(rule, tensors=tuple(found))


def _all_alike(x: Tensor) -> bool:
    """True if all values are the same nonzero number, as in the initial scale of a normalization layer."""
    low, high = ends(x)
    return low == high != 0


def _of_module(model: Params, module: nn.Module) -> dict[str, Filters | None]:
    """Return the weights among the arrays and the positions of their filters, None for embeddings.

    Arrays are matched by their names in the module's state or, for a list of arrays, by their order.
    """
    state, known = dict(module.state_dict()), filters(module)
    chosen = {name: known.get(name) for name in all_names(module)}
    if all(name in state and state[name].shape == x.shape for name, x in model.items()):
        return {name: chosen[name] for name in model if name in chosen}
    if all(name.isdigit() for name in model):
        for ordered in state, dict(module.named_parameters()):
            if [tuple(x.shape) for x in ordered.values()] == [tuple(x.shape) for x in model.values()]:
                return {name: chosen[key] for name, key in zip(model, ordered, strict=True) if key in chosen}
    wrong = next(name for name, x in model.items() if name not in state or state[name].shape != x.shape)
    raise ValueError(
        f"FedShift(module={type(module).__name__}): array {wrong!r} of shape {tuple(model[wrong].shape)} matches no "
        "tensor of the module; pass the module whose state_dict clients train"
    )


class ArrivedUpload:
    """An upload: the arrays that were sent to the client, those it returned, and their frame."""

    def __init__(self, sent: ArrayRecord, decoded: ArrayRecord, frame: bytes | None) -> None:
        self.sent, self.decoded, self.frame = sent, decoded, frame
        self.lossy: dict[str, Codec] = {}  # codecs by name, for arrays to compare after quantization
        if frame is not None:
            parsed = parse(frame)
            names = [] if parsed.header.update else [*layout(frame)]  # a zero update is exact
            codecs = dict(zip(names, read_codecs(parsed.coding, len(names)), strict=True)) if names else {}
            self.lossy = {name: codec for name, codec in codecs.items() if codec.quantizer.lossy}

    @cached_property
    def parts(self) -> dict[str, Part]:
        like = {name: torch.from_numpy(array.numpy()) for name, array in self.decoded.items()}
        assert self.frame is not None
        return Reader(described(self.frame, like)).open(self.frame)[1]

    def differs(self, name: str, known: dict[tuple[int, str, Codec], Coded]) -> bool:
        """True if the client changed this array; `known` caches encoded arrays across uploads."""
        sent, decoded = (torch.from_numpy(record[name].numpy()) for record in (self.sent, self.decoded))
        if torch.equal(sent.to(decoded.dtype), decoded):
            return False
        if name not in self.lossy:
            return True
        codecs = [replace(self.lossy[name], quantizer=encoder) for encoder in self.lossy[name].quantizer.encoders]
        for codec in codecs:
            key = id(self.sent), name, codec
            try:
                if key not in known:
                    known[key] = codec.encode(sent[None], rng.key(0, "unchanged")[None])
            except ValueError:  # the codec cannot encode the sent array, but encoded the client's
                return True
            if _same(known[key], self.parts[name], codec, decoded):
                return False
        return True


def changed(names: Sequence[str], uploads: Sequence[ArrivedUpload]) -> list[str]:
    """Return the names of the arrays that at least one client changed.

    A quantized array is compared with the encoded array that was sent. With error feedback on weights the two differ,
    and the array counts as changed.
    """
    known: dict[tuple[int, str, Codec], Coded] = {}
    found = []
    for name in names:
        matching = [upload for upload in uploads if name in upload.sent]
        matching.sort(key=lambda upload: name in upload.lossy)  # exact ones first: they are faster to compare
        if any(upload.differs(name, known) for upload in matching):
            found.append(name)
    return found


def _same(coded: Coded, part: Part, codec: Codec, decoded: Tensor) -> bool:
    """True if a part of a frame contains the encoded tensor."""
    sides = [side for _, side in coded.parts if side.numel()]
    if len(sides) != len(part.sides) or not all(map(torch.equal, sides, part.sides)):
        return False
    if any(encoder.random for encoder in codec.quantizer.encoders):
        return True  # the codes may differ: random rounding, or values halfway between two means
    return torch.equal(codec.decode(coded, 1, decoded.shape)[0].to(decoded.dtype), decoded)
