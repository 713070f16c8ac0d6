# ruff: noqa: T201
"""Theorem 1: FedShift converges as 1/T, down to a floor that depends on the mean weight c of the optimum.

The problem is that of `least_squares.py`, w of shape (D, D). Output: for c = 0 the gap F - F* falls with slope -1.
Otherwise it stops at D c^2, the gap of the best weights with mean zero: steps get shorter but the shift does not,
so it finally removes the whole mean for any share of quantized uploads. Without the shift there is no floor.
The figure is written to theorem1.png, or to the path given as an argument.
"""

import sys

import torch
from least_squares import STEPS, D, gap, slope
from torch import Tensor

MEANS = (0.02, 0.05, 0.1, 0.2)


def draw(curves: dict[float, Tensor], plain: Tensor, floors: dict[float, float], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    tau = STEPS * torch.arange(1, len(plain) + 1)
    shades = ["black", "#9ecae1", "#6baed6", "#2171b5", "#08306b"]
    for (c, gaps), shade in zip(curves.items(), shades, strict=True):
        left.loglog(tau, gaps, color=shade)
        left.annotate(f"  c = {c:g}", (int(tau[-1]), float(gaps[-1])), color=shade, va="center", annotation_clip=False)
        if c:
            left.axhline(D * c * c, color=shade, lw=0.8, ls=":")
            right.loglog(c, floors[c], "o", color=shade)
    left.loglog(tau, plain, color="tab:orange", ls=(0, (2, 4)), label="without the shift, c = 0.2")
    left.loglog(tau[50:], 0.35 / tau[50:], color="grey", lw=0.8)
    left.annotate(f"1/T (measured slope {slope(curves[0.0]):.2f})", (150, 0.0012), ha="right", color="grey")
    left.set(xlabel="local steps T", ylabel="F - F*", xlim=(2, int(tau[-1])), title="The gap falls as 1/T to a floor")
    line = torch.tensor([0.016, 0.25])
    right.loglog(line, D * line**2, color="grey", lw=0.8, ls=":", label="D c²")
    right.set(xlabel="mean weight c of the optimum", ylabel="floor", title="The floor grows as c²")
    right.set_xticks(MEANS, [f"{c:g}" for c in MEANS])
    right.minorticks_off()
    for axes in left, right:
        axes.legend(frameon=False, loc="upper right" if axes is left else "upper left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    plain, curves = gap(0.2, shift=False), {c: gap(c) for c in (0.0, *MEANS)}
    floors = {c: float(curves[c][-1] - curves[0.0][-1]) for c in MEANS}  # minus the remaining noise
    print(f"c = 0.2, not shifted: slope {slope(plain):.2f}")
    print(f"c = 0: slope {slope(curves[0.0]):.2f}")
    for c, floor in floors.items():
        print(f"c = {c}: stops at {floor:.4f}; D c^2 = {D * c * c:.4f}")
    path = sys.argv[1] if len(sys.argv) > 1 else "theorem1.png"
    try:
        draw(curves, plain, floors, path)
        print(f"drew {path}")
    except ImportError:
        print("no figure: matplotlib is not installed")


if __name__ == "__main__":
    main()
