"""Explanation of filter centring: movement in the direction of the filter means, with and without centring.

    python studies/centring/why.py [rounds] [inputs] [curvature] [theorem] [--seeds 3] [--rounds 150]

For a layer with n inputs, the part of a weight vector v_f in the direction of the filter mean is
mean(v_f) 1, with squared norm n mean(v_f)^2; for a vector without a preferred direction it is 1/n of the squared norm.

    rounds     per round: accuracy, swing of the predictions, recall of labels with and without a client
               per layer, mean over rounds: drift of the clients, its part along the means, and the part that remains
               after averaging
    inputs     common mode and spectrum of each layer's inputs
    curvature  largest eigenvalue of the Hessian of a client's loss, with and without the direction of the means
    theorem    Theorem 2 per filter, on real rounds

Each part writes its CSV files to results/.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    CENTRED,
    PLAIN,
    CentredSteps,
    Net,
    Scheduled,
    Step,
    Variant,
    arguments,
    centring,
    filters,
    layer,
    means,
    prepared,
    train,
    write,
)
from torch import Tensor
from torch.func import functional_call, grad, jvp

from fedshift import Params
from fedshift.core.types import Decoded
from fedshift.runs.progress import echo

Row = dict[str, Any]
POWER = 30  # iterations
VARIANTS = [
    PLAIN,
    Variant("layer 0.5", (layer(0.5),)),
    CENTRED,
    Variant("clients, every step", (centring(),), client=CentredSteps()),
]
EXACT_VARIANTS = [  # only at 32+32
    Variant("every 25 rounds", (Scheduled(centring(), every=25),)),
    Variant("fc1 alone", (centring(1.0, "fc1.weight"),)),
    Variant("fc2 alone", (centring(1.0, "fc2.weight"),)),
    Variant("lr 0.2", settings={"train": {"lr": 0.2}}),
    Variant("lr 0.2, filter 1", (centring(),), settings={"train": {"lr": 0.2}}),
]
KINDS = [
    PLAIN,
    CENTRED,
    Variant("inputs minus pixel means", data="minus pixel means"),
    Variant("tanh", net={"activation": "tanh"}),
    Variant("tanh, inputs minus pixel means", net={"activation": "tanh"}, data="minus pixel means"),
]


def square(x: Tensor) -> float:
    return float(x.double().square().sum())


def along(v: Tensor) -> float:
    """Squared norm of the part of v (..., m, n) in the direction of the filter means."""
    return v.shape[-1] * square(means(v))


def decoded(step: Step) -> Params:
    """Uploads of the clients of a round as the server decodes them: (K, ...)."""
    frames = [upload.frame for upload in step.uploads if isinstance(upload.frame, Decoded)]
    return {name: torch.stack([frame.params[name] for frame in frames]) for name in frames[0].params}


# rounds


def movement(step: Step) -> Iterator[tuple[str, Row]]:
    """Drift, update and step per layer, their parts along the filter means, and the parts left after averaging."""
    arrived, before, after = decoded(step), step.before.out.params, step.after.out.params
    for name in filters(before):
        w, drift = before[name], arrived[name] - before[name]
        update, k = drift.mean(0), len(drift)
        n = w.shape[1]
        ones, rest = along(drift) / k, (square(drift) - along(drift)) / k
        yield (
            name,
            {
                "drift": (ones + rest) ** 0.5,
                "step": square(after[name] - w) ** 0.5,
                "weights_along": along(w) / square(w),
                "drift_along": ones / (ones + rest),
                "update_along": along(update) / square(update),
                # share of the update's part along the filter means that a shift per layer can remove
                "layer_part": update.numel() * float(update.double().mean()) ** 2 / max(along(update), 1e-30),
                "times_expected": n * ones / (ones + rest),
                "spread_along": along(drift - update) / square(drift - update),
                # |mean of d_k|^2 / mean of |d_k|^2: 1 if clients agree, 1/K if they are independent
                "left_along": along(update) / ones if ones > 1e-12 else float("nan"),
                "left_rest": (square(update) - along(update)) / rest,
            },
        )


def prediction_stats(step: Step, net: Net) -> Row:
    """Bias of the new model towards the labels of the round's clients, and the size of its hidden activations."""
    data = step.fed.task.data
    net.load_state_dict(step.after.out.params)
    with torch.no_grad():
        _, hidden, logits = net.hidden(data.test_x)
    predicted = logits.argmax(1)
    hits = predicted == data.test_y
    recall = torch.stack([hits[data.test_y == c].double().mean() for c in range(data.classes)])
    held = torch.zeros(data.classes)
    for upload in step.uploads:
        labels = data.y[step.fed.partition.of(upload.client)]
        held += torch.bincount(labels, minlength=data.classes) / len(labels)
    few = held < held.median()
    even = torch.arange(data.classes) % 2 == 0
    return {
        "accuracy": 100 * (step.outcome.accuracy or 0.0),
        "loss": step.outcome.loss,
        "recall_many": 100 * float(recall[~few].mean()),
        "recall_few": 100 * float(recall[few].mean()),
        "recall_even": 100 * float(recall[even].mean()),
        "recall_odd": 100 * float(recall[~even].mean()),
        "offset": float(logits.mean(0).std()),  # between classes, of the mean logit
        "hidden": square(hidden) / len(hidden),  # E |h|^2
        "hidden_factor": hidden.shape[1] * square(means(hidden)) / len(hidden),  # E (sum_i h_i)^2 / n
        "active": float((hidden > 0).double().mean()),
        "correlation": float(torch.corrcoef(torch.stack([held, logits.mean(0)]))[0, 1]),
        "predicted": torch.bincount(predicted, minlength=data.classes) / len(predicted),
    }


def watch_rounds(seeds: Sequence[int], count: int, out: Path) -> None:
    per_round: list[Row] = []
    per_layer: list[Row] = []
    for bits in ("32+32", "32+4"):
        for variant in VARIANTS + (EXACT_VARIANTS if bits == "32+32" else []):
            label = {"variant": variant.name, "bits": bits}
            seen: dict[tuple[int, str], list[Row]] = {}
            last: dict[int, Tensor] = {}
            net = Net(**variant.net)
            for steps in train(variant, bits, seeds, count):
                for step in steps:
                    found = prediction_stats(step, net)
                    predicted = found.pop("predicted")
                    swing = 50 * float((predicted - last.get(step.seed, predicted)).abs().sum())
                    last[step.seed] = predicted
                    number = {"seed": step.seed, "round": step.outcome.number}
                    per_round.append(label | number | found | {"swing": swing})
                    for name, moved in movement(step):
                        seen.setdefault((step.seed, name), []).append(moved)
            for (seed, name), rows in seen.items():
                averages = {key: average(row[key] for row in rows[1:]) for key in rows[0]}
                per_layer.append(label | {"seed": seed, "layer": name} | averages)
                echo(
                    f"{bits:6} {variant.name:22} {seed} {name} " + " ".join(f"{k} {x:.3g}" for k, x in averages.items())
                )
    write(out, "why_rounds", per_round)
    write(out, "why_layers", per_layer)


def average(values: Iterator[float]) -> float:
    """Mean of the values that are not NaN."""
    numbers = [x for x in values if x == x]
    return fmean(numbers) if numbers else float("nan")


# inputs


def spectrum(x: Tensor) -> Row:
    """Second moments of a layer's inputs x (N, n), and of the inputs minus their mean per example."""
    n, whole = x.shape[1], square(x)
    second = x.double().T @ x.double() / len(x)
    centred = x - means(x)
    values, vectors = torch.linalg.eigh(second)
    rest = torch.linalg.eigvalsh(centred.double().T @ centred.double() / len(x))
    return {
        "fan_in": n,
        "common_mode": n * square(means(x)) / whole,
        "bias_factor": n * square(means(x)) / len(x),  # E[(sum_i x_i)^2] / n: step of the mean against that of a bias
        "largest": float(values[-1]),
        "largest_share": float(values[-1] / values.sum()),
        "largest_along": float(vectors[:, -1].sum() ** 2 / n),  # cos^2 of its eigenvector and the ones
        "condition": condition(values),
        "centred_largest": float(rest[-1]),
        "centred_largest_share": float(rest[-1] / rest.sum()),
        "centred_condition": condition(rest),
    }


def condition(values: Tensor) -> float:
    """Largest eigenvalue divided by the smallest of those that make up 99 % of the trace."""
    falling = values.flip(0)
    kept = int((falling.cumsum(0) < 0.99 * falling.sum()).sum())
    return float(falling[0] / falling[kept])


def first_and_last(variant: Variant, seeds: Sequence[int], count: int) -> Iterator[tuple[int, str, Step, Params]]:
    """Initial model of a run at 32+32, and model after the last round."""
    for number, steps in enumerate(train(variant, "32+32", seeds, count)):
        for step in steps:
            if not number:
                yield step.seed, "first", step, step.before.out.params
            if number == count - 1:
                yield step.seed, "last", step, step.after.out.params


def inputs(seeds: Sequence[int], count: int, out: Path) -> None:
    rows: list[Row] = []
    for variant in KINDS:
        net, x = Net(**variant.net), prepared(variant.data).x
        for seed, when, _, params in first_and_last(variant, seeds, count):
            net.load_state_dict(params)
            with torch.no_grad():
                *entering, _logits = net.hidden(x)
            for i, entered in enumerate(entering):
                found = {"variant": variant.name, "seed": seed, "model": when, "layer": f"fc{i + 1}.weight"} | spectrum(
                    entered
                )
                rows.append(found)
                echo(" ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in found.values()))
    write(out, "why_inputs", rows)


# curvature


def off_means(v: Params) -> Params:
    return v | {name: v[name] - means(v[name]) for name in filters(v)}


def on_means(v: Params) -> Params:
    return {name: means(x).expand_as(x) if name in filters(v) else torch.zeros_like(x) for name, x in v.items()}


SPACES: dict[str, Callable[[Params], Params]] = {
    "whole": lambda v: v,
    "along_means": on_means,
    "off_means": off_means,
}


def largest(step: Step, examples: Tensor, params: Params, within: Callable[[Params], Params]) -> float:
    """Largest eigenvalue of the Hessian within a subspace, by power iteration; `within` projects onto it."""
    data, g = step.fed.task.data, torch.Generator().manual_seed(0)

    def loss(w: Params) -> Tensor:
        return F.cross_entropy(functional_call(step.fed.task.model, w, (data.x[examples],)), data.y[examples])

    v = within({name: torch.randn(x.shape, generator=g) for name, x in params.items()})
    value = 0.0
    for _ in range(POWER):
        norm = sum(square(x) for x in v.values()) ** 0.5
        v = {name: x / norm for name, x in v.items()}
        product = within(jvp(grad(loss), (params,), (v,))[1])
        value, v = sum(float((x * product[name]).sum()) for name, x in v.items()), product
    return value


def curvature(seeds: Sequence[int], count: int, out: Path) -> None:
    rows: list[Row] = []
    for variant in (PLAIN, CENTRED):
        for seed, when, step, params in first_and_last(variant, seeds, count):
            examples = {"all clients": torch.arange(len(step.fed.task.data.x))}
            examples |= {f"client {upload.client}": step.fed.partition.of(upload.client) for upload in step.uploads}
            for owner, index in examples.items():
                found = {space: largest(step, index, params, within) for space, within in SPACES.items()}
                rows.append({"variant": variant.name, "seed": seed, "model": when, "data": owner} | found)
            numbers = " ".join(f"{space} {rows[-len(examples)][space]:.2f}" for space in SPACES)
            echo(f"{variant.name} {seed} {when} {numbers}")
    write(out, "why_curvature", rows)


# theorem 2


def theorem(seeds: Sequence[int], count: int, out: Path) -> None:
    """|w' - w|^2 - |w_hat' - w|^2 = sum_f share n m'_f ((2 - share) m'_f - 2 m_f)"""
    rows: list[Row] = []
    for bits in ("32+32", "32+4"):
        for share in (0.25, 0.5, 0.75, 1.0):
            variant = Variant(f"filter {share:g}", (centring(share),))
            for steps in train(variant, bits, seeds, count):
                for step in steps:
                    arrived = decoded(step)
                    for name in filters(arrived):
                        w, hat = step.before.out.params[name].double(), step.after.out.params[name].double()
                        mean = arrived[name].double().mean(0)
                        m, after, n = means(w), means(mean), w.shape[1]
                        gains = share * n * after * ((2 - share) * after - 2 * m)
                        saved = square(mean - w) - square(hat - w)
                        rows.append(
                            {
                                "bits": bits,
                                "share": share,
                                "seed": step.seed,
                                "round": step.outcome.number,
                                "layer": name,
                                "error": abs(saved - float(gains.sum())) / square(mean - w),
                                "saved": saved / square(mean - w),
                                "filters": float((gains > 0).double().mean()),
                            }
                        )
    grouped: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        if row["round"] > 1:
            grouped.setdefault((row["bits"], row["share"], row["layer"]), []).append(row)
    summary = [
        {
            "bits": bits,
            "share": share,
            "layer": name,
            "rounds": len(found),
            "largest_error": max(row["error"] for row in found),
            "shorter": fmean(row["saved"] > 0 for row in found),
            "shorter_filters": fmean(row["filters"] for row in found),
            "saved": fmean(row["saved"] for row in found),
        }
        for (bits, share, name), found in grouped.items()
    ]
    for row in summary:
        echo(" ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()))
    write(out, "why_theorem", summary)


PARTS = {"rounds": watch_rounds, "inputs": inputs, "curvature": curvature, "theorem": theorem}


def main() -> None:
    args = arguments(__doc__, PARTS)
    torch.set_num_threads(1)
    for part in args.parts:
        PARTS[part](range(args.seeds), args.rounds, args.out)


if __name__ == "__main__":
    main()
