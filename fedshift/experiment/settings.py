"""Settings of an experiment, their validation, and error messages for invalid ones."""

import hashlib
import inspect
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
    validate_call,
)

from fedshift.algorithms.bounds import BOUND, CAP
from fedshift.algorithms.table import ALGORITHMS, arguments
from fedshift.codecs import Codec, RandomStep, Step, Ternary
from fedshift.codecs.base import reason
from fedshift.codecs.named import CODECS, WIDTH, make_codec
from fedshift.core.names import named, suggest
from fedshift.data.datasets import is_path
from fedshift.experiment.rates import parse
from fedshift.experiment.toml import SettingsError, dotted, plain, put
from fedshift.policies.table import POLICIES
from fedshift.rounds.metrics import METRICS
from fedshift.rounds.policy import Policy
from fedshift.rounds.uplinks import DOWNLINKS, REPLACED, UPLINKS, expanded, expanded_down

CLIENTS = 100  # number of clients, unless it follows from the data
PARTITIONS = ("shards", "dirichlet", "iid", "labels", "natural")
OPTIMIZERS = "sgd", "adam", "adamw"
SCHEDULES = "constant", "decayed", "strongly-convex", "cosine", "steps"


def _rate(value: Any) -> Any:
    """Bytes per second from a number or a text like "10Mbit/s"."""
    if isinstance(value, bool):
        raise ValueError("must be a number")  # a bool is an int in Python
    return parse(value) if isinstance(value, str) else value


def _file_name(name: str) -> str:
    """Name of a run, which is also the name of its folder."""
    if not 1 <= len(name) <= 100 or name in (".", "..") or any(char in "/\\" or ord(char) < 32 for char in name):
        raise ValueError("must be the name of a folder: 1 to 100 characters, no slash, backslash or control character")
    return name


def _not_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number from 0 to 1, or 'uploads'")  # a bool is an int in Python
    return value


Positive = Annotated[float, Field(gt=0, le=1e30)]
NotNegative = Annotated[float, Field(ge=0, le=1e30)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(ge=1e-3, le=1e15), BeforeValidator(_rate)]  # bytes per second, or "10Mbit/s"
Count = Annotated[int, Field(ge=1, le=100_000_000, strict=True)]
Whole = Annotated[int, Field(ge=0, le=100_000_000, strict=True)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Bits = Literal[1, 2, 3, 4, 5, 6, 7, 8, 16, 32]
BITS = "1 to 8 (quantized), 16 (bfloat16) or 32 (exact)"
SIZES = ("step", "rate", "keep")  # settings of an uplink that only some quantizers use
LOWER = {"loss", "error", "errors", "mse", "mae", "rmse", "mape", "nll", "perplexity", "ppl", "wer", "cer", "brier"}
HIGHER = {"accuracy", "acc", "top1", "top5", "precision", "recall", "f1", "auc", "auroc", "r2", "iou", "dice", "bleu"}
Goal = Literal["min", "max"]
Parts = Annotated[str, Field(pattern=r"^(\d+)(\+\d+)+$")]  # "32+4": equal parts of the clients, as in the paper


def goal_of(metric: str) -> Goal | None:
    """Goal implied by the words in a metric's name; None if they imply none or both.

    >>> goal_of("accuracy"), goal_of("mine:mean_absolute_error"), goal_of("mine:close"), goal_of("mine:accuracy_loss")
    ('max', 'min', None, None)
    """
    name = metric.rpartition(":")[2].rpartition(".")[2]
    words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*", name)}
    lower, higher = bool(words & LOWER), bool(words & HIGHER)
    return None if lower == higher else "min" if lower else "max"


def _by_metric(value: Any) -> Any:
    """{name: None} for a list of names: their goals follow from the names."""
    return dict.fromkeys(value) if isinstance(value, list | tuple) and all(isinstance(x, str) for x in value) else value


class SettingsTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSettings(SettingsTable):
    """Data set, and its partition among clients."""

    name: str = "digits"  # a data set, the path of a file or of a folder of files, or module:function
    args: dict[str, Any] = {}  # of the data set or of the function
    clients: Whole = 0  # 0: 100, or in a natural or a user's partition all
    partition: str = "shards"  # shards, dirichlet, iid, labels, natural, or module:function
    partition_args: dict[str, Any] = {}  # of a user's partition
    alpha: Positive = 0.5  # concentration, for dirichlet
    least: Whole = 10  # minimum number of examples per client, for dirichlet and natural
    most: Whole = 0  # maximum number of examples per client, the others are not used; 0: no limit
    labels: Count = 2  # labels per client, for labels
    augment: bool = False  # random crops and flips of images

    @field_validator("name")
    @classmethod
    def _whole_path(cls, name: str) -> str:
        return str(Path(name).absolute()) if is_path(name) else name

    @field_validator("partition")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in PARTITIONS and ":" not in name:
            raise ValueError(f"must be one of {', '.join(PARTITIONS)}, or module:function")
        return name

    @model_validator(mode="after")
    def _counted(self) -> Self:
        """Fill in the number of clients without marking it as set, so that `changed` computes it again."""
        if self.partition_args and ":" not in self.partition:
            raise ValueError(f"partition_args = {self.partition_args}: only a partition module:function takes them")
        if self.partition != "natural" and ":" not in self.partition and not self.clients:
            if "clients" in self.model_fields_set:
                raise ValueError(f"clients = 0: must be 1 or more with partition = {self.partition!r}")
            object.__setattr__(self, "clients", CLIENTS)
        return self


class ModelSettings(SettingsTable):
    name: str = "mlp"  # a name in fedshift.models.MODELS, or module:function
    args: dict[str, Any] = {}


class AlgorithmSettings(SettingsTable):
    """Name of the algorithm, the weights of clients, and as further settings the arguments of the algorithm."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "fedavg"  # one of `fedshift methods`, or module:function
    mu: NotNegative = 0.01  # for fedprox
    control: Literal["derived", "sent"] = "derived"  # for scaffold
    weights: Literal["equal", "examples"] = "equal"  # p_k

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in ALGORITHMS and ":" not in name:
            raise ValueError(f"must be one of {', '.join(ALGORITHMS)}, or module:function")
        return name

    @property
    def args(self) -> dict[str, Any]:
        """Arguments for the algorithm, used or not; a user's function keeps its own defaults of `mu` and `control`."""
        common = {"mu": self.mu, "control": self.control}
        if self.name not in ALGORITHMS:
            common = {name: value for name, value in common.items() if name in self.model_fields_set}
        return common | (self.model_extra or {})

    @property
    def complete(self) -> "AlgorithmSettings":
        """The same with default values of arguments that are not given."""
        if self.name not in ALGORITHMS:
            return self
        missing = {name: value for name, value in arguments(self.name).items() if name not in self.args}
        return AlgorithmSettings(**self.model_dump(exclude_unset=True) | missing)


class ShiftSettings(SettingsTable):
    """Per filter: filter centring, with share 1 by default. Per layer: the paper's rule, with the uploads' share.

    `max_share` or `warmup` without `per`, as in records of earlier versions, implies `per = "layer"`.
    """

    on: bool = True
    per: Literal["filter", "layer"] = "filter"
    share: Annotated[Fraction | Literal["uploads"], BeforeValidator(_not_boolean)] = 1.0  # uploads: quantized share
    max_share: Fraction = 0.5  # upper bound of share = "uploads"
    warmup: Whole = 0  # rounds until the full share is subtracted
    tensors: tuple[str, ...] | None = None  # names or patterns (default: weights of layers)

    @model_validator(mode="after")
    def _completed(self) -> Self:
        """Fill in defaults without marking them as set, so that `changed` computes them again."""
        if "per" not in self.model_fields_set and self.model_fields_set & {"max_share", "warmup"}:
            object.__setattr__(self, "per", "layer")
        if "share" not in self.model_fields_set and self.per == "layer":
            object.__setattr__(self, "share", "uploads")
        return self


def _table(value: Any) -> Any:
    """{"name": text} for a text: `codec = "sign"` is short for `codec = {name = "sign"}`."""
    return {"name": value} if isinstance(value, str) else value


class AdamSettings(SettingsTable):
    """Arguments of adam and adamw."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, Field(ge=1e-30, le=1e30)] = 1e-8  # a smaller one is 0 in float32, and a gradient of 0 NaN


class NamedSettings(SettingsTable):
    """Name of one of several known things, or module:function; further settings are its arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)

    known: ClassVar[Collection[str]]  # names
    name: str

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in cls.known and ":" not in name:
            raise ValueError(f"must be one of {', '.join(cls.known)}, or module:function")
        return name

    @property
    def args(self) -> dict[str, Any]:
        return self.model_extra or {}


class OptimizerSettings(NamedSettings):
    """Name of a local optimizer, and as further settings its arguments."""

    known = OPTIMIZERS
    name: str = "sgd"  # sgd, adam, adamw, torch.optim:RMSprop, or module:function

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.name == "sgd" and self.args:
            key, seen = next(iter(self.args.items()))
            hint = f"; set train.{key}" if key in TrainSettings.model_fields else ""
            raise ValueError(f"{key} = {seen!r}: is not an argument of sgd{hint}")
        if self.name in ("adam", "adamw"):
            try:
                AdamSettings(**self.args)
            except ValidationError as problem:
                wrong = problem.errors()[0]
                allowed = "betas (two numbers from 0 to 1) and eps (1e-30 or more)"
                raise ValueError(
                    f"{wrong['loc'][0]} = {wrong['input']!r}: does not fit; the arguments of {self.name} are {allowed}"
                ) from None
        return self


class TrainSettings(SettingsTable):
    rounds: Count = 100
    cohort: Count = 10  # clients per round
    selection: Literal["uniform", "stratified"] = "uniform"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # probability that a drawn client drops out
    epochs: Annotated[int, Field(ge=1, le=10_000, strict=True)] = 2
    # local steps per round, the same for every client, instead of epochs
    steps: Annotated[int, Field(ge=1, le=1_000_000, strict=True)] | None = None
    batch: Count = 10
    lr: Positive = 0.05
    schedule: str = "constant"  # one of SCHEDULES, or module:function
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0  # factor of lr per round, for decayed, or per milestone, for steps
    milestones: tuple[Count, ...] = ()  # rounds after which lr is multiplied by decay, for steps
    final: Fraction = 0.0  # part of lr that is approached in the last round, for cosine
    warmup: Whole = 0  # first rounds, in which the learning rate rises in proportion to the round
    local_schedule: Literal["constant", "linear", "cosine"] = "constant"  # within a round
    convexity: Positive = 1.0  # mu in 2 / (mu (gamma + tau)), for strongly-convex
    gamma: Positive = 1.0
    optimizer: Annotated[OptimizerSettings, BeforeValidator(_table)] = OptimizerSettings()
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # for sgd
    weight_decay: NotNegative = 0.0  # adamw: decoupled; others: added to the gradient
    clip: NotNegative = 0.0  # maximum norm of a gradient; 0: no limit
    loss: str = "cross-entropy"  # or module:function
    metric: str = ""  # default: the first of `metrics`, or else accuracy for cross-entropy and loss for other losses
    goal: Goal | None = None  # min: lower is better (default: from the name of the metric)
    # all metrics to record: names, or names with their goals; module:function or accuracy, loss, perplexity, f1, ...
    metrics: Annotated[dict[str, Goal | None] | None, BeforeValidator(_by_metric)] = None
    patience: Count = 5  # consecutive rounds without a usable upload before the run stops

    @model_validator(mode="after")
    def _scored(self) -> Self:
        if self.metrics is not None and not self.metrics:
            raise ValueError("metrics: must contain one metric or more")
        if not self.metric:  # not marked as set, so that `changed` computes it again
            usual = "accuracy" if self.loss == "cross-entropy" else "loss"
            object.__setattr__(self, "metric", next(iter(self.metrics or ()), usual))
        known = goal_of(self.metric)
        if self.metric in METRICS and self.goal not in (None, known):
            raise ValueError(f"goal = {self.goal!r}: the goal of {self.metric} is {known!r}")
        if self.metrics is not None:
            object.__setattr__(self, "metrics", {name: self._goal(name, goal) for name, goal in self.metrics.items()})
        return self

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, name: str) -> str:
        if name not in SCHEDULES and ":" not in name:
            raise ValueError(f"must be one of {', '.join(SCHEDULES)}, or module:function")
        return name

    @model_validator(mode="after")
    def _planned(self) -> Self:
        if self.steps is not None and "epochs" in self.model_fields_set:
            raise ValueError(f"steps = {self.steps} and epochs = {self.epochs}: only one of them can be given")
        if self.schedule == "steps" and not self.milestones:
            raise ValueError("schedule = 'steps': needs milestones, the rounds after which lr is multiplied by decay")
        return self

    @model_serializer(mode="wrap")
    def _without_epochs(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Settings without epochs if there are steps."""
        found: dict[str, Any] = dump(self)
        return found if self.steps is None else {key: x for key, x in found.items() if key != "epochs"}

    def _goal(self, name: str, goal: Goal | None) -> Goal:
        """Goal of one of several metrics: the given one, or that of its name; ValueError if it is unknown."""
        known = goal_of(name)
        if ":" not in name and name not in METRICS:
            raise ValueError(f"metrics: {name!r}: no such metric; {suggest(name, METRICS)} (or module:function)")
        if goal and name in METRICS and goal != known:
            raise ValueError(f"metrics: {name} = {goal!r}: the goal of {name} is {known!r}")
        if goal and name == self.metric and self.goal not in (None, goal):
            raise ValueError(f"metrics: {name!r} = {goal!r}: contradicts goal = {self.goal!r}")
        found = goal or (self.goal if name == self.metric else None) or known
        if found is None:
            raise ValueError(
                f"metrics: {name!r}: its name does not say which scores are better; write a table, "
                f'{{"{name}" = "min"}} (lower is better) or {{"{name}" = "max"}} (higher is better)'
            )
        return found

    @property
    def direction(self) -> Goal | None:
        """Given goal, or else that of the metric's name; None if both are unknown."""
        return self.goal or (self.metrics or {}).get(self.metric) or goal_of(self.metric)

    @property
    def directions(self) -> dict[str, Goal | None]:
        """Goals of all metrics by name, that of the score first."""
        return {self.metric: self.direction} | (self.metrics or {})

    @property
    def lower(self) -> bool:
        """True if lower scores are better; records without a goal count as maximised."""
        return self.direction == "min"


class BoundsSettings(SettingsTable):
    """Limits on one upload, as multiples of the round's median; 0: no limit."""

    norm: NotNegative = BOUND  # of the update; an upload above it is rejected
    weight: NotNegative = CAP  # of algorithm.weights = "examples"; a larger weight is reduced to it

    @model_validator(mode="after")
    def _not_below_the_median(self) -> Self:
        for name, multiple in (("norm", self.norm), ("weight", self.weight)):
            if 0 < multiple < 1:
                raise ValueError(f"{name} = {multiple:g}: must be 1 or more, or 0 for no limit")
        return self


class CodecSettings(NamedSettings):
    """Name of a codec, one of `fedshift methods`, and as further settings the arguments of its function."""

    known = CODECS

    def made(self) -> Codec:
        """The codec; ValueError if its function does not accept the arguments."""
        codec: Codec = _made("codec", self.name, self.args, CODECS, Codec)
        return codec


class PolicySettings(NamedSettings):
    """Name of an uplink policy, one of `fedshift methods`, and as further settings its arguments."""

    known = POLICIES

    def made(self) -> Policy:
        """The policy; ValueError if it does not accept the arguments."""
        policy: Policy = _made("policy", self.name, self.args, POLICIES, Policy)
        return policy


def _made(kind: str, name: str, args: dict[str, Any], table: Mapping[str, Any], of: type[Any]) -> Any:
    """Result of a function of a table or of a user; ValueError if it does not accept the arguments."""
    if "object" in args:
        raise ValueError(f"{kind} = {name!r}: was passed to run(...) as an object; pass it again in Python")
    try:
        make = table[name] if name in table else named(name)
        made = _called(make, args) if name in table else make(**args)
    except ValidationError as problem:
        wrong = problem.errors()[0]
        if wrong["type"] == "unexpected_keyword_argument":
            key, known = str(wrong["loc"][0]), inspect.signature(make).parameters
            hint = suggest(key, known) if known else "it has none"
            raise ValueError(f"{kind}.{key} = {wrong['input']!r}: {name} has no such argument; {hint}") from None
        raise ValueError(f"{kind}.{'.'.join(map(str, wrong['loc']))} = {wrong['input']!r}: {wrong['msg']}") from None
    except Exception as problem:  # of a user's function
        what = f"{kind} = {name!r}{f' with {args}' if args else ''}"
        why = str(problem) if isinstance(problem, TypeError) else reason(problem)  # a wrong argument, most often
        raise ValueError(f"{what}: {why}") from problem
    if not isinstance(made, of):
        raise ValueError(f"{kind} = {name!r}: returns {type(made).__name__}, but must return a {of.__name__}")
    return made


def _called(make: Any, args: dict[str, Any]) -> Any:
    """Result of a function, or instance of a dataclass, with arguments of exactly the annotated types."""
    strict = validate_call(config=ConfigDict(strict=True))
    if not isinstance(make, type):
        return strict(make)(**args)
    made: Any = object.__new__(make)
    strict(vars(make)["__init__"])(made, **args)
    return made


class CodingSettings(SettingsTable):
    """Quantizer, coder and kind of upload of a client, except for its bits.

    The default quantizer is K-means, with nearest codes if there is feedback, and randomly rounded codes otherwise. A
    `rate` without a quantizer implies step if there is feedback or in a downlink, and step-random otherwise; a `step`
    implies step, and `keep` implies ternary. All of them set `bits` unless it is given.
    A `codec` replaces quantizer, coder and groups of all clients with 8 bits or fewer, and sets `bits` to 8 unless it
    is given.
    """

    cancelling: ClassVar[bool] = True  # random errors cancel, over clients or rounds, without feedback

    codec: Annotated[CodecSettings | None, BeforeValidator(_table)] = None

    quantizer: Literal["kmeans", "kmeans-random", "uniform", "stochastic", "step", "step-random", "ternary"] = "kmeans"
    step: Annotated[float, Field(ge=0.01, le=1000)] | None = None  # for step, in units of the root mean square
    # bits per value: for step, instead of its step, and step-random
    rate: Annotated[float, Field(ge=0.001, le=7)] | None = None
    keep: Annotated[float, Field(gt=0, le=1)] | None = None  # for ternary: fraction of nonzero values
    # auto: range below 4 bits and after steps, else bitpack
    coder: Literal["auto", "bitpack", "zstd", "range"] = "auto"
    per: Literal["tensor", "channel"] | Count = "tensor"  # or the number of values per block
    biases: bool = False  # also quantize tensors with one axis, which are exact otherwise
    send: Literal["weights", "updates"] = "weights"
    feedback: bool = False

    @model_validator(mode="after")
    def _filled_in(self) -> Self:
        """Fill in defaults without marking them as set, so that `changed` computes them again."""
        given = self.model_fields_set
        if self.codec is not None:
            if unused := [name for name in given if name in REPLACED and getattr(self, name) is not None]:
                raise ValueError(f"{unused[0]}: has no effect with codec = {self.codec.name!r}, which replaces it")
            if "bits" not in given:
                object.__setattr__(self, "bits", 8)
            return self
        if "quantizer" not in given:
            object.__setattr__(self, "quantizer", self._implied())
        for name, users in (("step", ("step",)), ("rate", ("step", "step-random")), ("keep", ("ternary",))):
            if getattr(self, name) is not None and self.quantizer not in users:
                needed = " or ".join(map(repr, users))
                raise ValueError(f"{name} = {getattr(self, name)}: has no effect without quantizer = {needed}")
        if self.quantizer == "step-random" and self.feedback:
            raise ValueError(
                "feedback = true: errors of quantizer = 'step-random' may exceed the update and would grow from round "
                "to round; use quantizer = 'step'"
            )
        if self.step is not None and self.rate is not None:
            raise ValueError(f"step = {self.step} and rate = {self.rate}: only one of them can be given")
        if self.quantizer == "step" and self.rate is None and self.step is None:
            object.__setattr__(self, "step", Step.step)
        if self.quantizer == "step-random" and self.rate is None:
            object.__setattr__(self, "rate", RandomStep.rate)
        if self.quantizer == "ternary" and self.keep is None:
            object.__setattr__(self, "keep", Ternary.keep)
        if "bits" not in given and self.quantizer in WIDTH:
            object.__setattr__(self, "bits", WIDTH[self.quantizer])
        return self

    def _implied(self) -> str:
        """Quantizer that the other settings imply."""
        given = self.model_fields_set
        if "step" in given or ("rate" in given and (self.feedback or not self.cancelling)):
            return "step"
        if "rate" in given:
            return "step-random"
        if "keep" in given:
            return "ternary"
        return "kmeans" if self.feedback else "kmeans-random"

    @model_serializer(mode="wrap")
    def _without_replaced(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Settings without those that a codec replaces."""
        found: dict[str, Any] = dump(self)
        return found if self.codec is None else {key: x for key, x in found.items() if key not in REPLACED}

    def codec_for(self, bits: int) -> Codec:
        """Codec of a client with these bits; ValueError if they do not fit the other settings."""
        if self.codec is not None and bits <= 8:
            made = self.codec.made()
            return replace(made, min_axes=1) if self.biases else made
        sizes = {"step": self.step, "rate": self.rate, "keep": self.keep}
        return make_codec(self.quantizer, bits, **sizes, coder=self.coder, per=self.per, biases=self.biases)


class LinkSettings(CodingSettings):
    """Uplink of one group of clients."""

    share: Annotated[float, Field(gt=0, le=1)] | None = None  # of all clients
    clients: tuple[Whole, ...] | None = None  # or a list of clients
    bits: Bits = 32
    bandwidth: Rate | None = None  # bytes per second

    @model_validator(mode="after")
    def _codable(self) -> Self:
        check_codable(self)
        return self


class UplinkSettings(CodingSettings):
    """Uplink of all clients: the same for all, in parts ("32+4"), by fraction, per client, or in named groups.

    A `policy` chooses the uplinks of all clients with 8 bits or fewer in every round, and sets `bits` to 8 unless it is
    given.
    """

    policy: Annotated[PolicySettings | None, BeforeValidator(_table)] = None
    bits: Bits | Parts | dict[Bits, Annotated[float, Field(gt=0, le=1)]] | tuple[Bits, ...] = 32
    bandwidth: Rate | dict[Bits, Rate] | tuple[Rate, ...] | None = None  # bytes per second and client
    group: dict[str, LinkSettings] = {}

    @field_validator("bits", "bandwidth", mode="before")
    @classmethod
    def _whole_numbers(cls, value: Any) -> Any:
        """Convert keys to integers: TOML keys are text, {"32" = 0.5}."""
        if isinstance(value, bool):
            raise ValueError("must be a number")  # a bool is an int in Python
        if not isinstance(value, Mapping):
            return value
        return {int(key) if str(key).isdecimal() else key: part for key, part in value.items()}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_policy()
        for part in self.bits.split("+") if isinstance(self.bits, str) else ():
            if part not in map(str, get_args(Bits)):
                raise ValueError(f"bits = {self.bits!r}: {part} is not allowed; bits must be {BITS}")
        if isinstance(self.bits, dict) and abs(sum(self.bits.values()) - 1) > 1e-6:
            raise ValueError(f"bits: the fractions add up to {sum(self.bits.values()):g}; they must add up to 1")
        if self.group and not isinstance(self.bits, int):
            raise ValueError(f"bits = {self.bits!r}: with named groups it must be one number, for all other clients")
        if self.group and sum(link.share or 0.0 for link in self.group.values()) > 1 + 1e-6:
            raise ValueError("group: the shares add up to more than 1")
        for name, link in self.group.items():
            if (link.share is None) == (link.clients is None):
                raise ValueError(f"group.{name}: must have either a share of the clients or a list of clients")
        check_codable(self)
        return self

    def _check_policy(self) -> None:
        """Refuse settings that have no effect with a policy, and a policy without clients."""
        if self.policy is None:
            return
        if self.policy.name in POLICIES:  # a user's policy may use the uplinks of the settings
            given = [name for name in CodingSettings.model_fields if name in self.model_fields_set]
            if unused := [name for name in given if getattr(self, name) is not None]:
                raise ValueError(f"{unused[0]}: has no effect with policy = {self.policy.name!r}, which replaces it")
            self.policy.made()
        if "bits" not in self.model_fields_set and not self.group:
            object.__setattr__(self, "bits", 8)
        if not (quantizes(self) or any(map(quantizes, self.group.values()))):
            raise ValueError(f"policy = {self.policy.name!r}: has no effect with bits = {self.bits!r}")

    @model_serializer(mode="wrap")
    def _without_absent(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Settings without those that a codec or a policy replaces, and without a policy if there is none."""
        if self.policy is None:
            unused = {"policy"}
        else:
            unused = set(CodingSettings.model_fields) if self.policy.name in POLICIES else set()
        return {key: x for key, x in self._without_replaced(dump).items() if key not in unused}


class DownlinkSettings(CodingSettings):
    """Broadcast to clients: exact, or encoded once per round."""

    cancelling: ClassVar[bool] = False  # each update contains the error of the one before

    bits: Bits = 32

    @model_validator(mode="after")
    def _codable(self) -> Self:
        check_codable(self)
        if self.quantizer == "step-random" and self.send == "updates" and self.bits <= 8:
            raise ValueError(
                "quantizer = 'step-random': its errors may exceed the update, and updates of the downlink contain the "
                "error of the one before; use quantizer = 'step'"
            )
        if self.feedback and self.send == "updates":
            raise ValueError("feedback = true: updates of the downlink already contain what was lost before")
        return self


def widths(coding: UplinkSettings | LinkSettings | DownlinkSettings) -> set[int]:
    """Set of the bits of all clients with this coding.

    >>> sorted(widths(UplinkSettings(bits="32+4")))
    [4, 32]
    """
    bits = coding.bits
    values = bits.split("+") if isinstance(bits, str) else [bits] if isinstance(bits, int) else bits
    return {int(value) for value in values}


def quantizes(coding: UplinkSettings | LinkSettings | DownlinkSettings) -> bool:
    """True if any client with this coding uploads quantized values.

    >>> [quantizes(UplinkSettings(bits=bits)) for bits in (32, "32+16", "32+4")]
    [False, False, True]
    """
    return min(widths(coding)) <= 8


def check_codable(coding: UplinkSettings | LinkSettings | DownlinkSettings) -> None:
    """Refuse bits that the quantizer does not support; a user's codec is made later."""
    if coding.codec is not None and not quantizes(coding):
        raise ValueError(f"codec = {coding.codec.name!r}: has no effect with bits = {coding.bits!r}")
    if coding.codec is not None:
        if ":" not in coding.codec.name:
            coding.codec.made()
        return
    for bits in sorted(widths(coding)):
        try:
            coding.codec_for(bits)
        except ValueError as problem:
            raise ValueError(f"quantizer = {coding.quantizer!r} with bits = {bits}: {problem}") from None


class EngineSettings(SettingsTable):
    name: Literal["auto", "sequential", "processes", "batched", "flower"] = "auto"
    workers: Annotated[int, Field(ge=0, le=1024, strict=True)] = 0  # 0: one per core
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one and the engine is batched or auto
    precision: Literal["fp32", "tf32", "bf16"] = "tf32"  # of arithmetic on a GPU; weights are always float32
    deterministic: bool = False  # bit-identical results on a GPU, for the same pack
    pack: Whole = 0  # number of runs of a sweep that a GPU trains at once; 0: as many as fit


class RecordSettings(SettingsTable):
    evaluate: Count = 1  # every N rounds, and after the last
    checkpoint: Count = 1  # every N rounds
    histograms: Whole = 50  # every N rounds; 0: never
    frames: Whole = 50  # every N rounds and in round 1, the batched engine checks estimated bytes; 0: never
    memory: Literal["ram", "disk"] = "ram"  # where clients' memory is kept between rounds


class EvaluateSettings(SettingsTable):
    """Evaluation on held-out examples of each client, in addition to the test set."""

    per_client: bool = False
    every: Count = 1  # every N rounds, and after the last
    held_out: Annotated[float, Field(ge=0, le=0.9)] = 0.0  # share of training examples; 0: test examples by their owner


class Experiment(SettingsTable):
    """Settings of one run. Every setting has a default; `Experiment()` trains digits with 100 full-precision clients.

    >>> experiment = Experiment(uplink={"bits": {32: 0.5, 4: 0.5}}, train={"rounds": 20})
    >>> experiment.uplink.bits, experiment.train.lr
    ({32: 0.5, 4: 0.5}, 0.05)
    """

    name: Annotated[str, AfterValidator(_file_name)] = "run"  # also that of its folder
    seed: Annotated[int, Field(ge=0, lt=1 << 63, strict=True)] = 0
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    shift: ShiftSettings = ShiftSettings()
    train: TrainSettings = TrainSettings()
    bounds: BoundsSettings = BoundsSettings()
    uplink: UplinkSettings = UplinkSettings()
    downlink: DownlinkSettings = DownlinkSettings()
    engine: EngineSettings = EngineSettings()
    record: RecordSettings = RecordSettings()
    evaluate: EvaluateSettings = EvaluateSettings()

    @field_validator("uplink", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return expanded(value) if isinstance(value, str) else value

    @field_validator("downlink", mode="before")
    @classmethod
    def _down_by_name(cls, value: Any) -> Any:
        return expanded_down(value) if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _no_nul(cls, raw: Any) -> Any:
        for where, text in _texts(raw):
            if "\0" in text:
                raise ValueError(f"{where} = {text!r}: names and paths must not contain NUL characters")
        return raw

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        clients = self.data.clients
        if not clients:  # known and checked when the data are loaded
            return self
        if self.train.cohort > clients:
            raise ValueError(f"train.cohort = {self.train.cohort}: there are only {clients} clients (data.clients)")
        if isinstance(self.uplink.bits, tuple) and len(self.uplink.bits) != clients:
            raise ValueError(
                f"uplink.bits: {len(self.uplink.bits)} values; must be one per client (data.clients = {clients})"
            )
        rates = self.uplink.bandwidth
        if isinstance(rates, tuple) and len(rates) != clients:
            raise ValueError(
                f"uplink.bandwidth: {len(rates)} values; must be one per client (data.clients = {clients})"
            )
        return self

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise SettingsError(explain(error)) from None

    def toml(self) -> str:
        """All settings as TOML, without step, rate and keep of uplinks that do not quantize (see `check_quantized`)."""
        unused = {name: set(SIZES) for name, link in self.uplink.group.items() if not quantizes(link)}
        extra = dict.fromkeys(() if quantizes(self.uplink) else SIZES, True)
        down = dict.fromkeys(() if quantizes(self.downlink) else SIZES, True)
        excluded: Any = {"uplink": {**extra, "group": unused}, "downlink": down}
        dumped = self.model_dump(exclude_none=True, exclude=excluded)
        algorithm = self.algorithm.complete
        unset = {"mu", "control"} - algorithm.args.keys()
        return tomli_w.dumps(plain(dumped | {"algorithm": algorithm.model_dump(exclude_none=True, exclude=unset)}))

    def changed(self, **settings: Any) -> "Experiment":
        """Copy with other values of some settings: changed(**{"train.rounds": 3})."""
        raw: dict[str, Any] = self.model_dump(exclude_unset=True)
        for key, value in settings.items():
            put(raw, key, value)
        return Experiment(**raw)


def uplink_name(uplink: UplinkSettings) -> str | None:
    """Name of the named uplink with these settings, apart from the bandwidth; None if there is none.

    >>> uplink_name(Experiment(uplink="lean").uplink), uplink_name(Experiment(uplink={"bits": 4}).uplink)
    ('lean', None)
    """
    unlimited = uplink.model_copy(update={"bandwidth": None})
    return next((name for name in UPLINKS if UplinkSettings(**expanded(name)) == unlimited), None)


def downlink_name(downlink: DownlinkSettings) -> str | None:
    """Name of the named downlink with these settings; None if there is none.

    >>> [downlink_name(Experiment(downlink=link).downlink) for link in ("lean", "exact", {"bits": 8})]
    ['lean', 'exact', None]
    """
    if not quantizes(downlink) and downlink.bits == 32:
        return "exact"
    return next((name for name in DOWNLINKS if DownlinkSettings(**expanded_down(name)) == downlink), None)


# setting -> (other setting, its only values for which the first one is used)
USED_BY = {
    "train.decay": ("train.schedule", ("decayed", "steps")),
    "train.milestones": ("train.schedule", ("steps",)),
    "train.final": ("train.schedule", ("cosine",)),
    "train.convexity": ("train.schedule", ("strongly-convex",)),
    "train.gamma": ("train.schedule", ("strongly-convex",)),
    "train.momentum": ("train.optimizer.name", ("sgd",)),
    "data.alpha": ("data.partition", ("dirichlet",)),
    "data.least": ("data.partition", ("dirichlet", "natural")),
    "data.labels": ("data.partition", ("labels",)),
    "algorithm.mu": ("algorithm.name", ("fedprox",)),
    "evaluate.every": ("evaluate.per_client", (True,)),
    "evaluate.held_out": ("evaluate.per_client", (True,)),
}
# settings that numbers of runs and checksums in folder names, which are older, leave out at their defaults
LATER_DATA = "args", "partition_args", "most"
LATER_TRAIN = "steps", "milestones", "final", "warmup", "local_schedule", "optimizer"


def check_used(experiments: Sequence[Experiment]) -> None:
    """Refuse a setting that was changed and that none of these runs uses.

    `Experiment` does not check this itself, so that records with such a setting remain readable.

    >>> check_used([Experiment(data={"alpha": 0.9})])
    Traceback (most recent call last):
    fedshift.experiment.toml.SettingsError: data.alpha = 0.9: has no effect without data.partition = 'dirichlet'
    """
    given = [dotted(experiment.model_dump()) for experiment in experiments]
    default = dotted(Experiment().model_dump())
    for key, (choice, values) in USED_BY.items():
        if key == "algorithm.mu" and any(experiment.algorithm.name not in ALGORITHMS for experiment in experiments):
            continue  # an argument of a user's function
        changed = [settings[key] for settings in given if settings[key] != default[key]]
        if changed and not any(settings[choice] in values for settings in given):
            needed = " or ".join(map(repr, values))
            raise SettingsError(f"{key} = {changed[0]!r}: has no effect without {choice} = {needed}")
    algorithms = [experiment.algorithm for experiment in experiments]
    for settings in algorithms:
        for key, seen in (settings.model_extra or {}).items():
            if not any(item.name not in ALGORITHMS or key in arguments(item.name) for item in algorithms):
                names = [name for name in arguments(settings.name) if name not in ("mu", "control")]
                known = f"it takes {', '.join(names)}" if names else "it takes no such argument"
                raise SettingsError(
                    f"algorithm.{key} = {seen!r}: has no effect with algorithm.name = {settings.name!r}; {known}"
                )


def check_quantized(given: Collection[str], experiments: Sequence[Experiment]) -> None:
    """Refuse a given step, rate or keep (dotted name) that no run uses for quantization.

    Settings of a named uplink do not count as given: `--uplink lean --set uplink.bits=32` means exact uploads.

    >>> cast = Experiment(uplink={"bits": 16, "rate": 0.6})
    >>> check_quantized(["uplink.bits", "uplink.rate"], [cast])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedshift.experiment.toml.SettingsError: uplink.rate = 0.6: has no effect with uplink.bits = 16; ...
    """
    for key in given:
        table, _, name = key.rpartition(".")
        if name not in SIZES or not f"{table}.".startswith("uplink."):
            continue
        codings = [_coding(experiment.uplink, table) for experiment in experiments]
        with_value = [coding for coding in codings if coding and getattr(coding, name) is not None]
        if with_value and not any(map(quantizes, with_value)):
            seen, bits = getattr(with_value[0], name), with_value[0].bits
            raise SettingsError(f"{key} = {seen}: has no effect with {table}.bits = {bits!r}; leave out one of them")


def _coding(uplink: UplinkSettings, table: str) -> UplinkSettings | LinkSettings | None:
    """Coding in a table; None for a group that does not exist."""
    return uplink if table == "uplink" else uplink.group.get(table.removeprefix("uplink.group."))


def _texts(raw: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Name and value of every text in the settings, including keys."""
    if isinstance(raw, str):
        yield where, raw
    elif isinstance(raw, Mapping):
        for key, value in raw.items():
            name = f"{where}.{key}" if where else str(key)
            yield name.replace("\0", "?"), str(key)
            yield from _texts(value, name)
    elif isinstance(raw, (list, tuple)):
        for value in raw:
            yield from _texts(value, where)


def explain(error: ValidationError) -> str:
    """One sentence on the first error."""
    errors = error.errors()
    first = errors[0]
    if "bandwidth" in first["loc"]:  # of the alternatives, the one that matched furthest
        first = max((item for item in errors if "bandwidth" in item["loc"]), key=lambda item: len(item["loc"]))
    unions = {
        "int",
        "str",
        "float",
        "tuple",
        "dict",
        "literal",
        "constrained",
        "function-before",
    }  # alternatives
    parts = [str(part) for part in first["loc"] if not any(str(part).startswith(f"{kind}[") for kind in unions)]
    parts = [part for part in parts if part not in {*unions, "[key]"} and not part.startswith("constrained-")]
    where, seen = ".".join(parts), first["input"]
    if first["type"] == "extra_forbidden":
        return _unknown(parts)
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        if message.startswith("must"):  # about one value
            return f"{where} = {seen!r}: {message}"
        return f"{where}.{message}" if where else message
    if parts == ["shift", "share"]:
        return f"{where} = {seen!r}: must be a number from 0 to 1, or 'uploads'"
    if parts[-1:] == ["per"] and parts != ["shift", "per"]:
        return f"{where} = {seen!r}: must be 'tensor', 'channel', or the number of values per block"
    if parts[-1:] == ["bits"] or parts[:2] == ["uplink", "bits"]:
        return f"{where} = {seen!r}: bits must be {BITS}, or '32+4', or {{bits = fraction}}, or one value per client"
    if parts == ["train", "goal"] or (parts[:2] == ["train", "metrics"] and len(parts) == 3):
        likely = "min" if str(seen).lower().startswith(("min", "low", "less", "small")) else "max"
        return f"{where} = {seen!r}: must be 'min' (lower is better) or 'max' (higher is better), perhaps {likely!r}"
    if parts == ["train", "optimizer"] and first["type"] == "model_type":
        return f"{where} = {seen!r}: must be one of {', '.join(OPTIMIZERS)}, module:function, or a table with a name"
    if parts == ["train", "metrics"]:
        return f"train.metrics = {seen!r}: must be a list of metrics, or a table {{metric = 'min' or 'max'}}"
    if parts == ["downlink"]:
        return f"downlink = {seen!r}: must be a table, or one of {', '.join(DOWNLINKS)}"
    if parts == ["uplink"]:
        return f"uplink = {seen!r}: must be a table, or one of {', '.join(UPLINKS)}"
    if parts[-1:] in (["codec"], ["policy"]) and first["type"] == "model_type":
        return f"{where} = {seen!r}: must be a name, or a table with a name"
    if parts[-2:] in (["codec", "name"], ["policy", "name"]) and first["type"] == "missing":
        return f"{where}: is missing"
    if first["type"] in ("model_type", "dict_type"):
        return f"{where} = {seen!r}: must be a table"
    message = first["msg"].replace("Input should be", "must be").replace("Field required", "is missing")
    return f"{where} = {seen!r}: {message}"


def _unknown(parts: Sequence[str]) -> str:
    """Message on an unknown setting, with a similar known one."""
    table: Any = Experiment
    for part in parts[:-1]:
        table = (
            table.model_fields[part].annotation if part in _fields(table) else LinkSettings
        )  # in a group of any name
    inside = [name for name, known in Experiment.model_fields.items() if parts[-1] in _fields(known.annotation)]
    hint = f"did you mean '{inside[0]}.{parts[-1]}'?" if inside else suggest(parts[-1], _fields(table))
    return f"unknown setting '{'.'.join(parts)}'; {hint}"


def _fields(table: Any) -> list[str]:
    return list(table.model_fields) if isinstance(table, type) and issubclass(table, BaseModel) else []


def run_number(experiment: Experiment) -> int:
    """Number of a run in its frames: a hash of the settings that server and clients share.

    Settings of engine, record and evaluation, the number of rounds unless the learning rate depends on it, and names
    of a user's objects are left out.
    """
    settings = experiment.model_dump(mode="json", exclude={"name", "model", "engine", "record", "evaluate"})
    settings["data"].pop("name")
    train = settings["train"]
    for key in ("rounds", "loss", "metric", "goal", "metrics"):
        if key != "rounds" or train["schedule"] != "cosine":
            train.pop(key, None)
    for name, later, usual in (("data", LATER_DATA, DataSettings()), ("train", LATER_TRAIN, TrainSettings())):
        default = usual.model_dump(mode="json")
        settings[name] = {key: x for key, x in settings[name].items() if key not in later or x != default[key]}
    if experiment.evaluate.held_out:
        settings["held_out"] = experiment.evaluate.held_out
    content = json.dumps(settings, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")
