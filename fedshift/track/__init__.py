"""Trackers: log the rounds of recorded runs to TensorBoard, MLflow and Weights & Biases.

Logged values are read from the record, so they agree with it. Each tracker has its own thread; one that fails is
dropped, and training neither waits for a tracker nor stops because of one.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fedshift.experiment.toml import SettingsError
from fedshift.track.loading import load

if TYPE_CHECKING:
    from fedshift.rounds.federation import Outcome
    from fedshift.runs.run import Run


def tracked(run: "Run", *names: str, tell: Callable[[str], None] = warnings.warn) -> Iterator["Outcome"]:
    """Iterate over the rounds of a recorded run and log them to trackers; `tell` is called with their errors.

    >>> import os, tempfile
    >>> from fedshift import Experiment, run
    >>> folder = tempfile.TemporaryDirectory()
    >>> training = run(Experiment(train={"rounds": 2}, engine={"name": "sequential"}), folder.name)
    >>> [outcome.number for outcome in tracked(training, "tensorboard")]
    [1, 2]
    >>> any(name.startswith("events.out") for name in os.listdir(f"{folder.name}/tensorboard"))
    True
    >>> folder.cleanup()
    """
    from fedshift.track.threads import Trackers

    if run.journal is None:
        raise SettingsError("tracked(run): the run is not recorded; give it a folder: run(experiment, 'runs/mine')")
    return _logged(run, run.journal.folder.path, Trackers({name: load(name) for name in names}, tell))


def _logged(run: "Run", folder: Any, trackers: Any) -> Iterator["Outcome"]:
    how = "failed"
    try:
        for outcome in run:
            trackers.round(folder, outcome.number)
            yield outcome
        how = "stopped"
    except GeneratorExit:  # the caller stopped iterating
        how = "stopped"
        raise
    finally:
        trackers.close(how)
