"""`fedshift paper` from the command line: runs, tables, records, the page."""

import json
from pathlib import Path

import pytest

from fedshift.cli.paper_tables import Request
from fedshift.paper import claims
from fedshift.paper.dadaquant import read
from fedshift.paper.experiments import (
    EVERYTHING,
    TABLES,
    ablations,
    centred,
    dadaquant,
    decisive,
    mixed,
    rivals,
    table1,
    table2,
)
from fedshift.paper.publish import LAYER, publish, reduced
from fedshift.paper.records import FinishedRun, published
from fedshift.paper.report import codecs
from tests.paper.written import write
from tests.runs import fedshift

ROOT = Path(__file__).parent.parent.parent
TINY = [
    "data.name=digits",
    "model.name=mlp",
    "data.augment=false",
    "train.batch=10",
    "train.epochs=1",
    "model.args.hidden=8",
]
SET = [part for assignment in [*TINY, "engine.name=sequential"] for part in ("--set", assignment)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedPAQ and Fed-EF at 4 bits, two rounds."""
    out = tmp_path_factory.mktemp("paper") / "runs"
    flags = ["--bits", "4", "--algorithms", "fedpaq", "fedef", "--seeds", "1", "--rounds", "2", "--quiet"]
    done = fedshift("paper", "table1", *flags, "--out", out, *SET)
    assert done.exit_code == 0, done.output
    return out


def names(out: Path) -> set[str]:
    return {path.parent.name for path in out.glob("*/model.safetensors")}


def test_selected_cells_are_run_and_printed_with_the_paper_s_figures(ran: Path) -> None:
    assert names(ran) == {
        f"{cell}_2-rounds_seed-0" for cell in ("fedpaq_32+4", "fedpaq_32+4_shift", "fedef_32+4", "fedef_32+4_shift")
    }
    done = fedshift("paper", "table1", "--bits=4", "--algorithms", "fedpaq,fedef", "--rounds", "2", "--out", ran, *SET)
    assert done.exit_code == 0, done.output
    assert "round 2" in done.stdout
    assert done.stdout.endswith(f"Report: {ran / 'report.html'}\n")
    for line in ("FedPAQ     32+4 ", "Fed-EF     32+4 ", "59.7 ± 1.3", "65.5 ± 3.6"):
        assert line in done.stdout


def test_finished_runs_are_skipped_for_any_options(ran: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in ran.glob("*/model.safetensors")}
    flags = ["--bits", "4", "--algorithms", "fedpaq", "--shift", "on", "--rounds", "2", "--json"]
    done = fedshift("paper", "table1", *flags, "--out", ran, *SET)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    (cell,) = result["table1"]
    assert (cell["cell"], cell["seeds"], cell["paper"], cell["spread"]) == ("fedpaq_32+4_shift", 1, 62.5, None)
    assert cell["difference"] == pytest.approx(cell["mean"] - 62.5)
    assert Path(result["report"]) == ran / "report.html"
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_an_estimate_trains_nothing(ran: Path) -> None:
    flags = ["--bits", "4", "8", "--algorithms", "fedpaq", "--rounds", "2", "--estimate"]
    done = fedshift("paper", "table1", *flags, "--out", ran, *SET)
    assert done.exit_code == 0, done.output
    assert f"2 of 4 runs are missing in {ran}; they take about " in done.stdout.replace("\n", " ")
    assert "+8" not in str(names(ran))


def test_runs_with_a_published_record_are_skipped(tmp_path: Path) -> None:
    for shift in (False, True):
        write(tmp_path / "records", mixed("fedpaq", 4, shift), 0.6)
    folders = ["--out", str(tmp_path / "runs"), "--records", str(tmp_path / "records")]
    flags = ["--bits", "4", "--algorithms", "fedpaq", *folders]
    done = fedshift("paper", "table1", *flags, "--estimate")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("0 of 0 runs are missing")
    done = fedshift("paper", "table1", *flags, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert [cell["mean"] for cell in result["table1"]] == [pytest.approx(60.0)] * 2
    assert result["report"] is None
    assert not (tmp_path / "runs").exists()
    done = fedshift("paper", "table1", *flags)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("60.0") >= 2
    assert "Report: " not in done.stdout


def test_published_records_of_dadaquant_are_skipped() -> None:
    flags: list[str | Path] = ["--estimate", "--json", "--records", ROOT / "results" / "tasks" / "dadaquant"]
    done = fedshift("paper", "dadaquant", *flags)
    assert done.exit_code == 0, done.output
    skipped = {cell.name for cell in dadaquant() if 0 in read(ROOT / "results" / "tasks" / "dadaquant").of(cell)}
    assert {"exact", "qsgd-16", "dadaquant-16"} <= skipped
    assert json.loads(done.stdout)["missing"] == len(dadaquant()) - len(skipped)


@pytest.mark.parametrize("table", ["codecs", "dadaquant"])
def test_tables_without_bits_and_algorithms_refuse_these_options(table: str) -> None:
    done = fedshift("paper", table, "--bits", "4", "--estimate")
    assert done.exit_code == 2
    assert "No such option: --bits" in done.output


def test_rivals_are_printed_in_two_tables(tmp_path: Path) -> None:
    """FedAvg's mean has 58 %, every other rule 60 %."""
    mean, *others = rivals(EVERYTHING._replace(bits=(4,), shift="off"))
    write(tmp_path, mean, 0.58)
    for cell in others:
        write(tmp_path, cell, 0.6)
    flags = ["rivals", "--shift", "off", "--records", str(tmp_path)]
    done = fedshift("paper", *flags, "--bits", "4")
    assert done.exit_code == 0, done.output
    titles = [line.strip() for line in done.stdout.splitlines() if "Beyond the paper: " in line]
    assert titles == ["Beyond the paper: other aggregation rules", "Beyond the paper: server optimizers"]
    assert "grouped averaging  32+4" in done.stdout
    assert done.stdout.count("+2.0 / not run / not run") == 3
    done = fedshift("paper", *flags, "--bits", "5")
    assert done.exit_code == 0, done.output
    assert "other aggregation rules" not in done.stdout
    assert "FedExP" in done.stdout


def test_an_estimate_of_rivals_trains_nothing(tmp_path: Path) -> None:
    flags = ["--bits", "4", "--algorithms", "fedpaq", "--shift", "off", "--rounds", "2", "--estimate"]
    done = fedshift("paper", "rivals", *flags, "--out", tmp_path / "runs", *SET)
    assert done.exit_code == 0, done.output
    assert "4 of 4 runs are missing in " in done.stdout
    assert not (tmp_path / "runs").exists()


def test_one_seed_of_everything_is_run_before_other_seeds() -> None:
    request = Request("all", EVERYTHING, 3, None)
    assert set(request.tables) == set(TABLES)
    runs = [(cell.name, seed) for cell, seed in request.runs]
    assert len(runs) == len(set(runs)) == 3 * len({cell.name for table in TABLES.values() for cell in table()})
    seeds = [seed for _, seed in runs]
    assert seeds[: len(runs) // 3] == [0] * (len(runs) // 3)
    names = [name for name, _ in runs[: len(runs) // 3]]
    first = [cell.name for cell in decisive()]
    assert names[: len(first)] == first
    ordered = [table1(), table2(), ablations(), centred()]
    wanted = dict.fromkeys(cell.name for cells in ordered for cell in cells if cell.name not in first)
    assert names[len(first) : len(first) + len(wanted)] == list(wanted)
    repeated = runs[len(runs) // 3 :][:24]
    assert {name.partition("_")[0] for name, _ in repeated} == {"fedavg", "fedpaq", "fedef"}
    assert all("+4" in name or "+8" in name or "32+32" in name for name, _ in repeated)


def test_no_claim_is_untested_after_the_first_runs(tmp_path: Path) -> None:
    """The published records and the cells to be run first, ten of which the claims need."""
    for path in (ROOT / "results").glob("*/settings.toml"):
        (tmp_path / path.parent.name).symlink_to(path.parent)
    cells = [cell for table in TABLES.values() for cell in table()]
    known = published(tmp_path, cells)[0].records
    for cell in decisive()[:10]:
        if 0 not in known.get(cell.name, {}):
            write(tmp_path, cell)
    (tmp_path / "codecs.json").symlink_to(ROOT / "results" / "codecs.json")
    found = claims.answers(published(tmp_path, cells)[0], codecs(tmp_path)[0])
    assert [item.claim for item in found if item.answer not in ("yes", "no") or not item.why] == []


@pytest.mark.parametrize("flag", [("--rounds", "2"), ("--set", "train.lr=0.1")])
def test_published_records_are_not_mixed_with_other_settings(tmp_path: Path, flag: tuple[str, str]) -> None:
    done = fedshift("paper", "table1", "--records", tmp_path, *flag)
    assert done.exit_code == 2
    assert f"leave out {' '.join(flag)}" in done.output.replace("\n", " ")


def test_after_the_time_limit_the_table_marks_cells_that_were_not_run(tmp_path: Path) -> None:
    flags = ["--bits", "4", "--algorithms", "fedpaq", "--shift", "on", "--rounds", "50", "--minutes", "0", "--quiet"]
    done = fedshift("paper", "table1", *flags, "--out", tmp_path / "runs", *SET)
    assert done.exit_code == 0, done.output
    assert "not run" in done.stdout


def test_a_run_with_other_settings_is_rejected(ran: Path) -> None:
    flags = ["--bits", "4", "--algorithms", "fedpaq", "--rounds", "2"]
    done = fedshift("paper", "table1", *flags, "--out", ran, *SET, "--set", "train.lr=0.5")
    assert done.exit_code == 2
    assert "was run with other settings; choose another --out" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["table1", "--bits", "4", "9"], "--bits 9: must be among"),
        (["table1", "--algorithms", "fedsgd"], "--algorithms fedsgd: must be among"),
        (["table2", "--algorithms", "fedef"], "paper table2: no cell matches these"),
        (["rivals", "--bits", "5", "--algorithms", "fedpaq"], "paper rivals: no cell matches these"),
        (["rivals", "--algorithms", "fedhq"], "--algorithms fedhq: must be among fedavg, fedpaq"),
        (["rivals", "--set", "algorithm.name=fedavg"], "--set algorithm.name: it is fixed by the table"),
        (["table1", "--set", "train.rounds=3"], "--set train.rounds: use --rounds instead"),
        (["table1", "--set", "shift.on=true"], "--set shift.on: it is fixed by the table"),
        (["table1", "--set", "sweep.seed=[3, 4]"], "--set sweep: the runs of a table of the paper are fixed"),
        (["report", "--markdown", "--results", "typo"], "--results typo: there is no such folder"),
        (["table1", "--set", "train.lrr=1"], "--set: unknown setting 'train.lrr'; did you mean 'lr'?"),
        (["table1", "--set", "data.name=nodata"], "data.name = 'nodata': unknown data set"),
        (["table3", "--uplink", "fast"], "--uplink fast: must be a rate"),
        (["publish", "nowhere"], "nowhere: there is no such folder"),
        (["report", "--results", "nowhere"], "--results nowhere: there is no such folder"),
        (["report", "--markdown", "--page", "nowhere.md"], "--page nowhere.md: cannot be read"),
    ],
)
def test_errors_are_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "--page" in arguments:
        (tmp_path / "results").mkdir()
    done = fedshift("paper", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert sentence in done.stderr


def test_an_option_without_its_values_is_rejected() -> None:
    for arguments in (["--bits"], ["--bits", "--rounds", "3"], ["--seeds", "0"]):
        assert fedshift("paper", "table1", *arguments).exit_code == 2


def test_a_run_is_published_once(ran: Path, tmp_path: Path) -> None:
    done = fedshift("paper", "publish", ran, "--to", tmp_path)
    assert done.exit_code == 0, done.output
    name = "fedpaq_32+4_2-rounds_seed-0"
    assert f"{name}: published" in done.stdout.replace("\n", "")
    about = json.loads((tmp_path / name / "about.json").read_text())
    assert {"cpu", "commit", "torch"} <= set(about)
    assert "command" not in about
    for path in (tmp_path / name).iterdir():
        assert str(ran.parent) not in path.read_text()
    record, run = FinishedRun(tmp_path / name), FinishedRun(ran / name)
    assert record.experiment == run.experiment
    assert record.scores == pytest.approx(run.scores, abs=0.005)
    assert record.column("step.fc1.weight") == pytest.approx(run.column("step.fc1.weight"), rel=0.005)
    assert record.column("bytes.up") == [
        sum(parts) for parts in zip(*(run.column(f"bytes.{x}") for x in ("codes", "side", "header")), strict=True)
    ]
    assert publish(ran / name, tmp_path) == (tmp_path / name, False)
    (tmp_path / name / "about.json").write_text("{}")
    done = fedshift("paper", "publish", ran / name, "--to", tmp_path)
    assert (done.exit_code, "contains another record of this run; replace it with --force" in done.stderr) == (2, True)
    assert (tmp_path / name / "about.json").read_text() == "{}"
    assert fedshift("paper", "publish", ran / name, "--to", tmp_path, "--force").exit_code == 0
    assert json.loads((tmp_path / name / "about.json").read_text()) == about
    assert not list(tmp_path.glob("*.unfinished"))


def test_an_unfinished_run_is_not_published(ran: Path, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "settings.toml").write_bytes((next(iter(ran.glob("*/settings.toml")))).read_bytes())
    done = fedshift("paper", "publish", tmp_path / "half", "--to", tmp_path / "results")
    assert (done.exit_code, "contains no finished run" in done.stderr) == (2, True)


def test_a_record_of_a_full_run_is_small(tmp_path: Path) -> None:
    """Four layers, 800 rounds, numbers of maximal length."""
    folder = write(tmp_path, mixed("fedpaq", 4, True))
    layers = [f"{figure}.{layer}.weight" for figure in LAYER for layer in ("conv1", "conv2", "fc1", "fc2")]
    header = ["round", "accuracy", "loss", *(f"predicted.{n}" for n in range(10)), *layers, "error", "share"]
    header += ["seconds.round", "bytes.codes", "bytes.side", "bytes.header", "bytes.down"]
    typical = ["0.6543", "0.987654", *["0.0987"] * 10, *["-1.23456e-4"] * 4, *["0.345678"] * 12, "0.0987654", "0.5"]
    typical += ["1.23", "48512345", "1234", "4567", "86236960"]
    lines = [",".join([str(t + 1), *typical]) for t in range(800)]
    (folder / "rounds.csv").write_text("\n".join([",".join(header), *lines, ""]))
    assert len(reduced(FinishedRun(folder))) < 180_000


def test_runs_of_any_sweep_can_be_published(tmp_path: Path) -> None:
    """Runs with the same name are published under their folder names."""
    grid = tmp_path / "grid.toml"
    grid.write_text("[train]\nrounds = 1\nepochs = 1\n[engine]\nname = 'batched'\n[sweep]\nseed = [0, 1]\n")
    assert fedshift("sweep", grid, "--out", tmp_path / "runs", "-q").exit_code == 0
    done = fedshift("paper", "publish", tmp_path / "runs", "--to", tmp_path / "results")
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"seed-0", "seed-1"}


def test_scores_that_are_not_numbers_are_reported(tmp_path: Path) -> None:
    """A diverged run of two: the mean and the spread are NaN."""
    for seed, accuracy in enumerate((0.6, float("nan"))):
        write(tmp_path, mixed("fedpaq", 4, False), accuracy, seed)
    done = fedshift("paper", "report", "--results", tmp_path)
    assert done.exit_code == 0, done.output
    assert "nan ± nan (2)" in done.stdout
