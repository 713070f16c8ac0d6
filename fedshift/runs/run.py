"""Train, record and resume a run."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from torch import nn

from fedshift.algorithms import Algorithm, Average, Chain, Plain, Shift
from fedshift.algorithms.weights import FAN_IN
from fedshift.codecs import Codec
from fedshift.core.files import LOCK, RunError
from fedshift.core.names import named
from fedshift.core.types import Params
from fedshift.data.datasets import Dataset
from fedshift.data.partition import Partition
from fedshift.experiment.build import build, check_algorithm, engine, require_goal
from fedshift.experiment.settings import Experiment, check_used, quantizes
from fedshift.experiment.toml import SettingsError
from fedshift.rounds.engine import Engine, duplicate
from fedshift.rounds.evaluate import ClientScores, Loss, Metric
from fedshift.rounds.federation import Federation, Outcome
from fedshift.rounds.loop import Clock, DivergedError, DrawnRound, Ended, OpenRound, Ram, Training, run_rounds
from fedshift.rounds.optimizers import MakeOptimizer
from fedshift.rounds.policy import Policy, warnings
from fedshift.rounds.uplink import Uplink
from fedshift.runs.journal import Journal, require
from fedshift.runs.record import SETTINGS, begun, finished, leftover, settings_of


def _check_types(
    experiment: Any,
    model: Any,
    data: Any,
    uplink: Any = None,
    optimizer: Any = None,
    policy: Any = None,
    loss: Any = None,
    metric: Any = None,
) -> None:
    """Raise TypeError for arguments of a wrong type."""
    if not isinstance(experiment, Experiment):
        raise TypeError(
            f"run({type(experiment).__name__}): needs an Experiment, for example Experiment(train={{'lr': 0.1}})"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: must be an instance of torch.nn.Module")
    if uplink is not None and not isinstance(uplink, Uplink | Codec):
        raise TypeError(f"uplink={uplink!r}: must be an Uplink(codec, update, feedback) or a Codec")
    for name, function in (("loss", loss), ("metric", metric)):
        if function is not None and not callable(function):
            raise TypeError(f"{name}={function!r}: must be a function (outputs, targets)")
    if optimizer is not None and not callable(optimizer):
        raise TypeError(f"optimizer={optimizer!r}: must be a function (parameters, lr), or a class of torch.optim")
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"policy={policy!r}: must be an instance of a class derived from Policy")
    if data is not None and not isinstance(data, Dataset):
        raise TypeError(
            f"data: must be a Dataset, as returned by dataset(x, y, test_x, test_y), not {type(data).__name__}"
        )


def named_after(
    experiment: Experiment,
    model: nn.Module | None,
    data: Dataset | None,
    loss: Loss | None,
    metric: Metric | None,
    algorithm: Algorithm | None = None,
    partition: Partition | None = None,
    uplink: Uplink | None = None,
    goal: Literal["min", "max"] | None = None,
    optimizer: MakeOptimizer | None = None,
    policy: Policy | None = None,
) -> Experiment:
    """Experiment with the names of the objects that replace those of its settings, for the record."""
    names: dict[str, Any] = {"data.name": data.name} if data is not None else {}
    if algorithm is not None:
        check_algorithm(algorithm, f"algorithm={algorithm!r}: is of type {type(algorithm).__name__}")
        server = algorithm.server.rules if isinstance(algorithm.server, Chain) else (algorithm.server,)
        rules = [rule for rule in (algorithm.client, *server) if not isinstance(rule, Plain | Average | Shift)]
        kind = type(rules[0] if rules else algorithm.client)
        names |= {"algorithm.name": f"{kind.__module__}:{kind.__qualname__}", "algorithm.rules": repr(algorithm)}
    if partition is not None:
        if not isinstance(partition, Partition):
            raise SettingsError(f"partition={partition!r}: is of type {type(partition).__name__}; must be a Partition")
        names["data.clients"] = partition.clients
    if uplink is not None:
        kind = type(uplink.codec.quantizer)
        names["uplink.codec"] = {"name": f"{kind.__module__}:{kind.__qualname__}", "object": repr(uplink.codec)}
        names |= {"uplink.send": "updates" if uplink.update else "weights", "uplink.feedback": uplink.feedback}
        if not quantizes(experiment.uplink):
            names["uplink.bits"] = 8  # all clients
    if policy is not None:
        kind = type(policy)
        names["uplink.policy"] = {"name": f"{kind.__module__}:{kind.__qualname__}", "object": repr(policy)}
        if not quantizes(experiment.uplink):
            names["uplink.bits"] = 8  # all clients
    if goal is not None:
        names["train.goal"] = goal
    if model is not None:
        names |= {"model.name": f"{type(model).__module__}:{type(model).__qualname__}", "model.args": {}}
    for key, function in (("train.loss", loss), ("train.metric", metric), ("train.optimizer", optimizer)):
        if function is not None:
            names[key] = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"
    return experiment.changed(**names) if names else experiment


def _rebuilt(experiment: Experiment, name: str, value: object) -> bool:
    """True if this object can be rebuilt from the settings alone: a loss, metric or optimizer that can be imported."""
    train = experiment.train
    setting = {"loss": train.loss, "metric": train.metric, "optimizer": train.optimizer.name}.get(name, "")
    if not setting or setting.startswith("__main__:"):
        return False
    try:
        return named(setting) is value
    except Exception:  # the module exists only in this process, or not at all
        return False


def _uplink(experiment: Experiment, given: Uplink | Codec) -> Uplink:
    """The given uplink; a codec alone is used as `send` and `feedback` of the settings say, both as `biases` says."""
    config = experiment.uplink
    link = given if isinstance(given, Uplink) else Uplink(given, config.send == "updates", config.feedback)
    return replace(link, codec=replace(link.codec, min_axes=1)) if config.biases else link


def cores_here() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Run(Training):
    """Iterator that trains a run and yields an `Outcome` after every round.

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
        algorithm: Algorithm | None = None,
        partition: Partition | None = None,
        uplink: Uplink | Codec | None = None,
        policy: Policy | None = None,
        goal: Literal["min", "max"] | None = None,
        optimizer: MakeOptimizer | None = None,
        again: bool = False,
        cores: int | None = None,
        like: "Run | None" = None,
        latest: int | None = None,
        tell: Callable[[str], None] = lambda sentence: None,
        on: Callable[["Run"], Engine] | None = None,
    ) -> None:
        """Start a run, recorded in the folder `out` if given; with `again`, resume the run in that folder.

        `tell` is called with warnings. `on` returns the engine to use instead of the one in the settings; it is called
        when the rest of the run is built. `like` is a run whose data are shared instead of loaded again. `latest` is
        the last round to resume from.
        """
        _check_types(experiment, model, data, uplink, optimizer, policy, loss, metric)
        if out is not None and "\0" in str(out):
            raise RunError(f"{str(out)!r}: a folder's name cannot contain a NUL character")
        link = None if uplink is None else _uplink(experiment, uplink)
        objects = {
            "model": model,
            "data": data,
            "loss": loss,
            "metric": metric,
            "algorithm": algorithm,
            "partition": partition,
            "uplink": link,
            "optimizer": optimizer,
            "policy": policy,
        }
        passed = [name for name, value in objects.items() if value is not None]
        experiment = named_after(
            experiment, model, data, loss, metric, algorithm, partition, link, goal, optimizer, policy
        )
        if again and out is not None:
            require(Path(out), experiment, passed)
        given = [name for name in passed if not _rebuilt(experiment, name, objects[name])]
        if on is None and experiment.engine.name == "flower":
            raise SettingsError("engine.name = 'flower': use the command `fedshift run`, or a Flower ServerApp")
        if not again:
            require_goal(experiment)
        self.experiment, self.tell = experiment, tell
        shared = like.fed.task.data if like else None
        fed = build(experiment, model, data or shared, loss, metric, algorithm, partition, link, optimizer, policy)
        if experiment.shift.on and not fed.shifted:
            tell(f"shift.on = true: nothing is shifted: {reason_nothing_shifted(fed)}")
        if count := fed.partition.left_out:
            tell(left_out(count, experiment.data.least))
        if fed.held is not None and (without := int((fed.held.examples.sizes == 0).sum())):
            tell(f"evaluate.per_client = true: {without} of {fed.partition.clients} clients have no held-out examples")
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
        self._spent = 0.0  # seconds of saving the previous round
        self._undefined: set[str] = set()  # metrics whose NaN has been reported
        self._warned: set[str] = set()  # warnings of the policy that have been reported

    @property
    def params(self) -> Params:
        """Tensors that the server sends: the model without frozen weights."""
        return self.state.out.params

    @property
    def model(self) -> nn.Module:
        """Copy of the model with the current tensors, in evaluation mode."""
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
        """Begin the next round; its job must be done and its uploads taken before `end`."""
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
        self.state, outcome = opened.end(self.engine.evaluate if due else None, self._score_clients(opened.number))
        self._warn(outcome)
        for why in warnings(self.fed.policy, self.state.policy):
            if why not in self._warned:
                self._warned.add(why)
                self.tell(f"uplink.policy: {why}")
        for client, why in outcome.failed.items():
            self.tell(f"round {opened.number}: client {client} is left out: {why}")
        outcome.seconds["save"] = self._spent  # of the previous round: a line is written before its checkpoint
        clock = Clock()
        if self.journal:
            self.journal.add(self.state, outcome)
        self._spent = clock.lap("save")
        if self.finished:
            if self.state.skipped >= rounds:
                raise DivergedError(f"no upload could be used in any of the {self.state.skipped} rounds")
            self.finish()
        return outcome

    def _score_clients(self, number: int) -> Callable[[Params], ClientScores] | None:
        """Evaluation for each client, if it is due after this round."""
        held, every = self.fed.held, self.experiment.evaluate.every
        if held is None or (number != self.rounds and number % every):
            return None
        return lambda params: self.engine.evaluate_clients(params, held)

    def _warn(self, outcome: Outcome) -> None:
        """Report, once per metric, scores that are NaN although the loss is a number."""
        if outcome.score is None or outcome.accuracy is None or not math.isfinite(outcome.loss or 0.0):
            return
        scores = zip(self.experiment.train.directions, (outcome.accuracy, *outcome.score.others), strict=True)
        for name in [name for name, score in scores if math.isnan(score) and name not in self._undefined]:
            self._undefined.add(name)
            self.tell(f"round {outcome.number}: {name} is NaN, and is recorded as NaN")

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
        """Write a checkpoint if the run is recorded; only between rounds."""
        if self.journal:
            self.journal.checkpoint(self.state)

    @property
    def saved(self) -> int:
        """Round of the newest checkpoint, 0 for none."""
        return self.journal.saved if self.journal else 0

    def close(self) -> None:
        """Stop training, end worker processes and release the folder."""
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
    algorithm: Algorithm | None = None,
    partition: Partition | None = None,
    uplink: Uplink | Codec | None = None,
    policy: Policy | None = None,
    goal: Literal["min", "max"] | None = None,
    optimizer: MakeOptimizer | None = None,
) -> Run:
    """Start a run; iterate over the result to train. With `out`, the run is recorded in that folder and can be resumed.

    `model`, `data`, `loss` (outputs, targets -> mean), `metric` (one number per example), `algorithm` and `partition`
    replace those named in the settings. A loss without a metric is also the score. The shift of the settings is added
    to an `algorithm` that has no shift. `uplink` is that of all clients or, if the settings have clients with 8 bits or
    fewer, of these; a codec alone is used as `send` and `feedback` of the settings say. A `policy` chooses the uplinks
    of the same clients in every round.
    `goal` is `train.goal`: whether a lower ("min") or a higher ("max") metric is better, required unless it follows
    from the name of the metric. `optimizer` is a class of `torch.optim` or a function (parameters, lr) that returns
    such an optimizer.

    >>> sum(outcome.arrived for outcome in run(Experiment(train={"rounds": 2}, engine={"name": "sequential"})))
    20
    """
    _check_types(experiment, model, data, uplink, optimizer)
    check_used([named_after(experiment, None, None, None, None, optimizer=optimizer)])
    return Run(
        experiment,
        out,
        model=model,
        data=data,
        loss=loss,
        metric=metric,
        algorithm=algorithm,
        partition=partition,
        uplink=uplink,
        policy=policy,
        goal=goal,
        optimizer=optimizer,
    )


def resume(
    out: Path | str,
    *,
    model: nn.Module | None = None,
    data: Dataset | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    algorithm: Algorithm | None = None,
    partition: Partition | None = None,
    uplink: Uplink | Codec | None = None,
    optimizer: MakeOptimizer | None = None,
    policy: Policy | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Run:
    """Resume the run in a folder, with bit-identical results; pass the same objects as to `run`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     stopped = run(Experiment(train={"rounds": 2}, engine={"name": "sequential"}), folder)
    ...     next(stopped).number, stopped.close(), next(resume(folder)).number
    (1, None, 2)
    """
    folder = Path(out)
    if not begun(folder):
        raise RunError(nothing_to_resume(folder))
    if finished(folder):
        raise RunError(f"{out}: this run is finished; `fedshift report {out}` shows it")
    experiment = settings_of(folder)
    return Run(
        experiment,
        out,
        model=model,
        data=data,
        loss=loss,
        metric=metric,
        algorithm=algorithm,
        partition=partition,
        uplink=uplink,
        optimizer=optimizer,
        policy=policy,
        again=True,
        tell=tell,
    )


def reason_nothing_shifted(fed: Federation) -> str:
    """Reason why there is no tensor to shift, and what to do."""
    kind = type(fed.task.model).__name__
    if not fed.layers:
        return f"no trained tensor of {kind} is the weight of a known layer"
    few = f"no weight of {kind} has filters of {FAN_IN} inputs or more"
    return f"{few}; name weights in shift.tensors, or choose shift.per = 'layer'"


def left_out(count: int, least: int) -> str:
    """Sentence on natural clients with too few examples.

    >>> left_out(136, 10)
    '136 clients with fewer than 10 examples were left out'
    """
    which = "1 client" if count == 1 else f"{count:,} clients"
    return f"{which} with fewer than {max(least, 1)} examples {'was' if count == 1 else 'were'} left out"


def nothing_to_resume(folder: Path) -> str:
    """Reason why a folder without settings cannot be resumed, and what to do."""
    if not folder.is_dir():
        return f"{folder}: there is no such folder"
    if (folder / LOCK).exists() and not leftover(folder):
        return (
            f"{folder}: the command was stopped before the run started; repeat the command, with --out {folder} to use "
            "this folder"
        )
    return f"{folder}: contains no run to resume (there is no {SETTINGS})"
