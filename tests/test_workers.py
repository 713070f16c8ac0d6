"""Worker processes end with the process that started them."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from fedshift.core.files import Lock
from fedshift.engines import workers
from tests.processes import assert_gone, children, wait_until
from tests.runs import ended, fork, linux


@linux
def test_busy_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    def parent() -> None:
        for place in range(3):  # each later fork has copies of the pipes of earlier ones
            workers.start(_busy, tmp_path / f"{place}", daemon=False)
        time.sleep(3600)

    pid = fork(parent)
    wait_until(lambda: all((tmp_path / f"{place}" / "at work").exists() for place in range(3)))
    busy = children(pid)
    assert len(busy) == 3
    os.kill(pid, signal.SIGKILL)
    assert ended(pid) == -signal.SIGKILL
    assert_gone(busy)
    for place in range(3):
        Lock(tmp_path / f"{place}").close()  # it is free


def _busy(server: Any, folder: Path) -> None:
    with Lock(folder):
        (folder / "at work").touch()
        time.sleep(3600)
