"""Curves with hand-worked numbers."""

from pathlib import Path

import numpy as np
import pytest

from fedshift.report.curves import averaged, chosen, curve, every, moving, score, sent
from fedshift.report.lines import grouped
from tests.report.test_lines import read
from tests.report.written import settings, write


def test_a_moving_average_covers_the_last_ten_values_or_fewer_at_the_beginning() -> None:
    values = np.arange(1.0, 16.0)
    assert moving(values)[:3].tolist() == [1.0, 1.5, 2.0]
    assert moving(values)[9:11].tolist() == [5.5, 6.5]
    assert moving(values)[-1] == 10.5  # 6, 7, ... 15
    assert moving(np.array([])).tolist() == []


def test_a_curve_is_the_mean_of_seeds_in_a_band_from_the_lowest_to_the_highest(tmp_path: Path) -> None:
    for seed, level in enumerate((0.2, 0.4, 0.9)):
        write(tmp_path / str(seed), settings(rounds=3, seed=seed), [level, level, level + 0.1])
    (strand,) = grouped(read(sorted(tmp_path.iterdir()))).strands
    (drawn,) = curve(strand, every("accuracy"), 200, banded=True)
    assert list(drawn.x) == [1, 2, 3]
    assert list(drawn.y) == [0.5, 0.5, 0.6]
    assert (list(drawn.low), list(drawn.high)) == ([0.2, 0.2, 0.3], [0.9, 0.9, 1])


def test_a_curve_ends_in_the_figure_of_the_table(tmp_path: Path) -> None:
    """Also if it is thinned, if not every round is evaluated, and if one seed has lost its last line."""
    rng = np.random.default_rng(7)
    for seed in range(3):
        scores = [float(x) if t % 3 == 2 else None for t, x in enumerate(rng.random(60))]
        write(tmp_path / str(seed), settings(rounds=60, seed=seed), scores, figures={"loss": scores})
    lines = (tmp_path / "1" / "rounds.csv").read_text().splitlines(keepends=True)
    (tmp_path / "1" / "rounds.csv").write_text("".join(lines[:-1]))
    (strand,) = grouped(read(sorted(tmp_path.iterdir()))).strands
    (drawn,) = curve(strand, averaged(score), 6)
    assert strand.row is not None
    assert len(drawn.x) == 6
    assert (drawn.x[0], drawn.x[-1]) == (3, 60)
    assert drawn.y[-1] == pytest.approx(strand.row.mean, rel=1e-4)


def test_a_curve_against_bytes_is_against_their_sum_so_far(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", settings(rounds=3), figures={"bytes.codes": [100, 200, 300]})
    (strand,) = grouped(read([folder])).strands
    (drawn,) = curve(strand, every("accuracy"), 200, sent)
    assert list(drawn.x) == [200, 500, 900]  # and a hundred of side data and header in each round


def test_unfinished_seeds_are_drawn_up_to_the_round_that_all_have_reached(tmp_path: Path) -> None:
    for seed, reached in enumerate((4, 7)):
        write(tmp_path / str(seed), settings(seed=seed), reached=reached)
    (strand,) = grouped(read(sorted(tmp_path.iterdir()))).strands
    (drawn,) = curve(strand, every("accuracy"), 200)
    assert list(drawn.x) == [1, 2, 3, 4]


def test_points_are_thinned_evenly_and_keep_both_ends() -> None:
    kept = chosen(800, 200)
    assert (len(kept), kept[0], kept[-1]) == (200, 0, 799)
    assert set(np.diff(kept)) <= {4, 5}
