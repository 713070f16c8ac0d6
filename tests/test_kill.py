"""A run that is killed at any moment, any number of times, has the same result as an undisturbed one.

Real processes and real kills: forks of this process, which has torch loaded already.
"""

import functools
import itertools
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fedshift.core.files import RunError
from fedshift.experiment.settings import Experiment
from fedshift.runs.run import Run
from tests.processes import assert_gone, children
from tests.runs import (
    BOTH,
    DERIVED,
    DISK,
    FEDAVG,
    FEEDBACK,
    PROCESSES,
    SELDOM,
    SENT,
    digits,
    ended,
    fork,
    go,
    linux,
    record,
    small,
    undisturbed,
)

# at any moment

KILLS = 5
KINDS: dict[str, list[dict[str, Any]]] = {
    "fedavg": [FEDAVG],
    "fedavg, every third round": [FEDAVG, SELDOM],
    "scaffold, derived": [DERIVED],
    "scaffold, derived, on disk, every third round": [DERIVED, DISK, SELDOM],
    "scaffold, sent": [SENT],
    "scaffold, sent, on disk": [SENT, DISK],
    "error feedback": [FEEDBACK],
    "error feedback, on disk": [FEEDBACK, DISK],
    "error feedback, every third round": [FEEDBACK, SELDOM],
    "scaffold with error feedback, processes": [BOTH, PROCESSES],
    "fedavg, processes, every third round": [FEDAVG, PROCESSES, SELDOM],
}


@linux
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_killed_at_random_moments_has_the_same_result(kind: str, tmp_path: Path) -> None:
    experiment, draw = small(*KINDS[kind], {"train": {"rounds": 16}}), random.Random(kind)
    expected = undisturbed(experiment, tmp_path / "whole")
    began = time.monotonic()
    ended(fork(lambda: go(experiment, tmp_path / "timed")))
    longest = time.monotonic() - began
    kills = finished = 0
    while kills < KILLS or finished == 0:
        out = tmp_path / f"killed {finished}"
        pid = fork(functools.partial(go, experiment, out))
        if kills < KILLS:
            time.sleep(draw.uniform(0, longest / 2))
            workers = children(pid)
            os.kill(pid, signal.SIGKILL)
            assert_gone(workers)
        code = ended(pid)
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            assert record(out) == expected
            finished += 1
        else:
            kills += 1


# at every moment that matters

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


def die_at(folder: Path, point: int, torn: int | None = None) -> None:
    """Kill this process before its n-th change to the folder or, with `torn`, after this many bytes of that write."""
    seen = 0
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel kills who writes beyond a limit
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        opens = event == "open" and arguments[1] is not None  # an opener opens the file a second time, without a mode
        writes = opens and isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if not (writes or event in CHANGES) or not str(arguments[0]).startswith(str(folder)):
            return
        seen += 1
        if seen != point:
            return
        if torn is None or not writes:
            os.kill(os.getpid(), signal.SIGKILL)
            return
        appended = bool(arguments[2] & os.O_APPEND) and os.path.exists(arguments[0])
        size = os.path.getsize(arguments[0]) if appended else 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + torn, resource.RLIM_INFINITY))

    sys.addaudithook(look)


def killed_at(experiment: Experiment, out: Path, point: int, torn: int | None = None) -> int:
    def work() -> None:
        die_at(out, point, torn)
        try:
            go(experiment, out)
        except RunError:
            os._exit(1)

    return ended(fork(work))


@linux
@pytest.mark.parametrize(
    "kind",
    [
        [FEDAVG],
        [DERIVED, {"train": {"rounds": 3}}],
        [BOTH, DISK, {"record": {"checkpoint": 2}}],
    ],
    ids=["fedavg", "scaffold", "error feedback on disk"],
)
def test_a_run_killed_before_each_change_to_its_folder_has_the_same_result(
    kind: list[dict[str, Any]], tmp_path: Path
) -> None:
    experiment = small({"train": {"rounds": 4, "cohort": 2}}, *kind)
    expected = undisturbed(experiment, tmp_path / "whole")
    for point in itertools.count(1):
        out = tmp_path / f"{point}"
        code = killed_at(experiment, out, point)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert killed_at(experiment, out, 1 + point % 7) in (0, code)  # while it goes on, too
        go(experiment, out)
        assert record(out) == expected, f"killed before change {point}"
    assert point > 25


@linux
@pytest.mark.parametrize("torn", [0, 70])
def test_a_run_killed_in_the_middle_of_each_write_has_the_same_result(torn: int, tmp_path: Path) -> None:
    experiment = small(BOTH, {"train": {"rounds": 3, "cohort": 2}})
    expected = undisturbed(experiment, tmp_path / "whole")
    ends = []
    for point in itertools.count(1):
        out = tmp_path / f"{point}"
        ends.append(killed_at(experiment, out, point, torn))
        if ends[-1] == 0:
            break
        go(experiment, out)
        assert record(out) == expected, f"killed in change {point}"
    assert ends.count(-signal.SIGXFSZ) >= 12
    assert ends.count(1) == (3 + 2 if torn else 0)  # a line of which a part could be written is taken back


def test_the_final_model_is_the_model_of_the_run(tmp_path: Path) -> None:
    run = Run(small(BOTH), tmp_path / "run", data=digits())
    list(run)
    assert {name: x.tolist() for name, x in load_file(run.journal.folder.model).items()} == {  # type: ignore[union-attr]
        name: x.tolist() for name, x in run.params.items()
    }
