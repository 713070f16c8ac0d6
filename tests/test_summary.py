"""Tables and sentences on runs."""

import io
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedshift import Experiment
from fedshift.core.files import RunError
from fedshift.experiment.toml import dotted
from fedshift.rounds.uplinks import UPLINKS
from fedshift.runs.summary import (
    RunResult,
    apart,
    columns,
    comparable,
    difference,
    difference_text,
    label,
    load,
    names,
    paired,
    phrase,
    rows,
    sentences,
    table,
    uplink_label,
)


def result(bits: str, shift: bool, seed: int, score: float) -> RunResult:
    experiment = Experiment(uplink={"bits": bits}, shift={"on": shift}, seed=seed)
    return RunResult(experiment, score, score, 1_000_000 if bits == "32+32" else 600_000)


CLEAR = [
    result(bits, shift, seed, score + 0.001 * seed)
    for bits, shift, score in (("32+32", False, 0.9), ("32+4", False, 0.8), ("32+4", True, 0.85))
    for seed in range(3)
]


def test_bits_are_compared_with_32_and_the_shift_with_none() -> None:
    made = rows(CLEAR)
    assert [row.label for row in made] == [
        {"shift.on": "no", "uplink.bits": "32+32"},
        {"shift.on": "no", "uplink.bits": "32+4"},
        {"shift.on": "per filter", "uplink.bits": "32+4"},
    ]
    assert [row.against for row in made] == ["", "32 bits", "no shift"]
    assert made[1].gain == pytest.approx(-0.1)
    assert made[2].gain == pytest.approx(0.05)
    assert sentences(made) == [
        "32+4 bits cost 10.0 points against 32.",
        "The shift per filter gave back 5.0 points at 32+4 bits.",
    ]


RULES: list[tuple[str, dict[str, Any], float]] = [
    ("32+32", {"on": False}, 0.9),
    ("32+32", {"per": "filter"}, 0.91),
    ("32+4", {"on": False}, 0.8),
    ("32+4", {"per": "layer"}, 0.85),
    ("32+4", {"per": "filter"}, 0.87),
]


def of_rules(rules: list[tuple[str, dict[str, Any], float]]) -> list[RunResult]:
    """Three seeds of each rule, which add 0, 0.1 and 0.2 points."""
    return [
        RunResult(Experiment(uplink={"bits": bits}, shift=shift, seed=seed), score + 0.001 * seed, score, 1)
        for bits, shift, score in rules
        for seed in range(3)
    ]


def test_each_rule_of_the_shift_is_compared_with_no_shift() -> None:
    made = rows(of_rules(RULES))
    assert [[*row.label.values()] for row in made] == [
        ["no", "32+32"],
        ["per filter", "32+32"],
        ["no", "32+4"],
        ["per layer", "32+4"],
        ["per filter", "32+4"],
    ]
    assert [row.against for row in made] == ["", "no shift", "32 bits", "no shift", "no shift"]
    assert [row.gain for row in made[1:]] == pytest.approx([0.01, -0.1, 0.05, 0.07])
    assert sentences(made) == [
        "The shift per filter gained 1.0 points at 32+32 bits.",
        "32+4 bits cost 10.0 points against 32.",
        "The shift per layer gave back 5.0 points at 32+4 bits.",
        "The shift per filter gave back 7.0 points at 32+4 bits.",
    ]


def test_a_folder_is_named_by_the_rule_of_its_shift() -> None:
    runs = [Experiment(uplink={"bits": bits}, shift=shift) for bits, shift, _ in RULES]
    assert names(runs) == [
        "shift-no_bits-32+32_seed-0",
        "shift-per-filter_bits-32+32_seed-0",
        "shift-no_bits-32+4_seed-0",
        "shift-per-layer_bits-32+4_seed-0",
        "shift-per-filter_bits-32+4_seed-0",
    ]


def test_settings_of_a_shift_that_is_off_do_not_distinguish_runs() -> None:
    off = [{"on": False}, {"on": False, "max_share": 0.25}, {"on": False, "per": "filter", "share": 0.5}]
    experiments = [Experiment(shift=shift) for shift in off]
    assert apart(experiments) == ([], [(), (), ()])
    assert len(set(names(experiments))) == 3  # they have folders of their own all the same


def test_a_row_of_another_share_is_compared_with_the_one_without_shift() -> None:
    """The share has a column if one is not the default of its rule; max_share has none, as only one rule uses it."""
    shifts: list[dict[str, Any]] = [
        {"on": False},
        {"per": "filter", "share": 0.5},
        {"per": "filter"},
        {"per": "layer", "max_share": 1.0},
    ]
    made = rows(of_rules([("32+4", shift, 0.8 + 0.02 * i) for i, shift in enumerate(shifts)]))
    assert [row.label for row in made] == [
        {"shift.on": "no", "shift.share": "-"},
        {"shift.on": "per filter", "shift.share": "0.5"},
        {"shift.on": "per filter", "shift.share": "1.0"},
        {"shift.on": "per layer", "shift.share": "uploads"},
    ]
    assert [row.against for row in made] == ["", *["no shift"] * 3]
    assert names([row.experiment for row in made]) == [
        "shift-no_seed-0",
        "shift-per-filter_share-0.5_seed-0",
        "shift-per-filter_share-1.0_seed-0",
        "shift-per-layer_share-uploads_seed-0",
    ]


def test_runs_in_packs_of_different_sizes_are_compared() -> None:
    """A run in a pack of the same size is preferred; runs of another precision are not compared."""
    packs = [
        (False, {"pack": 0}, 0.8),
        (False, {"pack": 8}, 0.82),
        (True, {"pack": 8}, 0.85),
        (True, {"pack": 4}, 0.86),
    ]
    kinds = [*packs, (True, {"precision": "bf16"}, 0.9)]
    results = [
        RunResult(Experiment(shift={"on": on}, engine=engine, seed=seed), score, score, 1)
        for on, engine, score in kinds
        for seed in range(2)
    ]
    assert [row.gain for row in rows(results)] == [None, None, pytest.approx(0.03), pytest.approx(0.06), None]


def test_a_difference_explained_by_seeds_is_within_noise() -> None:
    """Differences 3, -2, 1 have mean 2/3 and standard error 1.45, times 4.303."""
    gain, verdict = difference({0: 0.83, 1: 0.78, 2: 0.81}, {0: 0.80, 1: 0.80, 2: 0.80})
    assert gain == pytest.approx(0.02 / 3)
    assert verdict == "within noise"
    assert difference({0: 0.5}, {0: 0.4})[1] == "one seed: noise unknown"
    assert difference({0: 0.5}, {1: 0.4})[1] == "no seed in common"


def test_the_table_has_means_spreads_and_verdicts() -> None:
    text = io.StringIO()
    Console(file=text, width=120).print(table(rows(CLEAR), CLEAR[0].experiment, "digits"))
    assert "80.1 ± 0.1" in text.getvalue()
    assert "-10.0 against 32 bits" in text.getvalue()
    assert "digits: 100 rounds, seeds 0, 1, 2" in text.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_nothing_is_cut_off_in_a_narrow_table(width: int) -> None:
    kinds = [
        {"uplink": {"bits": bits, "quantizer": quantizer, "coder": coder, "send": send, "feedback": send == "updates"}}
        for bits in ("32+32", "32+4")
        for quantizer in ("kmeans", "stochastic")
        for coder in ("bitpack", "zstd")
        for send in ("weights", "updates")
    ]
    results = [RunResult(Experiment(**kind, seed=seed), 0.9, 0.91, 57_920_000) for kind in kinds for seed in range(3)]
    text = io.StringIO()
    drawn = table(rows(results), results[0].experiment, "digits", width)
    Console(file=text, width=width).print(drawn)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text.getvalue()
    apart = 2 + 8  # a quantizer does nothing to exact uploads, nor do updates; a coder does
    assert sum("90.0 ± 0.0" in line and "57.92" in line for line in lines) == apart
    shown = set(text.getvalue().replace("=", " ").replace(",", " ").split())
    assert width < 80 or shown >= {"uplink", "stochastic", "zstd", "updates", "feedback", "32+32", "difference"}


def test_names_of_folders_contain_the_settings_that_differ() -> None:
    assert names([one.experiment for one in CLEAR[2:5]]) == [
        "bits-32+32_seed-2",
        "bits-32+4_seed-0",
        "bits-32+4_seed-1",
    ]
    assert names([CLEAR[0].experiment]) == ["seed-0"]


def test_runs_with_names_that_end_in_their_seed_keep_them() -> None:
    runs = [Experiment(name=f"mine_seed-{seed}", seed=seed) for seed in range(2)]
    assert names(runs) == ["mine_seed-0", "mine_seed-1"]
    assert names(runs[:1]) == ["mine_seed-0"]
    assert names([*runs, Experiment(seed=2)]) == ["seed-0", "seed-1", "seed-2"]


def test_a_final_figure_is_the_mean_of_the_last_ten_rounds(tmp_path: Path) -> None:
    lines = [f"{n},{n / 100 if n % 2 else ''},1,2,3" for n in range(1, 41)]
    head = "round,accuracy,bytes.codes,bytes.side,bytes.header"
    (tmp_path / "rounds.csv").write_text("\n".join([head, *lines, ""]))
    found = load(tmp_path, Experiment())
    assert found.score == pytest.approx(0.30)  # 0.21, 0.23, ... 0.39
    assert (found.last, found.bytes_up) == (0.39, 240)


def test_settings_that_look_alike_get_names_that_differ() -> None:
    halves = [Experiment(uplink={"bits": bits}) for bits in ({32: 0.5, 4: 0.5}, {32: 0.75, 4: 0.25})]
    assert names(halves) == ["bits-32+4_seed-0", "bits-32-0.75+4-0.25_seed-0"]
    sizes = [Experiment(model={"args": {"hidden": hidden}}) for hidden in (8, 16)]
    assert names(sizes) == ["hidden-8_seed-0", "hidden-16_seed-0"]
    lists = [Experiment(uplink={"bits": [first, *[4] * 98, last]}) for first, last in ((32, 4), (4, 32))]
    assert len(set(names(lists))) == 2


def test_a_setting_added_later_changes_no_folder_name_at_its_default() -> None:
    """The checksum is that of the settings before `record.frames`, `downlink`, step, ternary, optimizers were added."""
    before = {key: x for key, x in dotted(Experiment().model_dump()).items() if not key.startswith("downlink.")}
    assert before.pop("record.frames") == 50
    assert [before.pop(f"uplink.{name}") for name in ("step", "rate", "keep", "codec")] == [None] * 4
    assert before.pop("uplink.biases") is False
    assert before.pop("data.most") == 0
    for name in ("steps", "milestones", "final", "warmup", "local_schedule", "optimizer.name"):
        before.pop(f"train.{name}")
    assert before.pop("train.metrics") is None
    assert [before.pop(f"evaluate.{name}") for name in ("per_client", "every", "held_out")] == [False, 1, 0.0]
    checksum = f"{zlib.crc32(str(sorted(before.items())).encode()):08x}"
    assert names([Experiment(), Experiment()]) == [f"seed-0_{checksum}"] * 2
    often = Experiment(record={"frames": 1})
    assert checksum not in names([often, often])[0]


def test_optimizers_and_steps_are_named_in_tables() -> None:
    runs = [
        Experiment(),
        Experiment(train={"optimizer": "adam", "steps": 20}),
        Experiment(train={"optimizer": {"name": "adam", "betas": [0.9, 0.8]}, "steps": 20}),
    ]
    keys = apart(runs)[0]
    assert keys == ["train.epochs", "train.optimizer.name", "train.steps", "train.optimizer.betas"]
    assert [list(label(run, keys).values()) for run in runs] == [
        ["2", "sgd", "-", "-"],
        ["-", "adam", "20", "-"],
        ["-", "adam", "20", "0.9, 0.8"],
    ]
    assert phrase("train.steps", "steps", 1) == "1 step"


def test_rows_are_distinguished_if_some_runs_failed() -> None:
    runs = [Experiment(train={"lr": lr}) for lr in (0.1, 9.0)]
    (row,) = rows([RunResult(runs[0], 0.5, 0.5, 1)], runs)
    assert row.label == {"train.lr": "0.1"}


def test_a_damaged_record_is_not_summarized(tmp_path: Path) -> None:
    (tmp_path / "rounds.csv").write_text("round,accuracy,bytes.codes,bytes.side,bytes.header\n1,0.5,1,2,3\n2,0.\n")
    with pytest.raises(RunError, match=r"rounds\.csv: 1 damaged line; `fedshift report .*` shows the undamaged ones"):
        load(tmp_path, Experiment())


def test_a_difference_of_a_custom_metric_is_not_in_percent() -> None:
    made = rows([one._replace(score=one.score * 100) for one in CLEAR])
    experiment = Experiment(train={"metric": "mine:gain"})
    assert difference_text(made[1], experiment) == "-10 against 32 bits"
    assert difference_text(made[1], Experiment()) == "-1000.0 against 32 bits"


def test_seeds_with_a_score_of_nan_have_no_spread_and_no_verdict() -> None:
    made = rows([one._replace(score=math.nan) if i in (4, 7) else one for i, one in enumerate(CLEAR)])
    assert [row.spread is not None and math.isnan(row.spread) for row in made] == [False, True, True]
    assert [row.verdict for row in made[1:]] == ["NaN or infinite", "NaN or infinite"]
    assert sentences(made) == []


def test_twelve_seeds_are_judged_by_the_t_of_eleven_degrees_of_freedom() -> None:
    """Student's t is 2.201 for twelve seeds; these means are 3.32, 2.03 and 2.21 standard errors."""
    plain = dict.fromkeys(range(12), 0.0)
    assert difference({seed: 0.17 * (seed % 2) for seed in plain}, plain)[1] == ""
    assert difference({seed: 0.1 if seed % 2 else -0.024 for seed in plain}, plain)[1] == "within noise"
    assert difference({seed: 0.1 if seed % 2 else -0.02 for seed in plain}, plain)[1] == ""


@pytest.mark.parametrize(("seeds", "t"), [(2, 12.706), (4, 3.182), (6, 2.571), (12, 2.201), (26, 2.060), (122, 1.980)])
def test_half_an_interval_is_the_t_of_published_tables_times_the_standard_error(seeds: int, t: float) -> None:
    """Differences 1, -1, 1, -1, ... of n seeds have a standard error of 1 / sqrt(n - 1)."""
    plain = dict.fromkeys(range(seeds), 0.0)
    margin = paired({seed: (-1.0) ** seed for seed in plain}, plain).margin
    assert margin is not None
    assert margin * math.sqrt(seeds - 1) == pytest.approx(t, abs=5e-4)


def test_sentences_name_the_settings_in_which_comparisons_differ() -> None:
    results = [
        RunResult(Experiment(uplink={"bits": bits}, algorithm={"name": name}, seed=seed), score, score, 1)
        for name, of in (("fedavg", (0.9, 0.8)), ("scaffold", (0.9, 0.9)))
        for bits, score in zip(("32+32", "32+4"), of, strict=True)
        for seed in range(2)
    ]
    assert sentences(rows(results)) == [
        "32+4 bits cost 10.0 points against 32 with algorithm=fedavg.",
        "32+4 bits made no difference against 32 with algorithm=scaffold.",
    ]
    assert sentences(rows(results[:4])) == ["32+4 bits cost 10.0 points against 32."]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_table_is_not_wrapped_within_words(width: int) -> None:
    kinds = [
        {"algorithm": {"name": name}, "shift": {"on": on}, "uplink": {"bits": bits, "send": send}}
        for name in ("fedavg", "scaffold")
        for on in (False, True)
        for bits in ("32+32", "32+4")
        for send in ("weights", "updates")
    ]
    results = [
        RunResult(Experiment(**kind, seed=seed), 0.8 + 0.01 * seed, 0.9, 4_630_000) for kind in kinds for seed in (0, 1)
    ]
    text = io.StringIO()
    Console(file=text, width=width).print(table(rows(results), results[0].experiment, "digits", width))
    seen = set(text.getvalue().replace("=", " ").split())
    assert seen >= {"algorithm", "scaffold", "updates", "32+32", "difference", "against", "(within", "noise)"}
    assert max(map(len, text.getvalue().splitlines())) <= width


def test_settings_without_effect_on_exact_uploads_do_not_distinguish_runs() -> None:
    """A quantizer, its groups, updates and feedback have no effect on 32 bits; a coder other than bitpack has."""
    idle: list[dict[str, Any]] = [
        {"quantizer": "uniform"},
        {"per": "channel"},
        {"send": "updates"},
        {"feedback": True},
        {},
    ]
    exact = [Experiment(uplink={"bits": "32+32", **more}) for more in idle]
    assert apart(exact) == ([], [()] * 5)
    assert len(set(names(exact))) == 5  # they have folders of their own all the same
    zipped = Experiment(uplink={"bits": "32+32", "coder": "zstd"})
    assert apart([exact[0], zipped])[0] == ["uplink.coder"]
    lossy = [Experiment(uplink={"bits": "32+4", **more}) for more in idle]
    assert len(set(apart(lossy)[1])) == 5


def test_settings_without_effect_on_exact_groups_are_left_out() -> None:
    groups = {"fast": {"share": 0.5, "feedback": True}, "slow": {"share": 0.5, "bits": 4, "feedback": True}}
    found = comparable(Experiment(uplink={"group": groups, "send": "updates"}))
    assert "uplink.send" not in found
    assert "uplink.group.fast.feedback" not in found
    assert found["uplink.group.slow.feedback"] is True


def test_folders_keep_their_names_whatever_has_an_effect() -> None:
    runs = [
        Experiment(uplink={"bits": bits, "send": send}) for bits in ("32+32", "32+4") for send in ("updates", "weights")
    ]
    assert names(runs) == [
        "send-updates_bits-32+32_seed-0",
        "send-weights_bits-32+32_seed-0",
        "send-updates_bits-32+4_seed-0",
        "send-weights_bits-32+4_seed-0",
    ]


def test_several_settings_of_the_uplink_share_a_column() -> None:
    uplinks: list[dict[str, Any]] = [{"bits": 32}, {"bits": 4}, {"bits": 4, "send": "updates", "feedback": True}]
    made = rows([RunResult(Experiment(uplink=uplink), 0.5, 0.5, 1) for uplink in uplinks])
    assert [row.label for row in made] == [{"uplink": "32"}, {"uplink": "4"}, {"uplink": "4 bit updates, feedback"}]
    assert made[2].full == made[0]


def test_settings_of_the_uplink_keep_their_columns_if_a_label_would_be_ambiguous() -> None:
    """The label does not say which clients have which bits."""
    lists = [[32, 4] * 50, [4, 32] * 50]
    runs = [Experiment(uplink={"bits": bits, "send": send}) for bits in lists for send in ("weights", "updates")]
    assert columns(apart(runs)[0], runs) == ["uplink.send", "uplink.bits"]


def test_a_named_uplink_has_its_name_at_any_bandwidth_and_with_no_other_settings() -> None:
    lean = {**UPLINKS["lean"], "bandwidth": 1e6}
    assert uplink_label(Experiment(uplink=lean)) == "lean"
    assert uplink_label(Experiment(uplink={**lean, "rate": 0.4})) == "0.4 bit updates, step-random, biases"
    assert uplink_label(Experiment(uplink="exact")) == "32"


def test_compressed_rows_are_compared_with_full_precision_of_the_same_server_rule() -> None:
    """0.8 - 0.9 without the shift; 0.85 and 0.87 - 0.91 per filter; no shift is what 32 bits are compared with."""
    text = io.StringIO()
    made = rows(of_rules(RULES))
    assert [row.cost and row.cost.gain for row in made] == [
        None,
        None,
        pytest.approx(-0.1),
        pytest.approx(-0.05),  # the share of quantized uploads is none in full precision
        pytest.approx(-0.04),
    ]
    Console(file=text, width=80).print(table(made, made[0].experiment))
    lines = [line.split() for line in text.getvalue().splitlines() if "±" in line]
    assert [line[-4:] for line in lines if "against" in line] == [
        ["+1.0", "against", "no", "shift"],
        ["-4.0", "against", "32", "bits"],
        ["-5.0", "against", "32", "bits"],
        ["-10.0", "against", "32", "bits"],
    ]


def test_a_table_shows_that_groups_of_clients_upload_differently() -> None:
    """Two runs whose only difference is the bits of clients without a group."""
    slow = {"share": 0.5, "bits": 4, "quantizer": "uniform"}
    runs = [Experiment(uplink={"bits": bits, "group": {"slow": slow}}) for bits in (32, 8)]
    made = rows([RunResult(one, 0.5, 0.5, 1_000_000 * i) for i, one in enumerate(runs, 1)])
    assert [row.label for row in made] == [
        {"uplink": "32 bit; slow 0.5: 4 bit, uniform"},
        {"uplink": "8 bit; slow 0.5: 4 bit, uniform"},
    ]


def test_the_label_of_a_named_uplink_with_a_group_names_both() -> None:
    listed = {"clients": [3], "bits": 32}
    assert uplink_label(Experiment(uplink=UPLINKS["lean"] | {"group": {"a": listed}})) == "lean; a (1 client): 32 bit"
    halves = {"slow": {"share": 0.5} | UPLINKS["extreme"], "rest": {"share": 0.25, "rate": 0.3}}
    assert (
        uplink_label(Experiment(uplink={"group": halves}))
        == "32 bit; slow 0.5: extreme; rest 0.25: 0.3 bit, step-random"
    )


def test_a_table_shows_the_bytes_of_a_tiny_run() -> None:
    text = io.StringIO()
    tiny = Experiment(train={"rounds": 1})
    Console(file=text, width=80).print(table(rows([RunResult(tiny, 0.5, 0.5, 2_040)]), tiny))
    assert text.getvalue().split()[-3:] == ["50.0", "50.0", "0.0020"]


def test_a_table_says_how_many_times_fewer_bytes_are_uploaded() -> None:
    text = io.StringIO()
    Console(file=text, width=80).print(table(rows(CLEAR), CLEAR[0].experiment, "digits"))
    lines = [line.split() for line in text.getvalue().splitlines() if "±" in line]
    assert [line[:2] for line in lines] == [["per", "filter"], ["no", "32+32"], ["no", "32+4"]]  # by merit
    assert lines[2] == ["no", "32+4", "80.1", "±", "0.1", "0.60", "1.7", "-10.0", "against", "32", "bits"]


def test_an_argument_of_a_codec_that_only_one_run_has_is_a_difference() -> None:
    runs = [Experiment(uplink={"codec": codec}) for codec in ("eden", {"name": "eden", "bits": 4})]
    assert len(set(names(runs))) == 2
    found = rows([RunResult(run, 0.5, 0.5, 1) for run in runs], runs)
    assert len({str(row.label) for row in found}) == len(found) == 2


def test_an_argument_of_a_policy_that_only_one_run_has_is_a_difference() -> None:
    policies = ("dadaquant", {"name": "dadaquant", "q_max": 4}, {"name": "dadaquant", "q_max": 4, "psi": 0.5})
    runs = [Experiment(uplink={"policy": policy}) for policy in policies] + [Experiment()]
    assert len(set(names(runs))) == 4
    found = rows([RunResult(run, 0.5, 0.5, 1) for run in runs], runs)
    assert len({str(row.label) for row in found}) == len(found) == 4
