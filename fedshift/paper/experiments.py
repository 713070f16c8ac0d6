"""The cells of the paper's tables as settings, in order of importance.

    cell    one figure of a table: an algorithm, bits, with or without the shift, a partition
    run     a cell and a seed

Every cell is the preset `paper` with a few settings changed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fedshift.codecs.named import WIDTH
from fedshift.experiment.frontier import NEAREST
from fedshift.experiment.presets import PRESETS
from fedshift.experiment.toml import SettingsError, merge
from fedshift.paper.published import ALPHAS, BITS, FEDAVG, TABLE1, TABLE2, Figure
from fedshift.rounds.uplinks import expanded

ROUNDS = 800
TITLES = {"fedavg": "FedAvg", "fedpaq": "FedPAQ", "fedef": "Fed-EF", "fedprox": "FedProx", "scaffold": "SCAFFOLD"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedpaq": {},
    "fedef": {"uplink": {"feedback": True}},  # no effect on exact uploads
    "fedprox": {"algorithm": {"name": "fedprox", "mu": 0.01}},
    "scaffold": {"algorithm": {"name": "scaffold", "control": "sent"}},
}
# rules of aggregation that treat quantized uploads differently; by default, equal groups make grouped averaging FedAvg
RIVALS: dict[str, dict[str, Any]] = {
    "fedhq": {"name": "fedhq"},
    "agreement": {"name": "agreement"},
    "grouped": {"name": "grouped", "exact": 0.75},
}
# settings of the server for CIFAR-10 in the code of FedExP (Jhunjhunwala et al., 2023); FedYogi has those of FedAdam
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "fedadam": {"name": "fedadam", "lr": 0.1, "tau": 0.01},
    "fedyogi": {"name": "fedyogi", "lr": 0.1, "tau": 0.01},
    "fedexp": {"name": "fedexp"},
}
TITLES |= {
    "fedhq": "FedHQ",
    "agreement": "agreement mask",
    "grouped": "grouped averaging",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "fedexp": "FedExP",
}
# codecs at about one bit per weight, as far as their settings allow; biased ones with error feedback
FEEDBACK: dict[str, Any] = {"send": "updates", "feedback": True}
NO_FEEDBACK: dict[str, Any] = {"send": "updates", "feedback": False}
ONE_BIT: dict[str, dict[str, Any]] = {
    "step": {"quantizer": "step", "rate": 1.0, "coder": "range", "bits": "8+8"} | FEEDBACK,
    "common-step": {"codec": {"name": "common-step", "rate": 1.0}} | FEEDBACK,
    "ternary": {"quantizer": "ternary", "keep": 0.25, "coder": "range", "bits": "2+2"} | FEEDBACK,
    "topk": {"codec": {"name": "topk", "keep": 0.25}} | FEEDBACK,
    "fedzip": {"codec": {"name": "fedzip", "keep": 0.2}} | FEEDBACK,
    "qsparse": {"codec": {"name": "qsparse", "keep": 0.2}} | FEEDBACK,
    "kmeans": {"quantizer": "kmeans", "coder": "range", "bits": "2+2"} | FEEDBACK,
    "uniform": {"quantizer": "uniform", "coder": "range", "bits": "4+4"} | FEEDBACK,
    "sign": {"codec": {"name": "sign"}} | FEEDBACK,
    "fixed": {"codec": {"name": "fixed", "bits": 1}} | NO_FEEDBACK,
    "step-random": {"quantizer": "step-random", "rate": 1.0, "coder": "range", "bits": "8+8"} | NO_FEEDBACK,
    "qsgd": {"codec": {"name": "qsgd", "s": 1}} | NO_FEEDBACK,
    "eden": {"codec": {"name": "eden", "bits": 1}} | NO_FEEDBACK,
    "kmeans-random": {"quantizer": "kmeans-random", "coder": "range", "bits": "2+2"} | NO_FEEDBACK,
    "stochastic": {"quantizer": "stochastic", "coder": "range", "bits": "4+4"} | NO_FEEDBACK,
}
BASE = merge(PRESETS["paper"], {"record": {"checkpoint": 25, "histograms": 0}})
# Tables 1 and 2 at a size for two cores: smaller images and network, fewer local steps and rounds
SMALL = merge(
    BASE,
    {
        "data": {"name": "fashion-mnist", "augment": False},
        "model": {"name": "small-paper-cnn"},
        "train": {"epochs": 1, "lr": 0.01},
    },
)
SMALL_ROUNDS = 200
# Synthetic(1, 1) as in DAdaQuant (Hönig et al., ICML 2022): the settings of FedProx, for 500 rounds
SYNTHETIC = merge(PRESETS["synthetic"], {"record": {"checkpoint": 25, "histograms": 0}})
SYNTHETIC_ROUNDS = 500
Q_MAX = 16  # its static level of Federated QSGD, and the most of DAdaQuant
STATIC = (1, 2, 4, 8, Q_MAX)
Q_HERE = 4  # largest level of an additional DAdaQuant run
NO, LAYER, FILTER = "no", "yes", "per filter"  # shifts, in tables
FIRST = ((4, 8), (5, 6, 7))  # bits in order of importance
EARLY = "fedshift.paper.authors:kmeans"  # codec with the search of the authors' library
CENTRED = {"table1": (4, 8), "table2": (4, 8, 6)}  # bits of the third column of each table
# lean and extreme before their codes were rounded at random: the second values, and the first, chosen on digits
EARLIER: tuple[dict[str, Any], ...] = (
    NEAREST,
    NEAREST | {"rate": 0.3},
    NEAREST | {"rate": 0.6},
    {key: value for key, value in NEAREST.items() if key != "rate"} | {"quantizer": "ternary", "keep": 0.02},
)


@dataclass(frozen=True)
class Cell:
    """One figure of a table."""

    name: str  # prefix of the names of its runs
    label: tuple[str, ...]  # first columns of its line in a table
    settings: Mapping[str, Any] = field(compare=False)  # changes of the preset
    published: Figure | None = None
    rounds: int = ROUNDS


class CellChoice(NamedTuple):
    """Selection of cells of a table."""

    bits: tuple[int, ...] = BITS
    algorithms: tuple[str, ...] = tuple(ALGORITHMS)
    shift: str = "both"

    @property
    def shifts(self) -> tuple[bool, ...]:
        return {"both": (False, True), "on": (True,), "off": (False,)}[self.shift]

    @property
    def bits_in_order(self) -> list[tuple[int, ...]]:
        return [tuple(bits for bits in pack if bits in self.bits) for pack in FIRST]


EVERYTHING = CellChoice()


def mixed(algorithm: str, bits: int, shift: bool) -> Cell:
    """Cell of Table 1; FedAvg has 32+32 bits.

    >>> mixed("fedef", 4, True).name, mixed("fedavg", 32, False).name
    ('fedef_32+4_shift', 'fedavg_32+32')
    """
    mix = f"32+{bits}"
    name = f"{algorithm}_{mix}{'_shift' * shift}"
    changes = {"uplink": {"bits": mix}, "shift": {"on": shift}}
    published = FEDAVG if algorithm == "fedavg" else TABLE1.get((algorithm, bits, shift))
    return Cell(name, (TITLES[algorithm], mix, _yes(shift)), merge(ALGORITHMS[algorithm], changes), published)


def table1(choice: CellChoice = EVERYTHING) -> list[Cell]:
    """Cells of Table 1: FedAvg, then 4 and 8 bits of each algorithm, then 5 to 7 bits."""
    cells = [mixed("fedavg", 32, False)] if "fedavg" in choice.algorithms and False in choice.shifts else []
    algorithms = [algorithm for algorithm in ALGORITHMS if algorithm in choice.algorithms and algorithm != "fedavg"]
    for pack in choice.bits_in_order:
        cells += [mixed(name, bits, shift) for name in algorithms for bits in pack for shift in choice.shifts]
    return cells


def dirichlet(quantizer: str, alpha: float, bits: int, shift: bool) -> Cell:
    """Cell of Table 2, FedPAQ.

    >>> dirichlet("uniform", 0.1, 4, False).name
    'uniform_dirichlet-0.1_32+4'
    """
    changes = {
        "data": {"partition": "dirichlet", "alpha": alpha},
        "uplink": {"bits": f"32+{bits}", "quantizer": quantizer},
        "shift": {"on": shift},
    }
    title = {"uniform": "uniform", "kmeans": "K-means"}[quantizer]
    name = f"{quantizer}_dirichlet-{alpha:g}_32+{bits}{'_shift' * shift}"
    published = TABLE2[quantizer, alpha, bits, shift]
    return Cell(name, (title, f"{alpha:g}", f"32+{bits}", _yes(shift)), changes, published)


def table2(choice: CellChoice = EVERYTHING) -> list[Cell]:
    return [
        dirichlet(quantizer, alpha, bits, shift)
        for pack in choice.bits_in_order
        for bits in pack
        for alpha in ALPHAS
        for quantizer in ("kmeans", "uniform")
        for shift in choice.shifts
        if "fedpaq" in choice.algorithms
    ]


def third_column(table: str, choice: CellChoice = EVERYTHING) -> list[Cell]:
    """Filter centring for cells of a table: the third column beside no shift and the paper's shift per layer.

    >>> [cell.name for cell in third_column("table1")][:3]
    ['fedavg_32+32_filter', 'fedpaq_32+4_filter', 'fedpaq_32+8_filter']
    """
    if True not in choice.shifts:
        return []
    bits = tuple(n for n in CENTRED[table] if n in choice.bits)
    plain = {"table1": table1, "table2": table2}[table](choice._replace(bits=bits, shift="off"))
    return [filtered(cell) for cell in plain]


def centred(choice: CellChoice = EVERYTHING) -> list[Cell]:
    """Third columns of Tables 1 and 2."""
    return [*third_column("table1", choice), *third_column("table2", choice)]


def with_third_column(table: str, choice: CellChoice = EVERYTHING) -> list[Cell]:
    """Cells of Table 1 or 2 without a shift, with the paper's, and with filter centring."""
    return [*{"table1": table1, "table2": table2}[table](choice), *third_column(table, choice)]


def ablations(choice: CellChoice = EVERYTHING) -> list[Cell]:
    """Cells that the paper does not have: sources of the gain, and alternatives."""
    plain, shifted = {"on": False}, {"on": True}
    random = rounded_at_random(mixed("fedpaq", 4, False)), rounded_at_random(mixed("fedpaq", 4, True))
    cells = [
        _ablation("no quantization, share 0.5", "fedavg_32+32_share-0.5", "32+32", shifted | {"share": 0.5}),
        _ablation("share 0.25", "fedpaq_32+4_share-0.25", "32+4", shifted | {"max_share": 0.25}),
        _ablation("share 0.75", "fedpaq_32+4_share-0.75", "32+4", shifted | {"share": 0.75}),
        _ablation("every client quantized", "fedpaq_4+4", "4+4", plain),
        _ablation("every client quantized, share capped at 0.5", "fedpaq_4+4_cap", "4+4", shifted | {"max_share": 0.5}),
        _ablation(
            "every client quantized, warm-up of 100 rounds", "fedpaq_4+4_warmup", "4+4", shifted | {"warmup": 100}
        ),
        _ablation("updates instead of weights", "fedpaq_32+4_updates", "32+4", plain, "updates"),
        _ablation("updates instead of weights", "fedpaq_32+4_updates_shift", "32+4", shifted, "updates"),
        *(
            replace(cell, label=("random instead of nearest codes", *cell.label[1:]))
            for cell in (*random, filtered(random[0]))
        ),
    ]
    return [cell for cell in cells if cell.settings["shift"]["on"] in choice.shifts]


def _ablation(title: str, name: str, bits: str, shift: dict[str, Any], send: str = "weights") -> Cell:
    return Cell(name, (title, bits, _yes(shift["on"])), {"uplink": {"bits": bits, "send": send}, "shift": shift})


class Contrast(NamedTuple):
    """The same setting without a shift, with the paper's rule, and with filter centring."""

    label: tuple[str, str, str]  # algorithm, clients, bits
    plain: Cell
    layer: Cell
    filter: Cell

    @property
    def bits(self) -> str:
        return self.label[2]

    @property
    def cells(self) -> tuple[Cell, Cell, Cell]:
        return self.plain, self.layer, self.filter


def contrasts(choice: CellChoice = EVERYTHING) -> list[Contrast]:
    """Comparisons of filter centring, in order of importance."""
    extra = {cell.name: cell for cell in ablations()}
    pairs = [("fedavg", "two labels", mixed("fedavg", 32, False), extra["fedavg_32+32_share-0.5"])]
    for name, bits in (("fedpaq", 4), ("fedpaq", 8), ("fedef", 4), ("scaffold", 8)):
        pairs.append((name, "two labels", mixed(name, bits, False), mixed(name, bits, True)))
    for alpha in (0.1, 100.0):
        plain, layer = (dirichlet("kmeans", alpha, 4, shift) for shift in (False, True))
        pairs.append(("fedpaq", f"Dirichlet {alpha:g}", plain, layer))
    return [
        Contrast((TITLES[name], clients, plain.label[-2]), plain, layer, filtered(plain))
        for name, clients, plain, layer in pairs
        if name in choice.algorithms
    ]


def filtered(plain: Cell) -> Cell:
    """Variant of a cell with filter centring.

    >>> filtered(mixed("fedpaq", 4, False)).name
    'fedpaq_32+4_filter'
    """
    shift = {"shift": {"on": True, "per": "filter", "share": 1.0}}
    return Cell(f"{plain.name}_filter", (*plain.label[:-1], FILTER), merge(plain.settings, shift))


def all_quantized() -> Cell:
    """All clients at 4 bits with filter centring, for fewer rounds; the paper's rule collapses here."""
    plain = next(cell for cell in ablations() if cell.name == "fedpaq_4+4")
    return replace(filtered(plain), rounds=200)


def beyond(choice: CellChoice = EVERYTHING) -> list[Cell]:
    """Cells of filter centring, which the paper does not have, and the cells they are compared with."""
    found = contrasts(choice)
    kinds = (
        [[contrast.filter for contrast in found], [contrast.layer for contrast in found]]
        if True in choice.shifts
        else []
    )
    if True in choice.shifts and "fedpaq" in choice.algorithms:
        kinds.append([all_quantized()])
    return [
        cell for cells in (*kinds, [contrast.plain for contrast in found] * (False in choice.shifts)) for cell in cells
    ]


class Compressed(NamedTuple):
    """Uplink on the paper's task."""

    label: tuple[str, str]  # uplink, shift
    cell: Cell
    exact: Cell  # full precision with the same server rule


def compressed(choice: CellChoice = EVERYTHING) -> list[Compressed]:
    """Uplinks and full precision with the same server rule, in order of importance."""
    plain, nearest = mixed("fedavg", 32, False), mixed("fedpaq", 4, False)
    centred, random = filtered(plain), rounded_at_random(nearest)
    found = []
    if "fedavg" in choice.algorithms:
        named = [(f"{name}: ", expanded(name)) for name in ("lean", "extreme")]
        found += [Compressed(("exact", NO), plain, plain), Compressed(("exact", FILTER), centred, centred)]
        found += [
            Compressed((f"{prefix}{_coding(uplink)}", FILTER), with_uplink(uplink, centred), centred)
            for prefix, uplink in (*named, *(("", uplink) for uplink in EARLIER))
        ]
        (prefix, lean), *_ = named
        found.append(Compressed((f"{prefix}{_coding(lean)}", NO), with_uplink(lean, plain), plain))
    if "fedpaq" in choice.algorithms:
        kinds = ("32+4, random codes", random), ("32+4, nearest codes", nearest)
        found += [Compressed((name, FILTER), filtered(cell), centred) for name, cell in kinds]
        found += [Compressed((name, NO), cell, plain) for name, cell in kinds]
    return [row for row in found if (row.label[1] == FILTER) in choice.shifts]


def with_uplink(uplink: Mapping[str, Any], exact: Cell) -> Cell:
    """FedAvg in full precision with this uplink instead, in two groups like 32+32 so that runs have the same draws.

    >>> cell = with_uplink(expanded("lean"), filtered(mixed("fedavg", 32, False)))
    >>> cell.name, cell.settings["uplink"]["bits"]
    ('fedavg_step-random-0.8_filter', '8+8')
    """
    bits, coding = WIDTH[uplink["quantizer"]], _coding(uplink)
    changes = {"uplink": {**uplink, "bits": f"{bits}+{bits}"}}
    name = exact.name.replace("32+32", coding.replace(" ", "-"))
    return Cell(name, (coding, exact.label[-1]), merge(exact.settings, changes))


def brief() -> dict[str, Cell]:
    """Cells of the paper's task with the settings of the runs of `fedshift frontier --brief`, and of earlier ones."""
    plain, (lean, extreme) = mixed("fedavg", 32, False), (expanded(name) for name in ("lean", "extreme"))
    centred, layer = filtered(plain), next(cell for cell in ablations() if cell.name == "fedavg_32+32_share-0.5")
    return {
        "exact-no-shift": plain,
        "lean-no-shift": with_uplink(lean, plain),
        "exact": centred,
        "lean": with_uplink(lean, centred),
        "extreme": with_uplink(extreme, centred),
        "paper": mixed("fedpaq", 4, True),
        "exact-layer": layer,
        "lean-layer": with_uplink(lean, layer),
        "nearest-no-shift": with_uplink(NEAREST, plain),
        "nearest": with_uplink(NEAREST, centred),
    }


def _coding(uplink: Mapping[str, Any]) -> str:
    """Quantizer of an uplink, with its rate or the share of weights it keeps.

    >>> [_coding(uplink) for uplink in EARLIER]
    ['step 0.8', 'step 0.3', 'step 0.6', 'ternary 0.02']
    """
    return f"{uplink['quantizer']} {uplink.get('rate', uplink.get('keep')):g}"


def rounded_at_random(nearest: Cell) -> Cell:
    """Variant of a cell whose K-means codes are rounded at random between neighbours instead of to the nearest code.

    >>> rounded_at_random(mixed("fedpaq", 4, False)).name
    'fedpaq_32+4_random'
    """
    changes = {"uplink": {"quantizer": "kmeans-random"}}
    name, shift = nearest.name.removesuffix("_shift"), "_shift" * nearest.name.endswith("_shift")
    return Cell(f"{name}_random{shift}", nearest.label, merge(nearest.settings, changes))


def uplinks(choice: CellChoice = EVERYTHING) -> list[Cell]:
    """Cells of uplinks that the paper does not have, and the cells they are compared with."""
    return [row.cell for row in compressed(choice)]


def rival(name: str, bits: int, shift: bool) -> Cell:
    """Cell of FedPAQ with another rule of aggregation.

    >>> rival("fedhq", 4, True).name
    'fedhq_32+4_shift'
    """
    cell = mixed("fedpaq", bits, shift)
    label = (TITLES[name], *cell.label[1:])
    return Cell(cell.name.replace("fedpaq", name), label, merge(cell.settings, {"algorithm": RIVALS[name]}))


def rivals_contrasts(choice: CellChoice = EVERYTHING) -> list[Contrast]:
    """FedAvg's mean of the uploads and other rules of aggregation, each without and with a shift."""
    found = []
    for bits in (4, 8):
        kinds = [("FedAvg", mixed("fedpaq", bits, False), mixed("fedpaq", bits, True))]
        kinds += [(TITLES[name], rival(name, bits, False), rival(name, bits, True)) for name in RIVALS]
        found += [
            Contrast((title, "two labels", f"32+{bits}"), plain, layer, filtered(plain))
            for title, plain, layer in kinds
            if bits in choice.bits and "fedpaq" in choice.algorithms
        ]
    return found


def optimizers(choice: CellChoice = EVERYTHING) -> list[Cell]:
    """FedAvg and other steps of the server, in full precision and without a shift."""
    if "fedavg" not in choice.algorithms or False not in choice.shifts:
        return []
    plain = mixed("fedavg", 32, False)
    changed = [
        Cell(
            plain.name.replace("fedavg", name),
            (TITLES[name], *plain.label[1:]),
            merge(plain.settings, {"algorithm": x}),
        )
        for name, x in OPTIMIZERS.items()
    ]
    return [plain, *changed]


def rivals(choice: CellChoice = EVERYTHING) -> list[Cell]:
    """Cells of other rules of aggregation and server steps, and the cells they are compared with."""
    found = rivals_contrasts(choice)
    plain, layer = ([getattr(x, kind) for x in found] for kind in ("plain", "layer"))
    shifted = [*(contrast.filter for contrast in found), *layer] if True in choice.shifts else []
    return [*shifted, *(plain if False in choice.shifts else []), *optimizers(choice)]


def at_one_bit() -> list[Compressed]:
    """Every codec at about one bit per weight, all clients compressed, with filter centring, for 300 rounds.

    >>> at_one_bit()[0].cell.name, at_one_bit()[0].exact.name
    ('codec_step', 'fedavg_32+32_filter')
    """
    exact, found = filtered(mixed("fedavg", 32, False)), []
    for name, uplink in ONE_BIT.items():
        changes = {"uplink": {"bits": "8+8"} | uplink}
        if name == "fixed":
            changes["algorithm"] = {"name": "fedwsq"}
        title = f"{name}, algorithm fedwsq" if name == "fixed" else name
        label = title, "yes" if uplink["feedback"] else "no"
        cell = Cell(f"codec_{name}", label, merge(exact.settings, changes), rounds=300)
        found.append(Compressed(label, cell, exact))
    return found


def codecs(choice: CellChoice = EVERYTHING) -> list[Cell]:
    """Cells of codecs at about one bit per weight."""
    return [row.cell for row in at_one_bit()] if "fedavg" in choice.algorithms and True in choice.shifts else []


class Changed(NamedTuple):
    """Cell of the paper with one setting as in the authors' code or the paper's text."""

    change: str
    cell: Cell
    unchanged: Cell


def changed(choice: CellChoice = EVERYTHING) -> list[Changed]:
    """Possible reasons for differences from the paper, in order of importance, each with the cell it changes."""
    kinds = ("fedef", 4), ("fedpaq", 8), ("fedpaq", 4)
    pairs = [mixed(*kind, shift) for kind in kinds for shift in (False, True)]
    found = [Changed("K-means that stops early", early_stopped(cell), cell) for cell in pairs]
    fedavg = mixed("fedavg", 32, False)
    for change, name, settings in (
        ("clients drawn at random", "uniform-cohorts", {"train": {"selection": "uniform"}}),
        ("images not augmented", "not-augmented", {"data": {"augment": False}}),
    ):
        cell = Cell(f"{fedavg.name}_{name}", fedavg.label, merge(fedavg.settings, settings), fedavg.published)
        found.append(Changed(change, cell, fedavg))
    titles = [TITLES[name] for name in choice.algorithms]
    bits = [f"32+{n}" for n in (32, *choice.bits)]
    return [
        row
        for row in found
        if row.cell.label[0] in titles and row.cell.label[1] in bits and (row.cell.label[2] == LAYER) in choice.shifts
    ]


def early_stopped(cell: Cell) -> Cell:
    """Variant of a cell of Table 1 with the K-means of the authors' library.

    >>> early_stopped(mixed("fedef", 4, True)).name
    'fedef_32+4_early_shift'
    """
    bits = int(cell.label[1].removeprefix("32+"))
    name, shift = cell.name.removesuffix("_shift"), "_shift" * (cell.label[2] == LAYER)
    changes = {"uplink": {"codec": {"name": EARLY, "bits": bits}}}
    return Cell(f"{name}_early{shift}", cell.label, merge(cell.settings, changes), cell.published)


def differences(choice: CellChoice = EVERYTHING) -> list[Cell]:
    """Cells that test possible reasons for differences from the paper."""
    return [row.cell for row in changed(choice)]


def decisive() -> list[Cell]:
    """Cells to run first, two packs of ten runs.

    The first ten are those that claims still need. The others test the largest differences from the paper, complete the
    third column of Table 1, and begin that of Table 2.
    """
    answers = [mixed(name, bits, shift) for name, bits in (("fedprox", 8), ("fedpaq", 7)) for shift in (False, True)]
    answers += [dirichlet("uniform", alpha, 4, False) for alpha in (0.1, 100.0)]
    answers += [dirichlet(name, 0.1, 8, shift) for name in ("kmeans", "uniform") for shift in (False, True)]
    early, others = differences()[:4], [row.cell for row in changed() if row.cell.label[0] == TITLES["fedavg"]]
    kinds = ("fedef", 8), ("fedprox", 4), ("fedprox", 8), ("scaffold", 4)
    third = [*(mixed(*kind, False) for kind in kinds), dirichlet("kmeans", 0.1, 8, False)]
    return [*answers, *early, *others[:1], *map(filtered, third)]


def repeated(choice: CellChoice = EVERYTHING) -> list[Cell]:
    """Cells whose second and third seeds are run first: FedAvg, FedPAQ and Fed-EF at 4 and 8 bits."""
    bits = tuple(n for n in FIRST[0] if n in choice.bits)
    names = tuple(name for name in ("fedavg", "fedpaq", "fedef") if name in choice.algorithms)
    few = choice._replace(bits=bits, algorithms=names)
    return [*table1(few), *third_column("table1", few)]


def dadaquant() -> list[Cell]:
    """DAdaQuant's row of Synthetic(1, 1): full precision, Federated QSGD, each half of DAdaQuant, both, and lean.

    >>> [cell.name for cell in dadaquant()][-5:]
    ['dadaquant-16_time', 'dadaquant-16_clients', 'dadaquant-16', 'dadaquant-4', 'lean']
    """
    static = [_levels(f"qsgd-{q}", f"QSGD, q = {q}", q, time=False, clients=False) for q in STATIC]
    halves = [
        _levels(f"dadaquant-{Q_MAX}_time", f"DAdaQuant, time only, q_max = {Q_MAX}", Q_MAX, time=True, clients=False),
        _levels(f"dadaquant-{Q_MAX}_clients", f"DAdaQuant, clients only, q = {Q_MAX}", Q_MAX, time=False, clients=True),
        *(_levels(f"dadaquant-{q}", f"DAdaQuant, q_max = {q}", q, time=True, clients=True) for q in (Q_MAX, Q_HERE)),
    ]
    named = [
        Cell(name, (title,), {"uplink": expanded(name)}, rounds=SYNTHETIC_ROUNDS)
        for name, title in (("exact", "full precision"), ("lean", "lean"))
    ]
    return [named[0], *static, *halves, named[1]]


def _levels(name: str, title: str, q: int, *, time: bool, clients: bool) -> Cell:
    """Levels of QSGD that are q, or at most q, with one norm of the whole update."""
    policy = {"name": "dadaquant", "q_max": q, "time": time, "clients": clients}
    return Cell(name, (title,), {"uplink": {"policy": policy}}, rounds=SYNTHETIC_ROUNDS)


def drawn() -> list[Cell]:
    """Cells of the figures that are drawn from published records: Table 1, also with filter centring."""
    return [*table1(), *(filtered(cell) for cell in table1(chosen((), (), "off")))]


def figures() -> list[Cell]:
    """Cells of figures 7, 8 and 9 in a report: 32+32 as the control, FedPAQ at 4 and 8 bits."""
    return [mixed("fedavg", 32, False), *(mixed("fedpaq", bits, shift) for bits in (4, 8) for shift in (False, True))]


# in order of importance
TABLES = {
    "table1": table1,
    "table2": table2,
    "ablations": ablations,
    "centred": centred,
    "differences": differences,
    "beyond": beyond,
    "uplinks": uplinks,
    "rivals": rivals,
    "codecs": codecs,
}


def run_name(cell: Cell, seed: int, rounds: int | None = None) -> str:
    """Folder name of a run; it depends only on the cell, the seed and the rounds.

    >>> run_name(mixed("fedpaq", 4, True), 0), run_name(mixed("fedpaq", 4, True), 1, 200)
    ('fedpaq_32+4_shift_seed-0', 'fedpaq_32+4_shift_200-rounds_seed-1')
    """
    rounds = rounds or cell.rounds
    return f"{cell.name}{f'_{rounds}-rounds' * (rounds != ROUNDS)}_seed-{seed}"


def settings(cell: Cell, seed: int, rounds: int | None = None) -> dict[str, Any]:
    """Settings of a run in which it differs from the base."""
    changes = {"name": run_name(cell, seed, rounds), "seed": seed, "train": {"rounds": rounds or cell.rounds}}
    return merge(cell.settings, changes)


def sweep(
    runs: Iterable[tuple[Cell, int]], rounds: int | None, over: Mapping[str, Any], base: Mapping[str, Any] = BASE
) -> dict[str, Any]:
    """Settings of a sweep over runs; `over` overrides the base, and the settings of a cell override both."""
    entries = [settings(cell, seed, rounds) for cell, seed in runs]
    return merge(merge(base, over), {"name": "paper", "sweep": {"runs": entries}})


def chosen(bits: Sequence[str], algorithms: Sequence[str], shift: str, default: CellChoice = EVERYTHING) -> CellChoice:
    """Selection of cells by options; all cells without options."""
    if bad := [text for text in bits if text not in map(str, BITS)]:
        raise SettingsError(f"--bits {bad[0]}: must be among {', '.join(map(str, BITS))}")
    if bad := [text for text in algorithms if text not in ALGORITHMS]:
        raise SettingsError(f"--algorithms {bad[0]}: must be among {', '.join(ALGORITHMS)}")
    if shift not in ("both", "on", "off"):
        raise SettingsError(f"--shift {shift}: must be both, on or off")
    return CellChoice(tuple(map(int, bits)) or default.bits, tuple(algorithms) or default.algorithms, shift)


def _yes(shift: bool) -> str:
    return "yes" if shift else "no"
