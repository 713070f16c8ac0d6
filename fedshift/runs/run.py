"""A run: rounds one after another, recorded and checkpointed, from the start or from where it was stopped."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

from torch import nn

from fedshift.algorithms.weights import FAN_IN
from fedshift.core.files import LOCK, RunError
from fedshift.core.names import named
from fedshift.core.types import Params
from fedshift.data.datasets import Dataset
from fedshift.experiment.build import build, engine, require_goal
from fedshift.experiment.settings import Experiment, check_used
from fedshift.experiment.toml import SettingsError
from fedshift.rounds.engine import Engine, duplicate
from fedshift.rounds.evaluate import Loss, Metric
from fedshift.rounds.federation import Federation, Outcome
from fedshift.rounds.loop import Clock, DivergedError, DrawnRound, Ended, OpenRound, Ram, Training, run_rounds
from fedshift.runs.journal import Journal, require
from fedshift.runs.record import SETTINGS, begun, finished, remains, settings_of


def _check_types(experiment: Any, model: Any, data: Any) -> None:
    """Sentences for what is easily mistaken."""
    if not isinstance(experiment, Experiment):
        raise TypeError(
            f"run({type(experiment).__name__}): needs an Experiment, for example Experiment(train={{'lr': 0.1}})"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: must be a torch.nn.Module, an object and not its class")
    if data is not None and not isinstance(data, Dataset):
        raise TypeError(f"data: must be a Dataset, as of dataset(x, y, test_x, test_y), not {type(data).__name__}")


def named_after(
    experiment: Experiment,
    model: nn.Module | None,
    data: Dataset | None,
    loss: Loss | None,
    metric: Metric | None,
    goal: Literal["min", "max"] | None = None,
) -> Experiment:
    """The experiment with the names of what stands in for its own, so that a record does not claim something else."""
    names: dict[str, Any] = {"data.name": data.name} if data is not None else {}
    if goal is not None:
        names["train.goal"] = goal
    if model is not None:
        names |= {"model.name": f"{type(model).__module__}:{type(model).__qualname__}", "model.args": {}}
    for key, own in (("train.loss", loss), ("train.metric", metric)):
        if own is not None:
            names[key] = f"{own.__module__}:{getattr(own, '__qualname__', type(own).__qualname__)}"
    return experiment.changed(**names) if names else experiment


def _rebuilt(experiment: Experiment, name: str, thing: object) -> bool:
    """True if the settings alone lead to this object, as for a loss or a metric that can be imported."""
    setting = {"loss": experiment.train.loss, "metric": experiment.train.metric}.get(name, "")
    if not setting or setting.startswith("__main__:"):
        return False
    try:
        return named(setting) is thing
    except Exception:  # of a module that is only there in this process, or of none
        return False


def cores_here() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Run(Training):
    """Iterate over it to train: it yields an `Outcome` after every round.

    >>> run = Run(Experiment(train={"rounds": 2}, engine={"name": "sequential"}))
    >>> [outcome.number for outcome in run], run.finished
    ([1, 2], True)
    """

    def __init__(
        self,
        experiment: Experiment,
        out: Path | str | None = None,
        *,
        model: nn.Module | None = None,
        data: Dataset | None = None,
        loss: Loss | None = None,
        metric: Metric | None = None,
        goal: Literal["min", "max"] | None = None,
        again: bool = False,
        cores: int | None = None,
        like: "Run | None" = None,
        latest: int | None = None,
        tell: Callable[[str], None] = lambda sentence: None,
        on: Callable[["Run"], Engine] | None = None,
    ) -> None:
        """`again` goes on with the run in the folder `out`; `tell` is called with what a user should know.

        `on` makes the engine, when all else of the run is there, in place of the one the settings name;
        `like` is a run on the same data, which need not be read and held twice; `latest` the last round to go on from.
        """
        _check_types(experiment, model, data)
        if out is not None and "\0" in str(out):
            raise RunError(f"{str(out)!r}: a folder's name cannot contain a NUL character")
        objects = {"model": model, "data": data, "loss": loss, "metric": metric}
        own = [name for name, thing in objects.items() if thing is not None]
        experiment = named_after(experiment, model, data, loss, metric, goal)
        if again and out is not None:
            require(Path(out), experiment, own)
        given = [name for name in own if not _rebuilt(experiment, name, objects[name])]
        if on is None and experiment.engine.name == "flower":
            raise SettingsError("engine.name = 'flower': runs by the command `fedshift run`, or in a Flower ServerApp")
        if not again:
            require_goal(experiment)
        self.experiment, self.tell = experiment, tell
        shared = like.fed.task.data if like else None
        fed = build(experiment, model, data or shared, loss, metric)
        if experiment.shift.on and not fed.shifted:
            tell(f"shift.on = true: nothing is shifted: {why_nothing(fed)}")
        self.journal = Journal(Path(out), experiment, fed, given) if out is not None else None
        try:
            if self.journal:
                self.state = self.journal.restore(tell, latest) if again else self.journal.begin()
            else:
                self.state = fed.start()
            self.fed, self.memory = fed, self.journal.memory if self.journal else Ram()
            chosen = on(self) if on else engine(experiment, fed.task, cores or cores_here())
        except BaseException:
            if self.journal:
                self.journal.close()
            raise
        super().__init__(fed, chosen, experiment.train.rounds, self.state, self.memory)
        self._outcomes = run_rounds([self], chosen)
        self._spent = 0.0  # seconds that saving the round before took

    @property
    def params(self) -> Params:
        """What the server sends now: all of the model but weights that are not trained."""
        return self.state.out.params

    @property
    def model(self) -> nn.Module:
        """A copy of the model with these tensors, in evaluation mode."""
        model = duplicate(self.fed.task.unused)
        model.load_state_dict(self.params, strict=False)
        return model.eval()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Outcome:
        """Train one round; the last one ends the run and writes the model."""
        if self.closed:
            raise StopIteration
        try:
            _, outcome = next(self._outcomes)
        except BaseException:
            self.close()
            raise
        if isinstance(outcome, Ended):
            raise outcome.problem
        return outcome

    def begin(self, drawn: DrawnRound | None = None) -> OpenRound:
        """The next round: its job is to be done, and its uploads taken, before its end."""
        number, record = self.state.number + 1, self.experiment.record
        histograms, frames = (
            bool(every) and (number == 1 or number % every == 0) for every in (record.histograms, record.frames)
        )
        frames = frames or (self.journal is not None and not self.journal.folder.estimates)
        drawn = drawn or self.draw()
        return OpenRound(self.fed, self.state, self.memory, drawn, histograms=histograms, frames=frames)

    def end(self, opened: OpenRound) -> Outcome:
        """Aggregate, evaluate and record a round; the last one ends the run."""
        rounds, every = self.experiment.train.rounds, self.experiment.record.evaluate
        due = opened.number == rounds or opened.number % every == 0
        self.state, outcome = opened.end(self.engine.evaluate if due else None)
        for client, why in outcome.failed.items():
            self.tell(f"round {opened.number}: client {client} is left out: {why}")
        outcome.seconds["save"] = self._spent  # of the round before: a line is written before its checkpoint
        clock = Clock()
        if self.journal:
            self.journal.add(self.state, outcome)
        self._spent = clock.lap("save")
        if self.finished:
            if self.state.skipped >= rounds:
                raise DivergedError(f"no upload could be used in any of the {self.state.skipped} rounds")
            self.finish()
        return outcome

    def finish(self) -> None:
        """Write the final model."""
        if self.journal:
            self.journal.finish({name: x.cpu() for name, x in self.model.state_dict().items()})
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def checkpoint(self) -> None:
        """Make this round one to go on from, if the run is recorded; only between rounds."""
        if self.journal:
            self.journal.checkpoint(self.state)

    @property
    def saved(self) -> int:
        """The last round there is a checkpoint of."""
        return self.journal.saved if self.journal else 0

    def close(self) -> None:
        """Stop here: worker processes end, the folder is free, and no further round is trained."""
        super().close()
        try:
            self.engine.close()
        finally:
            if self.journal:
                self.journal.close()


def run(
    experiment: Experiment,
    out: Path | str | None = None,
    *,
    model: nn.Module | None = None,
    data: Dataset | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    goal: Literal["min", "max"] | None = None,
) -> Run:
    """Train: iterate over the result for rounds. With `out`, everything is recorded there and can be resumed.

    A model, data, loss (outputs, targets -> mean) or metric (one number an example) of your own replaces the named
    one. A loss without a metric is the score itself. `goal` is `train.goal`: whether a lower ("min") or a higher
    ("max") metric is better, needed where the metric's name does not say it.

    >>> sum(outcome.arrived for outcome in run(Experiment(train={"rounds": 2}, engine={"name": "sequential"})))
    20
    """
    _check_types(experiment, model, data)
    check_used([experiment])
    return Run(experiment, out, model=model, data=data, loss=loss, metric=metric, goal=goal)


def resume(
    out: Path | str,
    *,
    model: nn.Module | None = None,
    data: Dataset | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Run:
    """Go on with the run in a folder, to the bit as if it had not been stopped; give it what `run` was given.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     stopped = run(Experiment(train={"rounds": 2}, engine={"name": "sequential"}), folder)
    ...     next(stopped).number, stopped.close(), next(resume(folder)).number
    (1, None, 2)
    """
    folder = Path(out)
    if not begun(folder):
        raise RunError(nothing_in(folder))
    if finished(folder):
        raise RunError(f"{out}: this run is finished; `fedshift report {out}` shows it")
    experiment = settings_of(folder)
    return Run(experiment, out, model=model, data=data, loss=loss, metric=metric, again=True, tell=tell)


def why_nothing(fed: Federation) -> str:
    """Reason why a shift finds no tensor to shift, and what to do about it."""
    kind = type(fed.task.model).__name__
    if not fed.layers:
        return f"no trained tensor of {kind} is the weight of a known layer"
    few = f"no weight of {kind} has filters of {FAN_IN} inputs or more"
    return f"{few}; name weights in shift.tensors, or choose shift.per = 'layer'"


def nothing_in(folder: Path) -> str:
    """Why a folder without settings holds nothing to resume, and what to do."""
    if not folder.is_dir():
        return f"{folder}: there is no such folder"
    if (folder / LOCK).exists() and not remains(folder):
        return (
            f"{folder}: nothing was started in this folder before the command was stopped; repeat the command that "
            f"was to start it, with --out {folder} to use this folder"
        )
    return f"{folder}: holds no run to resume (there is no {SETTINGS})"
