"""Ablations of filter centring: accuracy of variants of the rule on digits, one CSV file per question.

    python studies/centring/ablations.py [QUESTION ...] [--seeds 3] [--rounds 150]

Accuracy in percent, mean of the last ten rounds; variants of one seed are paired with 'no shift' and 'filter 1'.
A run takes two to four seconds on one core.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from common import (
    CENTRED,
    PLAIN,
    CentredSteps,
    KeepMeans,
    KeepNorms,
    MeanDecay,
    RemoveMainUpdate,
    RemoveMeanInput,
    RemoveRandom,
    ResetBias,
    Scheduled,
    Variant,
    arguments,
    centring,
    layer,
    scores,
    write,
)

from fedshift.runs.progress import echo

EXACT, MIXED, COARSE = "32+32", "32+4", "4+4"


def pair(name: str, **changed: object) -> list[Variant]:
    """Two variants with the same change, without and with centring."""
    return [
        replace(PLAIN, name=f"{name}, no shift", **changed),  # type: ignore[arg-type]
        replace(CENTRED, name=f"{name}, filter 1", **changed),  # type: ignore[arg-type]
    ]


BASE = [PLAIN, CENTRED]
DEEP = {"sizes": (64, 128, 64, 10)}
QUESTIONS: dict[str, tuple[Sequence[str], list[Variant]]] = {
    "share": (
        (EXACT, MIXED),
        [
            PLAIN,
            *(Variant(f"layer {share:g}", (layer(share),)) for share in (0.5, 1.0)),
            *(Variant(f"filter {share:g}", (centring(share),)) for share in (0.25, 0.5, 0.75, 1.0)),
        ],
    ),
    "tensors": (
        (EXACT, MIXED),
        [
            *BASE,
            *(Variant(f"{name} alone", (centring(1.0, f"{name}.weight"),)) for name in ("fc1", "fc2")),
            *pair("three layers", net=DEEP),
            *(
                Variant(f"three layers, {name} alone", (centring(1.0, f"{name}.weight"),), net=DEEP)
                for name in ("fc1", "fc2", "fc3")
            ),
        ],
    ),
    "rounds": (
        (EXACT,),
        [
            *BASE,
            *(Variant(f"every {k} rounds", (Scheduled(centring(), every=k),)) for k in (2, 5, 10, 25)),
            *(Variant(f"rounds 1 to {last}", (Scheduled(centring(), last=last),)) for last in (10, 25, 50)),
            Variant("from round 51", (Scheduled(centring(), first=51),)),
        ],
    ),
    "place": (
        (EXACT, MIXED),
        [
            *BASE,
            Variant("clients, before encoding", upload=True),
            Variant("clients, every step", (centring(),), client=CentredSteps()),
            Variant("clients, every step, first means kept", client=CentredSteps()),
            Variant("server, first means kept", (KeepMeans(),)),
            Variant("model computes with w - mean(w_f)", net={"kind": "centred"}),
        ],
    ),
    "decay": (
        (EXACT,),
        [
            *BASE,
            *(Variant(f"decay of filter means {rate:g}", client=MeanDecay(rate)) for rate in (0.1, 1.0, 5.0)),
            *(Variant(f"weight decay {rate:g}", settings={"train": {"weight_decay": rate}}) for rate in (1e-3, 5e-3)),
        ],
    ),
    "direction": (
        (EXACT,),
        [
            *BASE,
            Variant("off a random direction", (RemoveRandom(signs=False),)),
            Variant("off random signs", (RemoveRandom(signs=True),)),
            Variant("fc1 alone, off the ones", (centring(1.0, "fc1.weight"),)),
            Variant("fc1 alone, off the mean input", (RemoveMeanInput(("fc1.weight",)),)),
            Variant("off the mean input of each layer", (RemoveMeanInput(("fc1.weight", "fc2.weight")),)),
            Variant("off the main direction of updates", (RemoveMainUpdate(),)),
            Variant("bias of the last layer 0 after each round", (ResetBias(),)),
            Variant("the same and filter 1", (ResetBias(), centring())),
        ],
    ),
    "bits": (
        (COARSE,),
        [*BASE, Variant("layer 0.5", (layer(0.5),)), Variant("layer 1", (layer(1.0),))],
    ),
    "inputs": (
        (EXACT,),
        [
            *BASE,
            *pair("inputs plus 0.5", data="plus constant"),
            *pair("inputs minus their mean", data="minus constant"),
            *pair("inputs minus pixel means", data="minus pixel means"),
            *pair("tanh", net={"activation": "tanh"}),
            *pair("tanh, inputs minus pixel means", net={"activation": "tanh"}, data="minus pixel means"),
            *pair("no biases", net={"bias": False}),
            *pair("iid clients", settings={"data": {"partition": "iid"}}),
        ],
    ),
    "kin": (
        (EXACT, MIXED),
        [
            *BASE,
            Variant("model computes with normalised w", net={"kind": "normalised"}),
            Variant("model computes with standardised w", net={"kind": "standardised"}),
            Variant("server keeps the first norms", (KeepNorms(),)),
            Variant("server keeps the first norms, filter 1", (centring(), KeepNorms())),
        ],
    ),
    "speed": (
        (EXACT,),
        [
            Variant("centred, speeds 1", net={"kind": "centred"}),
            *(
                Variant(f"centred, speeds {a:g} and {b:g}", net={"kind": "centred", "speeds": (a, b)})
                for a, b in ((2.6, 1.0), (1.0, 4.0), (2.6, 4.0), (4.0, 4.0))
            ),
        ],
    ),
    "rates": (
        (EXACT,),
        [
            *(v for lr in (0.01, 0.02, 0.1, 0.2) for v in pair(f"lr {lr:g}", settings={"train": {"lr": lr}})),
            *(v for e in (1, 20) for v in pair(f"{e} epochs", settings={"train": {"epochs": e}})),
        ],
    ),
    "mixed_rates": (
        (MIXED,),
        [v for lr in (0.2, 0.4) for v in pair(f"lr {lr:g}", settings={"train": {"lr": lr}})],
    ),
    "length": (
        (EXACT,),
        [
            *(
                v
                for lr in (0.05, 0.2)
                for v in pair(f"600 rounds, lr {lr:g}", settings={"train": {"rounds": 600, "lr": lr}})
            ),
            *pair("lr 0.4", settings={"train": {"lr": 0.4}}),
        ],
    ),
}


def main() -> None:
    args = arguments(__doc__, QUESTIONS)
    torch.set_num_threads(1)
    for question in args.parts:
        precisions, variants = QUESTIONS[question]
        rows = []
        for bits in precisions:
            for variant in variants:
                begin = time.perf_counter()
                found = scores(variant, bits, range(args.seeds), args.rounds)
                rows += [{"variant": variant.name, "bits": bits, "seed": s, "accuracy": x} for s, x in found.items()]
                line = " ".join(f"{x:.1f}" for x in found.values())
                echo(f"{question:10} {bits:6} {variant.name:45} {line}  ({time.perf_counter() - begin:.0f} s)")
        write(args.out, question, rows)


if __name__ == "__main__":
    main()
