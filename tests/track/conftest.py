"""Trackers may take as long as they need, so that a busy machine causes no warnings."""

import signal
from collections.abc import Iterator

import pytest

from fedshift.track import threads


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SILENT", 600.0)
    monkeypatch.setattr(threads, "WAIT", 600.0)
    for name in ("WANDB_INIT_TIMEOUT", "WANDB__SERVICE_WAIT"):  # seconds, of W&B's process
        monkeypatch.setenv(name, "600")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's handling of SIGINT, which a shell ignores for background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
