"""One table of cases: the same bytes on every CPU engine; and engines that fail."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift.codecs import Codec
from fedshift.engines import Batched, Engine, Sequential, TrainingError
from fedshift.experiment.build import build
from fedshift.rounds.federation import Federation, Group
from fedshift.rounds.uplink import Uplink
from tests.federations import Normed, federation, points, processes, same, settings, train
from tests.own_codecs import Ends

CENTRED: dict[str, Any] = {"on": True, "per": "filter", "tensors": ["*weight"]}  # filters have only 6 to 8 inputs
CASES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedpaq": {"uplink": {"bits": "32+4"}, "shift": {"on": True, "per": "layer"}},
    "centred": {"shift": CENTRED},
    "centred by half": {"uplink": {"bits": "32+4"}, "shift": CENTRED | {"share": "uploads", "warmup": 2}},
    "centred scaffold": {"algorithm": {"name": "scaffold"}, "uplink": {"bits": "32+4"}, "shift": CENTRED},
    "centred feedback": {"uplink": {"bits": 4, "feedback": True}, "shift": CENTRED},
    "fedprox": {"algorithm": {"name": "fedprox", "mu": 0.1}},
    "scaffold": {"algorithm": {"name": "scaffold"}, "uplink": {"bits": 8}},
    "scaffold sent": {"algorithm": {"name": "scaffold", "control": "sent"}, "uplink": {"bits": "32+4"}},
    "feedback": {"uplink": {"bits": "4+2", "feedback": True}},
    "updates": {"uplink": {"bits": 3, "send": "updates", "feedback": True, "quantizer": "stochastic"}},
    "examples": {"data": {"partition": "dirichlet", "least": 2}, "algorithm": {"weights": "examples"}},
    "clip and decay": {"train": {"clip": 0.5, "weight_decay": 0.01, "schedule": "decayed", "decay": 0.9}},
    "adam": {"train": {"optimizer": "adam", "momentum": 0.0, "lr": 0.01, "clip": 0.5, "weight_decay": 0.01}},
    "adamw": {
        "algorithm": {"name": "fedprox", "mu": 0.1},
        "train": {"optimizer": {"name": "adamw", "betas": [0.8, 0.99], "eps": 1e-4}, "lr": 0.01, "weight_decay": 0.1},
        "uplink": {"bits": "32+8", "send": "updates", "feedback": True},
    },
    "steps": {
        "data": {"partition": "dirichlet", "least": 5},
        "algorithm": {"name": "scaffold"},
        "train": {"steps": 7, "schedule": "cosine", "final": 0.1, "warmup": 2, "local_schedule": "linear"},
    },
    "lost clients": {"train": {"dropout": 0.4}},
    "qsgd": {"uplink": {"codec": {"name": "qsgd", "s": 4, "whole": True}, "send": "updates"}},
    "fedzip": {"uplink": {"codec": {"name": "fedzip", "keep": 0.2}, "send": "updates", "feedback": True}},
    "common step": {"uplink": {"codec": "common-step", "send": "updates", "feedback": True, "biases": True}},
    "dadaquant": {
        "data": {"partition": "dirichlet", "least": 2},
        "algorithm": {"weights": "examples"},
        "uplink": {"policy": {"name": "dadaquant", "phi": 2}, "bits": "32+8"},
    },
    "adaquantfl": {"uplink": {"policy": "adaquantfl"}},
    "budget": {"uplink": {"policy": {"name": "deadline", "deadline": 2.0, "budget": 700.0}, "bandwidth": 1e3}},
    "half topk": {"uplink": {"codec": {"name": "topk", "keep": 0.1}, "bits": "32+8", "send": "updates"}},
}
# rounding of weights is amplified: by a small sigma, or by levels that are far apart
AMPLIFIED: dict[str, dict[str, Any]] = {
    "eden": {"uplink": {"codec": {"name": "eden", "bits": 2}, "send": "updates", "biases": True}},
    "fedwsq": {"algorithm": {"name": "fedwsq"}, "uplink": {"codec": "fixed"}},
}


@pytest.mark.parametrize("name", CASES | AMPLIFIED)
def test_bytes_do_not_depend_on_engine_or_workers(name: str) -> None:
    case = (CASES | AMPLIFIED)[name]
    model = None if "partition" in case.get("data", {}) else Normed()  # batch norm does not take a batch of one
    fed = federation(model, **case)
    reference, expected, remembered = train(fed)
    for workers in (1, 2, 3):
        engine = processes(fed.task, workers)
        state, outcomes, memory = train(fed, engine=engine)
        engine.close()
        assert same(state.out.params, reference.out.params)
        assert same(state.out.control, reference.out.control)
        assert memory.held.keys() == remembered.held.keys()
        assert all(same(memory.held[k], remembered.held[k]) for k in memory.held)
        plain = [outcome._replace(seconds={}, uplink_seconds=None) for outcome in outcomes]
        assert plain == [outcome._replace(seconds={}, uplink_seconds=None) for outcome in expected]


def test_centred_weights_have_filters_of_mean_zero_in_the_record() -> None:
    state, outcomes, _ = train(federation(Normed(), **CASES["centred scaffold"]))
    for name in ("first.weight", "last.weight", "unused.weight"):
        assert state.out.params[name].mean(1).abs().max() < 1e-7
        for outcome in outcomes:
            layer = outcome.layers[name]
            assert layer.filters_before > 1e-4 or name == "unused.weight"  # it is not trained
            assert max(layer.filters_after, abs(layer.mean_after)) < 1e-7
    assert state.out.params["norm.weight"].mean() > 0.5


def test_all_engines_give_a_large_test_set_the_same_score() -> None:
    fed = federation(dataset=points(tests=4300))
    params = fed.start().out.params
    engine = processes(fed.task, 2)
    assert engine.evaluate(params) == Sequential(fed.task).evaluate(params)
    engine.close()


def failing(problem: Exception) -> Federation:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(targets) < 60:  # only in training
            raise problem
        return outputs.mean()

    return build(settings(), data=points(), loss=loss)


def test_a_workers_error_reaches_the_caller_with_its_trace() -> None:
    fed = failing(ValueError("not today"))
    engine = processes(fed.task, 2)
    with pytest.raises(TrainingError, match="not today") as caught:
        train(fed, rounds=1, engine=engine)
    assert "in a worker process" in str(caught.value.__cause__)
    engine.close()


def test_the_death_of_a_worker_is_reported() -> None:
    class Dies(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            import os
            import signal

            if self.training:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(x)

    fed: Federation = federation(Dies(6, 4))
    engine: Engine = processes(fed.task, 1)
    with pytest.raises(TrainingError, match="engine processes: a worker process ended unexpectedly"):
        train(fed, rounds=1, engine=engine)
    engine.close()


class Awkward(Exception):  # noqa: N818
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize("problem", [FileNotFoundError("weights.txt"), EOFError("over"), Awkward(1, 2)])
def test_exceptions_of_user_code_are_reported_with_round_client_and_line(problem: Exception) -> None:
    for engine in (None, processes(failing(problem).task, 2)):
        with pytest.raises(
            TrainingError, match=rf"round 1, client \d+: {type(problem).__name__}: .*test_engines.py:\d+"
        ):
            train(failing(problem), rounds=1, engine=engine)


def test_torchs_generator_is_restored_after_an_error() -> None:
    fed = failing(KeyError("x"))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(TrainingError):
        train(fed, rounds=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_engine_that_was_stopped_in_a_round_is_closed() -> None:
    engine = processes(failing(KeyError("x")).task, 2)
    with pytest.raises(TrainingError):
        train(failing(KeyError("x")), rounds=1, engine=engine)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        train(federation(), rounds=1, engine=engine)


@dataclass(frozen=True)
class Faulty(Ends, number=215):
    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        raise RuntimeError("out of levels")


def test_a_codec_that_cannot_be_sent_to_worker_processes_ends_the_run_in_a_sentence() -> None:
    class Local(Ends):
        number = 200  # of `Ends`

    fed = federation()
    fed = replace(fed, groups=[Group("local", Uplink(Codec(Local())))], group=torch.zeros_like(fed.group))
    engine = processes(fed.task, 2)
    with pytest.raises(TrainingError, match=r"cannot be sent to worker processes \(.*Local.*\); define its class at"):
        train(fed, engine=engine)
    engine.close()


@pytest.mark.parametrize("engine", [Sequential, Batched])
def test_an_exception_in_a_users_codec_stops_the_run_in_a_sentence(engine: type[Sequential | Batched]) -> None:
    fed = federation()
    fed = replace(fed, groups=[Group("faulty", Uplink(Codec(Faulty())))], group=torch.zeros_like(fed.group))
    with pytest.raises(TrainingError, match=r"round 1.*RuntimeError: out of levels"):
        train(fed, engine=engine(fed.task))
