"""Models whose tensors of several axes are not all weights train as well with the shift as without it."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from fedshift import Experiment, Run, fedavg, run, shifted
from fedshift.algorithms import Chain, Shift
from fedshift.rounds.federation import Federation
from fedshift.runs.record import about
from tests.federations import Normed, federation, points

PER = ("layer", "filter")
TOLERANCE = 0.03  # of accuracy, by which the shift may be worse over the last three rounds; seeds differ by more


class Scaled(nn.Sequential):
    """An output scale of shape (1, 1)."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.scale = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return logits * self.scale


class Token(nn.Module):
    """A class token and the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 1, 16))
        self.embed, self.mix, self.head = nn.Linear(8, 16), nn.Linear(144, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embed(x.reshape(-1, 8, 8))
        rows = torch.cat([self.token.expand(len(rows), -1, -1), rows], 1)
        logits: Tensor = self.head(F.relu(self.mix(rows.flatten(1))))
        return logits


class Transformer(nn.Module):
    """Pre-norm, on the rows of an image, with a class token and a positional table."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.ones(1, 1, 16)), nn.Parameter(0.1 * torch.randn(1, 9, 16))
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 10)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embed(x.reshape(-1, 8, 8))
        rows = torch.cat([self.token.expand(len(rows), -1, -1), rows], 1) + self.positions
        logits: Tensor = self.head(self.norm(self.block(rows))[:, 0])
        return logits


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(128, 10)
        self.norm1, self.conv1 = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x.reshape(-1, 1, 8, 8)))
        x = x + self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        logits: Tensor = self.head(F.max_pool2d(x, 2).flatten(1))
        return logits


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 24, batch_first=True), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rnn(x.reshape(-1, 8, 8))[0][:, -1])
        return logits


def planes() -> nn.Module:
    """The scale of its normalisation has two axes."""
    norm = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (8, 8)), nn.LayerNorm([8, 8]), nn.Flatten())
    return nn.Sequential(norm, nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def normed() -> nn.Module:
    """Every weight is parametrised by a magnitude and a direction."""
    return nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(64, 32)), nn.ReLU(), weight_norm(nn.Linear(32, 10)))


MODELS = {  # rounds, batch, lr, momentum
    planes: (8, 20, 0.1, 0.5),
    normed: (8, 20, 0.1, 0.5),
    Scaled: (8, 20, 0.1, 0.5),
    Token: (8, 20, 0.1, 0.9),
    Transformer: (7, 10, 0.05, 0.9),
    Residual: (5, 20, 0.05, 0.5),
    Recurrent: (12, 10, 0.3, 0.9),
}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_model_trains_as_well_with_the_shift_as_without(make: type[nn.Module]) -> None:
    rounds, batch, lr, momentum = MODELS[make]
    scores, models = [], []
    for shift in ({"on": False}, {"per": "layer"}, {"per": "filter"}):
        torch.manual_seed(0)
        training = run(
            Experiment(
                data={"clients": 20, "partition": "iid"},
                train={
                    "rounds": rounds,
                    "batch": batch,
                    "lr": lr,
                    "momentum": momentum,
                    "cohort": 10,
                    "selection": "stratified",
                },
                uplink={"bits": "32+4"},
                shift=shift,
                engine={"name": "sequential"},
            ),
            model=make(),
        )
        last = [outcome.accuracy or 0.0 for outcome in training][-3:]
        scores.append(sum(last) / 3)
        models.append(training.params)
    assert scores[0] > 0.5
    assert min(scores[1:]) > scores[0] - TOLERANCE
    for name in {"token", "scale"} & models[0].keys():  # 1 at the start, and not shifted since
        assert [float(model[name].mean()) for model in models[1:]] == pytest.approx(
            [float(models[0][name].mean())] * 2, abs=0.2
        )


def test_filter_centring_learns_digits_if_every_upload_has_4_bits() -> None:
    training = run(
        Experiment(
            data={"clients": 20},
            train={"rounds": 30, "selection": "stratified"},
            uplink={"bits": "4+4"},
            shift={"per": "filter", "share": 1.0},
            engine={"name": "sequential"},
        )
    )
    last = [outcome.accuracy or 0.0 for outcome in training][-5:]
    assert sum(last) / 5 > 0.8


def test_every_shift_gets_the_names_of_the_models_weights() -> None:
    """Statistics of BatchNorm, a frozen matrix and biases are not weights."""
    expected = ["first.weight", "last.weight", "unused.weight"]
    built = federation(Normed(), shift={"on": True, "per": "layer"})
    plain = federation(Normed())
    given = Federation(
        **{
            name: getattr(plain, name)
            for name in Federation.__dataclass_fields__
            if name not in ("layers", "filters", "algorithm")
        },
        algorithm=shifted(fedavg()),
    )
    for fed in (built, given):
        assert isinstance(fed.algorithm.server, Chain)
        assert fed.algorithm.server.rules[-1] == Shift(tensors=tuple(expected))
        assert fed.layers == fed.shifted == expected
    assert (plain.layers, plain.shifted) == (expected, [])  # the record has the same columns


def test_patterns_choose_among_trained_tensors_only() -> None:
    patterns = ["norm.*", "frozen", "last.*"]
    layer, filters = (federation(Normed(), shift={"on": True, "per": per, "tensors": patterns}) for per in PER)
    assert layer.shifted == ["norm.weight", "norm.bias", "last.weight", "last.bias"]
    assert filters.shifted == ["last.weight"]  # the others have no filters
    assert filters.layers == ["first.weight", "last.weight", "unused.weight"]


def test_the_record_names_the_shifted_tensors(tmp_path: Path) -> None:
    shifts = {"layer": {"per": "layer"}, "filter": {"per": "filter"}, "off": {"on": False}}
    model = {"args": {"hidden": 16}}  # which makes 16 inputs of the second layer
    for how, names in {"layer": ["fc1.weight", "fc2.weight"], "filter": ["fc1.weight"], "off": []}.items():
        run(Experiment(model=model, shift=shifts[how], engine={"name": "sequential"}), tmp_path / how).close()
        assert about(tmp_path / how)["shifted"] == names
        assert json.loads((tmp_path / how / "about.json").read_text())["shifted"] == names


def test_a_model_without_weights_of_layers_trains_and_the_user_is_informed() -> None:
    sentences: list[str] = []
    experiment = Experiment(
        data={"clients": 12, "partition": "iid"}, train={"rounds": 1}, engine={"name": "sequential"}
    )
    model = nn.Sequential(weight_norm(nn.Linear(6, 4)))
    training = Run(experiment, model=model, data=points(), tell=sentences.append)
    assert next(training).arrived == 10
    assert sentences == [
        "shift.on = true: nothing is shifted: no trained tensor of Sequential is the weight of a known layer"
    ]


def test_a_model_of_few_inputs_trains_and_a_note_explains_how_to_shift_it() -> None:
    sentences: list[str] = []
    for shift in ({}, {"per": "layer"}, {"tensors": ["fc1.weight"]}):
        experiment = Experiment(data={"clients": 12}, model={"args": {"hidden": 8}}, shift=shift)
        Run(experiment, data=points(), tell=sentences.append).close()
    assert sentences == [
        "shift.on = true: nothing is shifted: no weight of MLP has filters of 32 inputs or more; name weights in "
        "shift.tensors, or choose shift.per = 'layer'"
    ]
