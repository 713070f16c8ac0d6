"""Settings: valid ones, and error messages for all others."""

import re
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift import (
    BitPack,
    Codec,
    Experiment,
    KMeans,
    PerBlock,
    PerChannel,
    RandomStep,
    Range,
    Run,
    Step,
    Stochastic,
    Ternary,
    Uniform,
    Uplink,
    Zstd,
    run,
)
from fedshift.algorithms import Chain, Shift
from fedshift.codecs.exact import EXACT
from fedshift.codecs.normal import eden
from fedshift.codecs.sign import sign
from fedshift.codecs.sparse import fedzip
from fedshift.codecs.ternary import topk
from fedshift.core.files import RunError
from fedshift.data.datasets import dataset
from fedshift.experiment.build import build, complete_algorithm
from fedshift.experiment.grid import expand
from fedshift.experiment.links import interleave, links
from fedshift.experiment.overrides import settings as given
from fedshift.experiment.presets import PRESETS
from fedshift.experiment.settings import CodecSettings, check_used, run_number, uplink_name
from fedshift.experiment.toml import SettingsError, assign, dotted, merge, put, read
from fedshift.rounds.engine import TrainingError
from fedshift.rounds.loop import draw
from fedshift.rounds.uplink import named
from fedshift.rounds.uplinks import UPLINKS
from fedshift.runs.summary import uplink_label
from tests.federations import points
from tests.runs import digits, fedshift, go, record, small, undisturbed


def groups(**uplink: Any) -> tuple[dict[str, Uplink], list[int]]:
    found, group = links(Experiment(data={"clients": 8}, train={"cohort": 2}, uplink=uplink))
    return {g.name: g.uplink for g in found}, group.tolist()


def test_settings_are_written_to_a_file_and_read_again(tmp_path: Path) -> None:
    experiment = Experiment(
        seed=3,
        uplink={"bits": {32: 0.5, 8: 0.25, 4: 0.25}, "bandwidth": {4: 1e5}},
        shift={"tensors": ["fc*"]},
        data={"clients": 8},
        train={"cohort": 2},
    )
    (tmp_path / "a.toml").write_text(experiment.toml())
    assert Experiment(**read(tmp_path / "a.toml")) == experiment


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name: str) -> None:
    experiments = expand(PRESETS[name])
    assert len(experiments) == (15 if name == "demo" else 1)


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("fashion", (1, 28, 28), 454_922),
        ("synthetic", (60,), 610),
        ("shakespeare", (80,), 133_520),
        ("transformer", (80,), 175_120),
        ("resnet", (3, 32, 32), 78_042),
    ],
)
def test_presets_of_tasks_are_plain_training_of_a_model_that_fits(
    name: str, shape: tuple[int, ...], parameters: int
) -> None:
    """With generated examples instead of the data set."""
    text = name in ("shakespeare", "transformer")
    n, classes = (1200, 80) if text else (4000, 10)
    x, y = torch.zeros(n, *shape, dtype=torch.int64 if text else torch.float32), torch.arange(n) % classes
    y = y[:, None].expand(n, 80).contiguous() if text else y  # a target per position
    data = dataset(x, y, x[:100], y[:100], owner=torch.arange(n) // 100 if text else None)
    (experiment,) = expand(PRESETS[name])
    fed = build(experiment, data=None if name == "synthetic" else data)
    assert sum(x.numel() for x in fed.task.params.values()) == parameters
    assert not fed.shifted
    assert [group.uplink.lossy for group in fed.groups] == [False]
    assert fed.partition.clients == {"synthetic": 30, "shakespeare": 12, "transformer": 12}.get(name, 100)


def test_the_synthetic_preset_has_the_values_of_fedprox() -> None:
    (synthetic,) = expand(PRESETS["synthetic"])
    train, algorithm = synthetic.train, synthetic.algorithm
    assert (train.rounds, train.cohort, train.epochs, train.batch, train.lr) == (200, 10, 20, 10, 0.01)
    assert (algorithm.name, algorithm.mu, algorithm.weights) == ("fedprox", 1.0, "examples")


def test_the_paper_preset_has_the_papers_values() -> None:
    (paper,) = expand(PRESETS["paper"])
    train = paper.train
    assert (paper.shift.on, paper.shift.per, paper.shift.share, paper.shift.warmup) == (True, "layer", "uploads", 0)
    assert (paper.data.clients, train.cohort, train.rounds, train.epochs, train.batch) == (100, 10, 800, 10, 50)
    assert (train.lr, train.momentum, paper.algorithm.mu, paper.shift.max_share) == (0.005, 0.9, 0.01, 1.0)
    assert (paper.algorithm.control, paper.algorithm.weights, train.selection) == ("sent", "equal", "stratified")
    assert links(paper)[1].tolist() == [0, 1] * 50  # even ids superior


SHIFTS: list[tuple[str, tuple[str, float | str, float]]] = [  # TOML, then per, share and max_share
    ("", ("filter", 1.0, 0.5)),
    ("on = true", ("filter", 1.0, 0.5)),
    ("share = 0.25", ("filter", 0.25, 0.5)),
    ("share = 1", ("filter", 1.0, 0.5)),
    ('share = "uploads"', ("filter", "uploads", 0.5)),
    ('tensors = ["fc*"]', ("filter", 1.0, 0.5)),
    ('per = "layer"', ("layer", "uploads", 0.5)),
    ('per = "layer"\nshare = 0.75', ("layer", 0.75, 0.5)),
    ("max_share = 1.0", ("layer", "uploads", 1.0)),
    ("warmup = 3", ("layer", "uploads", 0.5)),
    ("max_share = 0.5\nwarmup = 0\nshare = 0.75", ("layer", 0.75, 0.5)),
    ('per = "filter"\nwarmup = 3', ("filter", 1.0, 0.5)),
    ('per = "filter"\nmax_share = 0.3', ("filter", 1.0, 0.3)),
]


@pytest.mark.parametrize(("text", "expected"), SHIFTS)
def test_a_shift_is_per_filter_unless_it_is_per_layer_or_has_settings_of_the_papers_rule(
    text: str, expected: tuple[str, float | str, float]
) -> None:
    experiment = Experiment(shift=tomllib.loads(text))
    for copy in (experiment, Experiment(**tomllib.loads(experiment.toml())), experiment.changed(seed=3)):
        assert (copy.shift.per, copy.shift.share, copy.shift.max_share) == expected
    rule = complete_algorithm(experiment).server
    assert isinstance(rule, Chain)
    assert isinstance(rule.rules[-1], Shift)
    assert (rule.rules[-1].per, rule.rules[-1].share, rule.rules[-1].max_share) == expected


def test_a_change_of_per_recomputes_a_share_that_was_not_given() -> None:
    layer = Experiment(shift={"per": "layer"})
    assert layer.changed(**{"shift.per": "filter"}).shift == Experiment().shift
    assert Experiment().changed(**{"shift.per": "layer"}).shift == layer.shift
    assert Experiment(shift={"share": 0.25}).changed(**{"shift.per": "layer"}).shift.share == 0.25
    (paper,) = expand(merge(PRESETS["paper"], {"shift": {"per": "filter"}}))
    assert (paper.shift.per, paper.shift.share) == ("filter", 1.0)


PUBLISHED = sorted((Path(__file__).parents[1] / "results").glob("*/settings.toml"))


def test_records_of_earlier_versions_are_read_as_the_papers_rule_and_keep_all_their_settings() -> None:
    old = [raw for raw in map(read, PUBLISHED) if "per" not in raw["shift"]]
    assert len(old) > 20
    for raw in old:
        experiment = Experiment(**raw)
        assert experiment.shift.per == "layer"
        assert experiment.shift.share == raw["shift"].get("share", "uploads")
        now = dotted(tomllib.loads(experiment.toml()))
        assert {key: now[key] for key in dotted(raw)} == dotted(raw)
        assert Experiment(**tomllib.loads(experiment.toml())) == experiment


def test_links_for_all_in_parts_by_fraction_and_per_client() -> None:
    four = Uplink(Codec(KMeans(4, random=True)))
    assert groups(bits=4) == ({"4 bit": four}, [0] * 8)
    assert groups(bits="32+4") == ({"32 bit": Uplink(EXACT), "4 bit": four}, [0, 1] * 4)
    assert groups(bits="4+4") == ({"4 bit (1)": four, "4 bit (2)": four}, [0, 1] * 4)
    assert groups(bits={32: 0.5, 4: 0.5}) == groups(bits="32+4")
    assert groups(bits=[4, 4, 32, 4, 4, 32, 4, 4])[1] == [1, 1, 0, 1, 1, 0, 1, 1]


def test_named_groups_have_settings_of_their_own() -> None:
    slow = {"share": 0.25, "bits": 4, "quantizer": "uniform", "coder": "zstd", "feedback": True, "send": "updates"}
    found, group = groups(bits=8, group={"slow": slow, "vip": {"clients": [0, 5], "bits": 32}})
    assert found["slow"] == Uplink(Codec(Uniform(4), Zstd()), update=True, feedback=True)
    assert found["vip"] == Uplink(EXACT)
    assert found["others"] == Uplink(Codec(KMeans(8, random=True)))
    assert [group.count(g) for g in range(3)] == [2, 2, 4]
    assert (group[0], group[5]) == (1, 1)


def test_codecs_by_name() -> None:
    assert groups(bits=2, quantizer="stochastic", per="channel")[0]["2 bit"].codec == Codec(
        Stochastic(2), Range(), PerChannel()
    )
    assert groups(bits=5, per=64, quantizer="kmeans")[0]["5 bit"].codec == Codec(KMeans(5), groups=PerBlock(64))
    assert groups(bits=16)[0]["16 bit"].codec.bits == 16
    assert groups(rate=0.5)[0]["8 bit"].codec == Codec(RandomStep(rate=0.5), Range())
    assert groups(rate=0.5, send="updates", feedback=True)[0]["8 bit"].codec == Codec(Step(rate=0.5), Range())
    assert groups(step=4.0, bits=6)[0]["6 bit"].codec == Codec(Step(6, step=4.0), Range())
    assert groups(keep=0.01, coder="zstd")[0]["2 bit"].codec == Codec(Ternary(keep=0.01), Zstd())
    mixed = groups(bits="32+8", quantizer="step")[0]
    assert (mixed["32 bit"].codec, mixed["8 bit"].codec) == (EXACT, Codec(Step(step=2.0), Range()))


def test_a_later_codec_replaces_an_earlier_quantizer_and_coder() -> None:
    later = given(None, "smoke", ["uplink=lean", "uplink.codec={name = 'qsgd', s = 3}", "uplink.codec=sign"])
    (found,) = expand(later)
    assert found.uplink.codec == CodecSettings(name="sign")
    assert found.uplink.send == "updates"
    (back,) = expand(merge({"uplink": {"codec": "sign"}}, {"uplink": {"quantizer": "step", "bits": 8}}))
    assert back.uplink.codec is None
    assert back.uplink.quantizer == "step"
    swept = {"uplink": {"coder": "zstd"}, "sweep": {"uplink.codec": ["sign", {"name": "topk", "keep": 0.1}]}}
    assert [run.uplink.codec and run.uplink.codec.name for run in expand(swept)] == ["sign", "topk"]


@pytest.mark.parametrize("setting", ["uplink.per=channel", "uplink.coder=zstd"])
def test_groups_and_coder_do_not_replace_an_earlier_codec(setting: str, tmp_path: Path) -> None:
    name, _, value = setting.rpartition("=")
    file = tmp_path / "mine.toml"
    file.write_text('[uplink]\ncodec = "sign"\n')
    with pytest.raises(SettingsError, match=f"{name}: has no effect with codec = 'sign', which replaces it"):
        given(file, None, [setting])
    swept = {"uplink": {"codec": "sign"}, "sweep": {name: [value]}}
    with pytest.raises(SettingsError, match=f"{name}: has no effect with codec = 'sign', which replaces it"):
        expand(swept)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("uplink.codec=sign", "uplink.rate=0.5"),
        ("uplink.step=2", "uplink.codec=sign"),
        ("train.steps=5", "train.epochs=2"),
    ],
)
def test_a_setting_that_a_later_one_of_the_same_command_replaces_is_refused(first: str, second: str) -> None:
    name = first.partition("=")[0]
    with pytest.raises(SettingsError, match=f"--set {name}: has no effect, because a later --set replaces it"):
        given(None, "smoke", [first, second])


def test_a_codec_in_the_settings_is_that_of_quantized_clients() -> None:
    assert groups(codec="sign")[0] == {"sign": Uplink(sign())}
    found, group = groups(bits="32+8", codec={"name": "fedzip", "keep": 0.2}, send="updates", feedback=True)
    assert found == {
        "32 bit": Uplink(EXACT, update=True, feedback=True),
        "fedzip": Uplink(fedzip(keep=0.2), update=True, feedback=True),
    }
    assert group == [0, 1] * 4
    assert groups(codec="eden", biases=True)[0]["eden"].codec == replace(eden(), min_axes=1)
    assert [*groups(bits="8+4", codec="sign")[0]] == ["sign, 8 bit", "sign, 4 bit"]
    assert groups(bits=3, codec="sign")[0]["sign"].codec == sign()  # the number is not that of the codec
    found, group = groups(bits=32, group={"phones": {"share": 0.5, "codec": {"name": "topk", "keep": 0.1}}})
    assert found == {"phones": Uplink(topk(keep=0.1)), "others": Uplink(EXACT)}
    assert sorted(group) == [0] * 4 + [1] * 4


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module with functions for `codec`, in the current folder."""
    (tmp_path / "settings_codecs.py").write_text(
        "from fedshift import Codec, Uniform\n"
        "def good(bits=3): return Codec(Uniform(bits))\n"
        "def other(): return Uniform(3)\n"
        "def failing(): raise KeyError('no table')\n"
        "from pydantic import validate_call\n"
        "@validate_call\n"
        "def checked(bits: int = 3): return Codec(Uniform(bits))\n"
        "class Unnumbered(Uniform): pass\n"
        "def unnumbered(): return Codec(Unnumbered(3))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("codec", "why"),
    [
        (
            "no_such_module:good",
            "uplink.codec = 'no_such_module:good': no module 'no_such_module'",
        ),
        ("settings_codecs:god", "uplink.codec = 'settings_codecs:god': no function 'god' in settings_codecs; did you"),
        ("settings_codecs:other", "uplink.codec = 'settings_codecs:other': returns Uniform, but must return a Codec"),
        ("settings_codecs:failing", "uplink.codec = 'settings_codecs:failing': KeyError: 'no table'"),
        (
            {"name": "settings_codecs:good", "bit": 3},
            "with {'bit': 3}: TypeError: good() got an unexpected keyword argument 'bit'",
        ),
        (
            {"name": "settings_codecs:good", "bits": 9},
            "with {'bits': 9}: Uniform(bits=9): bits must be between 1 and 8",
        ),
        (
            {"name": "settings_codecs:checked", "bit": 3},
            "uplink.codec.bit = 3: settings_codecs:checked has no such argument; did you mean 'bits'?",
        ),
        ("settings_codecs:unnumbered", "uplink.codec: Unnumbered(bits=3) has no number in the wire format"),
    ],
)
def test_a_users_codec_that_cannot_be_made_is_refused_before_training(
    codec: str | dict[str, Any], why: str, own_module: Path
) -> None:
    with pytest.raises(SettingsError) as caught:
        run(Experiment(uplink={"codec": codec}), data=points())
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("codec", "sentence"),
    [
        ({"name": "qsgd", "s": 4.0}, "uplink.codec.s = 4.0: Input should be a valid integer"),
        ({"name": "qsgd", "whole": "no"}, "uplink.codec.whole = 'no': Input should be a valid boolean"),
        ({"name": "qsgd", "bucket": True}, "uplink.codec.bucket = True: Input should be a valid integer"),
        ({"name": "topk", "keep": True}, "uplink.codec.keep = True: Input should be a valid number"),
        ({"name": "sign", "object": "Codec(...)"}, "was passed to run(...) as an object; pass it again in Python"),
    ],
)
def test_arguments_of_a_codec_have_the_right_types(codec: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        Experiment(uplink={"codec": codec})
    assert Experiment(uplink={"codec": {"name": "topk", "keep": 1}}).uplink.codec_for(8).quantizer == Ternary(
        keep=1.0, common=True
    )


def test_a_codec_without_a_number_is_refused_before_training() -> None:
    @dataclass(frozen=True)
    class Unnumbered(Uniform):
        pass

    with pytest.raises(ValueError, match="has no number in the wire format"):
        run(small(), uplink=Codec(Unnumbered(4)))


@pytest.mark.parametrize(
    "uplink",
    [
        {"codec": "sign"},
        {"codec": {"name": "qsgd", "s": 4, "norm": "max"}, "bits": "32+8", "send": "updates"},
        {"codec": {"name": "settings_codecs:good", "bits": 2}, "biases": True},
        {"group": {"a": {"share": 0.5, "codec": "eden", "bits": 8}}},
    ],
)
def test_settings_with_a_codec_are_written_and_read_again(uplink: dict[str, Any], own_module: Path) -> None:
    experiment = Experiment(uplink=uplink)
    (own_module / "settings.toml").write_text(experiment.toml())
    again = Experiment(**read(own_module / "settings.toml"))
    assert again == experiment
    assert links(again)[0] == links(experiment)[0]


def test_a_run_with_a_codec_in_its_settings_is_resumed(own_module: Path) -> None:
    for i, codec in enumerate(({"name": "settings_codecs:good", "bits": 2}, {"name": "qsgd", "s": 4})):
        experiment = small({"train": {"rounds": 2}, "uplink": {"codec": codec}})
        expected = undisturbed(experiment, own_module / f"whole-{i}")
        with Run(experiment, own_module / f"stopped-{i}", data=digits()) as stopped:
            next(stopped)
        go(experiment, own_module / f"stopped-{i}")
        assert record(own_module / f"stopped-{i}") == expected


@pytest.mark.parametrize(("then", "now"), [("bits=3", "bits=2 + 2"), ("Uniform(bits))", "Uniform(bits), min_axes=1)")])
def test_a_run_is_not_resumed_with_another_codec(then: str, now: str, own_module: Path) -> None:
    experiment = small({"train": {"rounds": 2}, "uplink": {"codec": "settings_codecs:good"}})
    with Run(experiment, own_module / "run", data=digits()) as stopped:
        next(stopped)
    sys.modules.pop("settings_codecs")
    source = (own_module / "settings_codecs.py").read_text()
    (own_module / "settings_codecs.py").write_text(source.replace(then, now))
    with pytest.raises(RunError, match="run: the codecs are not those the run was started with"):
        go(experiment, own_module / "run")


def test_a_codec_alone_is_sent_as_the_settings_say() -> None:
    experiment = small({"uplink": {"bits": 4, "send": "updates", "feedback": True, "biases": True}})
    link = Run(experiment, data=digits(), uplink=Codec(Uniform(3))).fed.uplinks[0]
    assert link == Uplink(Codec(Uniform(3), min_axes=1), update=True, feedback=True)
    link = Run(experiment, data=digits(), uplink=Uplink(Codec(Uniform(3)))).fed.uplinks[0]
    assert link == Uplink(Codec(Uniform(3), min_axes=1))


def test_the_default_quantizer_rounds_at_random_unless_errors_are_fed_back() -> None:
    assert Experiment(uplink={"bits": 4}).uplink.quantizer == "kmeans-random"
    fed_back = Experiment(uplink={"bits": 4, "feedback": True})
    assert fed_back.uplink.quantizer == "kmeans"
    assert fed_back.changed(**{"uplink.feedback": False}).uplink.quantizer == "kmeans-random"
    named = Experiment(uplink={"bits": 4, "quantizer": "kmeans", "group": {"a": {"share": 0.5, "feedback": True}}})
    assert (named.uplink.quantizer, named.uplink.group["a"].quantizer) == ("kmeans", "kmeans")


def test_the_default_coder_is_the_range_coder_below_4_bits() -> None:
    for bits, coder in ((1, Range()), (3, Range()), (4, BitPack()), (8, BitPack()), (32, BitPack())):
        assert groups(bits=bits)[0][f"{bits} bit"].codec.coder == coder


def test_shares_are_spread_evenly() -> None:
    group = interleave([0.5, 0.3, 0.2], 100)
    for n in (10, 20, 50, 100):
        counts = torch.bincount(group[:n], minlength=3).tolist()
        assert all(abs(count - share * n) <= 1 for count, share in zip(counts, (0.5, 0.3, 0.2), strict=True))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"bits": 4}, "unknown setting 'bits'"),
    ({"trian": {}}, "unknown setting 'trian'; did you mean 'train'?"),
    ({"uplink": {"bit": 4}}, "unknown setting 'uplink.bit'; did you mean 'bits'?"),
    ({"uplink": {"group": {"a": {"bit": 4}}}}, "unknown setting 'uplink.group.a.bit'; did you mean 'bits'?"),
    ({"uplink": {"rate": 0.5, "quantizer": "uniform"}}, "rate = 0.5: has no effect without quantizer = 'step'"),
    ({"uplink": {"keep": 0.5, "quantizer": "step"}}, "keep = 0.5: has no effect without quantizer = 'ternary'"),
    ({"uplink": {"rate": 0.5, "step": 2.0}}, "step = 2.0 and rate = 0.5: only one of them can be given"),
    ({"uplink": {"rate": 0.0}}, "uplink.rate"),
    (
        {"uplink": {"quantizer": "ternary", "bits": 4}},
        "uplink.quantizer = 'ternary' with bits = 4: Ternary(bits=4): bits must be 2",
    ),
    ({"uplink": {"keep": 0.1, "bits": "32+4"}}, "uplink.quantizer = 'ternary' with bits = 4: Ternary(bits=4)"),
    (
        {"uplink": {"step": 1.0, "bits": 1}},
        "uplink.quantizer = 'step' with bits = 1: Step(bits=1): bits must be between 2 and 8",
    ),
    (
        {"uplink": {"rate": 3.0, "bits": 2}},
        "uplink.quantizer = 'step-random' with bits = 2: RandomStep(rate=3.0): rate must be between 0.001 and 1 bit",
    ),
    (
        {"uplink": {"group": {"a": {"share": 0.5, "keep": 0.1, "bits": 4}}}},
        "uplink.group.a.quantizer = 'ternary' with bits = 4: Ternary(bits=4): bits must be 2",
    ),
    (
        {"uplink": {"codec": "sing"}},
        "uplink.codec.name = 'sing': must be one of qsgd, sign, eden, fixed, fedzip, qsparse, topk, common-step, or",
    ),
    (
        {"uplink": {"codec": {"name": "qsgd", "t": 4}}},
        "uplink.codec.t = 4: qsgd has no such argument; known are s, norm",
    ),
    ({"uplink": {"codec": {"name": "qsgd", "s": 0}}}, "uplink.codec = 'qsgd' with {'s': 0}: QSGD(s=0): s, the levels"),
    ({"uplink": {"codec": {"s": 4}}}, "uplink.codec.name"),
    ({"uplink": {"codec": "sign", "quantizer": "uniform"}}, "uplink.quantizer: has no effect with codec = 'sign'"),
    ({"uplink": {"codec": "sign", "rate": 0.5}}, "uplink.rate: has no effect with codec = 'sign', which replaces it"),
    ({"uplink": {"codec": "sign", "bits": 32}}, "uplink.codec = 'sign': has no effect with bits = 32"),
    ({"uplink": {"codec": "sign", "bits": "32+16"}}, "uplink.codec = 'sign': has no effect with bits = '32+16'"),
    (
        {"uplink": {"group": {"a": {"share": 0.5, "codec": "sign", "per": "channel"}}}},
        "uplink.group.a.per: has no effect with codec = 'sign'",
    ),
    ({"downlink": {"codec": {"name": "eden", "bits": 9}}}, "downlink.codec = 'eden' with {'bits': 9}: Normal(bits=9)"),
    ({"uplink": {"bits": 0}}, "uplink.bits = 0: bits must be 1 to 8"),
    ({"uplink": {"bits": "32+9"}}, "uplink.bits = '32+9': 9 is not allowed; bits must be 1 to 8"),
    ({"uplink": {"bits": {32: 0.5, 4: 0.4}}}, "the fractions add up to 0.9; they must add up to 1"),
    ({"uplink": {"bits": [4, 4]}}, "uplink.bits: 2 values; must be one per client (data.clients = 100)"),
    ({"uplink": {"bandwidth": [1.0]}}, "uplink.bandwidth: 1 values; must be one per client (data.clients = 100)"),
    ({"uplink": {"group": {"a": {"bits": 4}}}}, "uplink.group.a: must have either a share of the clients or a list"),
    (
        {"uplink": {"bits": "32+4", "group": {"a": {"share": 0.5}}}},
        "uplink.bits = '32+4': with named groups it must be one",
    ),
    ({"bounds": {"norm": 0.5}}, "bounds.norm = 0.5: must be 1 or more, or 0 for no limit"),
    ({"bounds": {"weight": -1}}, "bounds.weight = -1: must be greater than or equal to 0"),
    ({"train": {"cohort": 101}}, "train.cohort = 101: there are only 100 clients"),
    ({"train": {"lr": 0}}, "train.lr = 0: must be greater than 0"),
    ({"train": {"lr": float("nan")}}, "train.lr = nan: must be"),
    ({"train": {"dropout": 1}}, "train.dropout = 1: must be less than 1"),
    (
        {"data": {"partition": "shard"}},
        "data.partition = 'shard': must be one of shards, dirichlet, iid, labels, natural, or module:function",
    ),
    ({"train": {"steps": 10**8}}, "train.steps = 100000000: must be less than or equal to 1000000"),
    (
        {"train": {"optimizer": {"name": "adam", "eps": 1e-300}}},
        "train.optimizer.eps = 1e-300: does not fit; the arguments of adam are betas (two numbers from 0 to 1) and "
        "eps (1e-30 or more)",
    ),
    ({"uplink": {"codec": 3}}, "uplink.codec = 3: must be a name, or a table with a name"),
    ({"uplink": {"policy": []}}, "uplink.policy = []: must be a name, or a table with a name"),
    ({"uplink": {"group": {"a": {"share": 0.5, "codec": 3}}}}, "uplink.group.a.codec = 3: must be a name, or a table"),
    ({"uplink": {"policy": {}}}, "uplink.policy.name: is missing"),
    (
        {"uplink": {"policy": {"name": "adaquantfl", "q": 1}}},
        "uplink.policy.q = 1: adaquantfl has no such argument; known are s0, norm, bucket",
    ),
    (
        {"uplink": {"codec": {"name": "qsgd", "S": 1}}},
        "uplink.codec.S = 1: qsgd has no such argument; did you mean 's'?",
    ),
    ({"train": {"steps": 0}}, "train.steps = 0: must be greater than or equal to 1"),
    ({"train": {"steps": 5, "epochs": 2}}, "train.steps = 5 and epochs = 2: only one of them can be given"),
    (
        {"train": {"schedule": "sine"}},
        "train.schedule = 'sine': must be one of constant, decayed, strongly-convex, cosi",
    ),
    ({"train": {"schedule": "steps"}}, "train.schedule = 'steps': needs milestones, the rounds after which lr is"),
    (
        {"train": {"optimizer": "adm"}},
        "train.optimizer.name = 'adm': must be one of sgd, adam, adamw, or module:function",
    ),
    ({"train": {"optimizer": 5}}, "train.optimizer = 5: must be one of sgd, adam, adamw, module:function, or a table"),
    (
        {"train": {"optimizer": {"momentum": 0.9}}},
        "train.optimizer.momentum = 0.9: is not an argument of sgd; set train.momentum",
    ),
    (
        {"train": {"optimizer": {"name": "adam", "betas": [0.9]}}},
        "train.optimizer.betas = [0.9]: does not fit; the argum",
    ),
    (
        {"train": {"optimizer": {"name": "adamw", "beta": 1}}},
        "train.optimizer.beta = 1: does not fit; the arguments of",
    ),
    ({"shift": {"max_share": 2}}, "shift.max_share = 2: must be less than or equal to 1"),
    ({"shift": {"per": "unit"}}, "shift.per = 'unit': must be 'filter' or 'layer'"),
    ({"shift": {"per": 3}}, "shift.per = 3: must be 'filter' or 'layer'"),
    ({"shift": {"share": "all"}}, "shift.share = 'all': must be a number from 0 to 1, or 'uploads'"),
    ({"shift": {"share": 1.5}}, "shift.share = 1.5: must be a number from 0 to 1, or 'uploads'"),
    ({"shift": {"share": -1}}, "shift.share = -1: must be a number from 0 to 1, or 'uploads'"),
    ({"shift": {"share": float("nan")}}, "shift.share = nan: must be a number from 0 to 1, or 'uploads'"),
    ({"shift": {"share": True}}, "shift.share = True: must be a number from 0 to 1, or 'uploads'"),
    ({"shift": {"share": [1.0]}}, "shift.share = [1.0]: must be a number from 0 to 1, or 'uploads'"),
    ({"shift": {"tensors": "fc*"}}, "shift.tensors = 'fc*': must be"),
    ({"seed": "x"}, "seed = 'x': must be a valid integer"),
    ({"train": {"rounds": True}}, "train.rounds = True: must be a valid integer"),
    ({"train": {"batch": 10**15}}, "train.batch = 1000000000000000: must be less than or equal to 100000000"),
    ({"train": {"lr": 1e300}}, "train.lr = 1e+300: must be less than or equal to 1000"),
    ({"uplink": {"bits": True}}, "uplink.bits = True: must be a number"),
    ({"uplink": {"bandwidth": True}}, "uplink.bandwidth = True: must be a number"),
    ({"uplink": {"bandwidth": "fast"}}, "uplink.bandwidth = 'fast': must be a rate, for example 1MB/s"),
    ({"uplink": {"bandwidth": {"4": "fast"}}}, "uplink.bandwidth.4 = 'fast': must be a rate"),
    ({"uplink": {"bandwidth": [1e6, "fast"]}}, "uplink.bandwidth.1 = 'fast': must be a rate"),
    (
        {"uplink": {"group": {"a": {"share": 0.5, "bandwidth": "2XB/s"}}}},
        "uplink.group.a.bandwidth = '2XB/s': must be a rate",
    ),
    (
        {"uplink": {"quantizer": "step-random", "send": "updates", "feedback": True}},
        "uplink.feedback = true: errors of quantizer = 'step-random' may exceed the update and would grow from round",
    ),
    (
        {"downlink": {"quantizer": "step-random", "send": "updates"}},
        "downlink.quantizer = 'step-random': its errors may exceed the update, and updates of the downlink contain",
    ),
    (
        {"uplink": {"quantizer": "uniform", "rate": 0.5}},
        "uplink.rate = 0.5: has no effect without quantizer = 'step' or",
    ),
    ({"uplink": {"per": 0}}, "uplink.per = 0: must be 'tensor', 'channel', or the number of values per block"),
    ({"uplink": {"bandwidth": 1e-300}}, "uplink.bandwidth = 1e-300: must be"),
    ({"name": "a/b"}, "name = 'a/b': must be the name of a folder: 1 to 100 characters, no slash, backslash or"),
    ({"name": ".."}, "name = '..': must be the name of a folder"),
    ({"name": "a\0b"}, "name = 'a\\x00b': names and paths must not contain NUL characters"),
    ({"data": {"name": "a\0.npz"}}, "data.name = 'a\\x00.npz': names and paths must not contain NUL characters"),
    ({"uplink": {"group": {"a\0": {"share": 0.5}}}}, "uplink.group.a? = 'a\\x00': names and paths must not contain"),
    ({"rounds": 3}, "unknown setting 'rounds'; did you mean 'train.rounds'?"),
    ({"train": 3}, "train = 3: must be"),
]


@pytest.mark.parametrize(("raw", "sentence"), WRONG)
def test_a_wrong_setting_is_named_in_one_sentence(raw: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Experiment(**raw)
    assert sentence in str(caught.value)
    assert not set("\n\0^$") & set(str(caught.value))  # one line, and no regular expression


def test_a_bandwidth_may_be_written_with_its_unit_and_is_recorded_as_a_number() -> None:
    forms: list[tuple[Any, Any]] = [
        ("10Mbit/s", 1.25e6),
        ({"32": "1MB/s", "4": 1e5}, {32: 1e6, 4: 1e5}),
        (["1MB/s", "8kbps", 3], (1e6, 1e3, 3.0)),
    ]
    for written, bytes_per_second in forms:
        experiment = Experiment(uplink={"bandwidth": written}, data={"clients": 3}, train={"cohort": 2})
        assert experiment.uplink.bandwidth == bytes_per_second
        assert Experiment(**tomllib.loads(experiment.toml())) == experiment
    slow = Experiment(uplink={"group": {"slow": {"share": 0.5, "bandwidth": "500 kB/s"}}})
    assert slow.uplink.group["slow"].bandwidth == 5e5
    assert Experiment(**tomllib.loads(slow.toml())) == slow


BUILT: list[tuple[dict[str, Any], str]] = [
    ({"uplink": {"group": {"a": {"share": 0.001, "bits": 4}}}}, "group 'a' is empty"),
    (
        {"uplink": {"codec": {"name": "qsgd", "s": 1}, "send": "updates", "feedback": True}},
        "uplink.feedback = true: errors of QSGD(s=1, norm='max', whole=False) may exceed the values and would grow",
    ),
    (
        {"downlink": {"codec": {"name": "qsgd", "s": 1}, "send": "updates"}},
        "downlink.send = 'updates': errors of QSGD(s=1, norm='max', whole=False) may exceed the values and would grow",
    ),
    ({"uplink": {"bits": {32: 0.999, 4: 0.001}}}, "group '4 bit' is empty"),
    ({"uplink": {"group": {"a": {"clients": [100]}}}}, "client 100: there are 100 clients"),
    ({"uplink": {"group": {"a": {"clients": [1]}, "b": {"clients": [1]}}}}, "client 1: it is already in another group"),
    ({"data": {"augment": True, "clients": 100}}, "data.augment = true: needs images"),
    ({"data": {"clients": 1000, "partition": "iid"}, "train": {"cohort": 500}}, "only 240 clients have data"),
    ({"model": {"name": "resnet"}}, "model.name = 'resnet': no such model; known are mlp, paper-cnn"),
    ({"model": {"args": {"hiden": 3}}}, "unexpected keyword argument 'hiden'"),
    ({"model": {"name": "torch:ones"}}, "model = 'torch:ones'"),
    (
        {"train": {"loss": "nowhere:f"}},
        "train.loss = 'nowhere:f': no module 'nowhere' in the current folder or",
    ),
    (
        {"train": {"metric": "acuracy"}},
        "train.metric = 'acuracy': no such metric; did you mean 'accuracy'? (or module:function)",
    ),
    (
        {"train": {"metrics": ["accuracy", "nowhere:f1"]}},
        "train.metrics = 'nowhere:f1': no module 'nowhere' in the current folder or on the Python path",
    ),
    ({"model": {"args": {"hidden": 0}}}, "model = 'mlp' with {'hidden': 0}: fc1.weight is empty; sizes must be 1 or"),
    ({"model": {"args": {"hidden": -1}}}, "model = 'mlp' with {'hidden': -1}: RuntimeError: "),
    ({"model": {"name": "paper-cnn"}}, "PaperCNN(shape=(6,)): needs images"),
    (
        {"shift": {"tensors": ["nothing*"], "per": "layer"}},
        "shift.tensors = ('nothing*',): there is no such tensor among the trained tensors: fc1.weight",
    ),
    (
        {"shift": {"tensors": ["fc1.bias"]}},
        "shift.tensors = ('fc1.bias',): there is no such tensor among the trained tensors with filters of two "
        "inputs or more: fc1.weight, fc2.weight",
    ),
    ({"train": {"loss": "tests.test_settings:broken"}}, "train.loss = 'tests.test_settings:broken': KeyError: 'no'"),
    (
        {"train": {"metric": "tests.test_settings:single"}},
        "single: a metric must return a tensor with one number for each of 60 examples",
    ),
    ({"train": {"loss": "unreadable:f"}}, "train.loss = 'unreadable:f': SyntaxError"),
    ({"data": {"partition": "dirichlet", "least": 300}}, "least=300"),
    ({"train": {"schedule": "nowhere:f"}}, "train.schedule = 'nowhere:f': no module 'nowhere'"),
    (
        {"train": {"schedule": "tests.test_settings:falling"}},
        "train.schedule = 'tests.test_settings:falling': round 11, step 0: returns -0.01; a learning rate must be 0",
    ),
    (
        {"train": {"schedule": "tests.test_settings:broken"}},
        "train.schedule = 'tests.test_settings:broken': round 1, step 0: KeyError: 'no'",
    ),
]


def falling(number: int, step: int) -> float:
    """Negative from the eleventh round on."""
    return round(0.1 - 0.01 * number, 6) if number > 10 else 0.1 * 2.0**-step


def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise KeyError("no")


def single(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


@pytest.mark.parametrize(("raw", "sentence"), BUILT)
def test_a_setting_that_cannot_be_built_is_named_in_one_sentence(
    raw: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unreadable.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError) as caught:
        build(Experiment(**raw), data=points())
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_data_set_names_the_command_that_fetches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    with pytest.raises(SettingsError, match="fedshift data cifar10"):
        build(Experiment(data={"name": "cifar10"}))


def test_later_settings_take_precedence() -> None:
    raw = merge({"train": {"lr": 1, "epochs": 2}, "uplink": {"bits": {"32": 1.0}}}, {"train": {"lr": 3}})
    assert raw == {"train": {"lr": 3, "epochs": 2}, "uplink": {"bits": {"32": 1.0}}}
    assert merge(raw, {"uplink": {"bits": {"4": 1.0}}})["uplink"] == {"bits": {"4": 1.0}}
    assign(raw, "train.lr=0.5")
    assert raw["train"]["lr"] == 0.5
    with pytest.raises(SettingsError, match="'lr' is a setting, not a table"):
        assign(raw, "train.lr.x=1")


@pytest.mark.parametrize(("text", "sentence"), [("a = ", "not TOML"), (b"\xff\xfe", "UTF-8"), (None, "cannot be read")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | bytes | None, sentence: str) -> None:
    path = tmp_path / "a.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError, match=sentence) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_file_without_settings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.npz").touch()
    with pytest.raises(SettingsError, match=r"data\.npz: contains no settings; to train the demo, run"):
        given(tmp_path / "data.npz", None, [])


def test_the_later_of_steps_and_epochs_is_kept() -> None:
    raw = merge({"train": {"epochs": 5, "lr": 0.1}}, {"train": {"steps": 20}})
    assert raw == {"train": {"lr": 0.1, "steps": 20}}
    assign(raw, "train.epochs=3")
    assert raw == {"train": {"lr": 0.1, "epochs": 3}}
    stepped = Experiment(**raw).changed(**{"train.steps": 7})
    assert stepped.train.steps == 7
    assert "epochs" not in stepped.toml()
    assert Experiment(**tomllib.loads(stepped.toml())) == stepped
    grid = {"train": {"epochs": 5}, "sweep": {"train.steps": [10, 20], "seed": [0]}}
    assert [experiment.train.steps for experiment in expand(grid)] == [10, 20]


def test_an_argument_can_be_added_to_an_optimizer_or_codec_that_is_given_by_name() -> None:
    raw = merge({"train": {"optimizer": "adam"}}, {"train": {"optimizer": {"eps": 1e-6}}})
    assign(raw, "train.optimizer.betas=[0.9, 0.99]")
    assert raw == {"train": {"optimizer": {"name": "adam", "eps": 1e-6, "betas": [0.9, 0.99]}}}
    raw = {"uplink": {"codec": "qsgd"}}
    assign(raw, "uplink.codec.s=4")
    assert raw == {"uplink": {"codec": {"name": "qsgd", "s": 4}}}
    assign(raw, "uplink.codec=sign")
    assert raw == {"uplink": {"codec": "sign"}}
    raw = merge({"uplink": {"policy": "dadaquant"}}, {"uplink": {"policy": {"q_max": 4}}})
    assign(raw, "uplink.policy.q_min=2")
    assert raw == {"uplink": {"policy": {"name": "dadaquant", "q_max": 4, "q_min": 2}}}


def test_a_later_codec_of_a_group_replaces_its_quantizer_and_vice_versa() -> None:
    raw = {"uplink": {"group": {"a": {"share": 0.5, "bits": 4, "quantizer": "uniform"}, "b": {"codec": "sign"}}}}
    later = merge(raw, {"uplink": {"group": {"a": {"codec": "sign"}, "b": {"rate": 0.5}}}})
    assert later["uplink"]["group"] == {"a": {"share": 0.5, "bits": 4, "codec": "sign"}, "b": {"rate": 0.5}}
    assign(later, "uplink.group.a.quantizer=kmeans")
    assert later["uplink"]["group"]["a"] == {"share": 0.5, "bits": 4, "quantizer": "kmeans"}
    assert merge(later, {"uplink": {"group": {"c": {"bits": 8}}}})["uplink"]["group"].keys() == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("place", "before", "after"),
    [
        ("train.optimizer", {"name": "adam", "eps": 1e-6}, {"name": "torch.optim:RMSprop", "alpha": 0.9}),
        ("uplink.policy", {"name": "dadaquant", "q_max": 4}, {"name": "adaquantfl", "s0": 3}),
        ("uplink.codec", {"name": "qsgd", "s": 4}, {"name": "topk", "keep": 0.1}),
    ],
)
def test_arguments_belong_to_the_name_that_they_were_given_for(place: str, before: Any, after: Any) -> None:
    table, key = place.split(".")
    assert merge({table: {key: before}}, {table: {key: after}}) == {table: {key: after}}
    more = {"name": before["name"], "more": 1}
    assert merge({table: {key: before}}, {table: {key: more}}) == {table: {key: before | more}}


def test_an_optimizer_is_written_with_its_arguments_and_read_again() -> None:
    for optimizer in ("adam", {"name": "adamw", "betas": [0.9, 0.99]}, {"name": "torch.optim:RMSprop", "alpha": 0.9}):
        experiment = Experiment(train={"optimizer": optimizer, "schedule": "steps", "milestones": [3, 5], "decay": 0.1})
        assert Experiment(**tomllib.loads(experiment.toml())) == experiment
    assert (
        Experiment(train={"optimizer": "adam"}).train.optimizer
        == Experiment(train={"optimizer": {"name": "adam"}}).train.optimizer
    )


def test_a_new_setting_of_training_changes_no_number_of_a_run_at_its_default() -> None:
    """The numbers are those of the version before optimizers, local steps and further schedules were added."""
    assert run_number(Experiment()) == 15037649215586016175
    assert run_number(Experiment(uplink={"bits": {32: 0.5, 4: 0.5}})) == 16489371951936243808
    changed = [{"optimizer": "adam"}, {"steps": 3}, {"warmup": 2}, {"local_schedule": "linear"}, {"schedule": "cosine"}]
    assert len({run_number(Experiment(train=train)) for train in [{}, *changed]}) == 6
    for schedule, same in (("constant", True), ("cosine", False)):
        numbers = {run_number(Experiment(train={"schedule": schedule, "rounds": rounds})) for rounds in (10, 20)}
        assert (len(numbers) == 1) == same


def test_a_schedule_may_be_a_function_of_round_and_step() -> None:
    """Rounds count from 1 and steps from 0; the warm-up halves the first of two rounds."""
    config = {"schedule": "tests.test_settings:falling", "rounds": 10, "steps": 3, "batch": 4, "warmup": 1}
    fed = build(Experiment(data={"clients": 4, "partition": "iid"}, train=config | {"cohort": 2}), data=points())
    drawn = [draw(fed, number, torch.device("cpu")).plan for number in (1, 2)]
    for plan, factor in zip(drawn, (0.5, 1.0), strict=True):
        assert plan is not None
        assert plan.lr.tolist() == [pytest.approx([0.1 * factor, 0.05 * factor, 0.025 * factor])] * 2
    with pytest.raises(TrainingError, match=r"round 11, step 0: returns -0\.01; a learning rate must be 0 or more"):
        draw(fed, 11, torch.device("cpu"))


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbfseed = 3\n")
    assert read(tmp_path / "a.toml") == {"seed": 3}


UNUSED: list[tuple[dict[str, Any], str]] = [
    ({"train": {"decay": 0.9}}, "train.decay = 0.9: has no effect without train.schedule = 'decayed' or 'steps'"),
    ({"train": {"milestones": [5]}}, "train.milestones = (5,): has no effect without train.schedule = 'steps'"),
    ({"train": {"final": 0.1}}, "train.final = 0.1: has no effect without train.schedule = 'cosine'"),
    ({"train": {"convexity": 2.0}}, "train.convexity = 2.0: has no effect without train.schedule = 'strongly-convex'"),
    ({"train": {"gamma": 7.0, "schedule": "decayed"}}, "train.gamma = 7.0: has no effect without train.schedule"),
    ({"data": {"alpha": 0.1}}, "data.alpha = 0.1: has no effect without data.partition = 'dirichlet'"),
    ({"data": {"labels": 3}}, "data.labels = 3: has no effect without data.partition = 'labels'"),
    ({"algorithm": {"mu": 0.1}}, "algorithm.mu = 0.1: has no effect without algorithm.name = 'fedprox'"),
]


@pytest.mark.parametrize(("raw", "sentence"), UNUSED)
def test_a_setting_that_no_run_uses_is_reported(raw: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        run(Experiment(**raw), tmp_path / "run")
    assert str(caught.value).startswith(sentence)
    (tmp_path / "a.toml").write_text(Experiment(**raw).toml())
    done = fedshift("run", tmp_path / "a.toml", "--out", tmp_path / "run")
    assert (done.exit_code, done.stderr) == (2, f"fedshift: {tmp_path / 'a.toml'}: {caught.value}\n")
    assert not (tmp_path / "run").exists()


def test_a_setting_that_one_run_of_a_grid_uses_is_accepted() -> None:
    raw = {"algorithm": {"mu": 0.1}, "sweep": {"algorithm.name": ["fedavg", "fedprox"]}}
    check_used(expand(raw))
    for name in PRESETS:
        check_used(expand(PRESETS[name]))


NOT_QUANTIZED: list[tuple[str, str]] = [
    (
        "uplink = {rate = 0.6, bits = 16}",
        "uplink.rate = 0.6: has no effect with uplink.bits = 16; leave out one of them",
    ),
    ("uplink = {keep = 0.1, bits = '32+16'}", "uplink.keep = 0.1: has no effect with uplink.bits = '32+16'"),
    ("uplink = {quantizer = 'step', step = 3, bits = {32 = 1}}", "uplink.step = 3.0: has no effect with uplink.bits"),
    (
        "uplink.group.a = {share = 0.5, rate = 1, bits = 32}",
        "uplink.group.a.rate = 1.0: has no effect with uplink.group",
    ),
    ("sweep.runs = [{uplink = {rate = 0.6, bits = 32}}, {uplink = {bits = 4}}]", "uplink.rate = 0.6: has no effect"),
]


@pytest.mark.parametrize(("text", "sentence"), NOT_QUANTIZED)
def test_a_rate_beside_bits_that_are_not_quantized_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f"{text}\n")
    done = fedshift("run", file, "--out", tmp_path / "run")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"fedshift: {file}: {sentence}")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_rate_on_the_command_line_is_refused_where_no_run_quantizes(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("uplink.bits = 32\n")
    done = fedshift("run", file, "--set", "uplink.rate=0.6", "--out", tmp_path / "run")
    why = "uplink.rate = 0.6: has no effect with uplink.bits = 32; leave out one of them"
    assert (done.exit_code, done.stderr) == (2, f"fedshift: --set: {why}\n")


@pytest.mark.parametrize(
    ("text", "assignments"),
    [
        ("uplink = {rate = 0.6, bits = '32+8'}", []),
        ("uplink = {rate = 0.6}", ["uplink.bits=32"]),
        ("uplink = 'lean'", ["uplink.bits=32"]),
        ("", ["uplink=lean", "uplink.bits=16"]),
        ("uplink = 'extreme'\nsweep.uplink.bits = [2, 16]", []),
        ("uplink = {rate = 0.6, bits = 32}\nsweep.uplink.bits = [8, 32]", []),
        ("uplink = {bits = 32}\nsweep.runs = [{uplink = {rate = 0.6, bits = 8}}, {}]", []),
        ("uplink.bits = 32\nuplink.group.a = {share = 0.5, rate = 0.6}", []),
    ],
)
def test_bits_of_another_place_replace_a_rate(text: str, assignments: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f"{text}\n")
    raw = given(tmp_path / "a.toml", None, assignments)
    for experiment in expand(raw):  # and the file that a run writes can be run again
        (tmp_path / "settings.toml").write_text(experiment.toml())
        again = Experiment(**given(tmp_path / "settings.toml", None, []))
        assert again.toml() == experiment.toml()
        assert [group.uplink for group in links(again)[0]] == [group.uplink for group in links(experiment)[0]]
        assert uplink_label(again) == uplink_label(experiment)


def test_a_sweep_without_a_table_sweep_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("seed = 1\n")
    done = fedshift("sweep", file, "--out", tmp_path / "out")
    why = "has no table named sweep with the settings that differ between runs; `fedshift run` trains one run"
    assert (done.exit_code, done.stderr) == (2, f"fedshift: {file}: {why}\n")
    file.write_text("[sweep]\n")
    for command in ("sweep", "run"):
        done = fedshift(command, file, "--out", tmp_path / "out")
        assert (done.exit_code, done.stderr.startswith(f"fedshift: {file}: sweep: is empty; it must list")) == (2, True)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_nul_is_refused_with_a_sentence() -> None:
    with pytest.raises(RunError, match="a folder's name cannot contain a NUL character"):
        run(Experiment(), "a\0b")


def test_a_grid_is_every_combination() -> None:
    grid = {"seed": [0, 1], "shift.on": [True, False], "uplink": {"bits": [32, "32+4", {"8": 1.0}]}}
    experiments = expand({"train": {"rounds": 2}, "sweep": grid})
    assert len(experiments) == 12
    assert len({run.toml() for run in experiments}) == 12
    together = expand({"sweep": {"runs": [{"seed": 5, "train": {"lr": 0.5}}, {"seed": 6}]}})
    assert [(run.seed, run.train.lr) for run in together] == [(5, 0.5), (6, 0.05)]


@pytest.mark.parametrize("wrong", [3, {"seed": 3}, {"seed": []}, {"runs": 3}, {"runs": []}, {"train.lrr": [1]}])
def test_an_impossible_grid_is_refused(wrong: Any) -> None:
    with pytest.raises(SettingsError):
        expand({"sweep": wrong})


@pytest.mark.parametrize("text", ["0\nx = 1", "0\n[train]\nlr = 1"])
def test_one_assignment_sets_one_setting(text: str) -> None:
    raw: dict[str, Any] = {}
    assign(raw, f"seed={text}")
    assert raw == {"seed": text}
    with pytest.raises(SettingsError, match="must be a valid integer"):
        Experiment(**raw)


def test_an_assignment_below_a_setting_that_the_sweep_sets_is_refused(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text("[sweep]\nseed = [0, 1]\n")
    done = fedshift("sweep", tmp_path / "grid.toml", "--set", "seed.x=1", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert done.stderr.startswith("fedshift: --set seed.x: the sweep sets ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings", [{"train": 1}, {"train": [{}]}, {"model": {"args": [1]}}, {"uplink": {"group": 1}}]
)
def test_a_value_that_must_be_a_table_is_named_in_terms_of_toml(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r" = .*: must be a table$"):
        Experiment(**settings)


@pytest.mark.parametrize("name", UPLINKS)
def test_a_named_uplink_is_the_same_in_settings_and_on_a_flower_client(name: str) -> None:
    found = [group.uplink for group in links(Experiment(uplink=name))[0]]
    assert found[-1] == named(name)
    assert uplink_name(Experiment(uplink=name).uplink) == name
    again = Experiment(**tomllib.loads(Experiment(uplink=name).toml()))
    assert again.uplink == Experiment(uplink=name).uplink


def test_a_named_uplink_can_be_changed_setting_by_setting_and_keeps_bandwidths() -> None:
    raw: dict[str, Any] = {"uplink": "lean"}
    put(raw, "uplink.rate", 0.3)
    assert Experiment(**raw).uplink == Experiment(uplink="lean").changed(**{"uplink.rate": 0.3}).uplink
    assert Experiment(**merge({"uplink": "lean"}, {"uplink": {"rate": 0.3}})) == Experiment(**raw)
    slow = Experiment(**merge({"uplink": {"bits": 4, "bandwidth": 1000.0}}, {"uplink": "lean"})).uplink
    assert (slow.bandwidth, uplink_name(slow)) == (1000.0, "lean")
    with pytest.raises(SettingsError, match="uplink = 'leen': must be a table, or one of exact, paper, lean, extreme"):
        put({"uplink": "leen"}, "uplink.rate", 0.3)


def test_a_name_on_the_command_line_replaces_the_uplink_of_a_file_and_is_then_changed(tmp_path: Path) -> None:
    """Also for a sweep and an experiment; the bandwidth is kept."""
    lean = Experiment(uplink=UPLINKS["lean"] | {"rate": 0.3}).uplink
    for before in ("bits = '32+4'", "quantizer = 'ternary'", "[uplink.group.phones]\nshare = 0.5\nbits = 2"):
        (tmp_path / "my.toml").write_text(f"[uplink]\n{before}\n")
        raw = given(tmp_path / "my.toml", None, ["uplink=lean", "uplink.rate=0.3"])
        assert Experiment(**raw).uplink == lean
    slow = {"uplink": {"bits": 4, "bandwidth": 1000.0}}
    (swept,) = expand(slow | {"sweep": {"uplink": ["lean"]}})
    assert swept.uplink == Experiment(**slow).changed(uplink="lean").uplink
    assert (swept.uplink.bandwidth, uplink_name(swept.uplink)) == (1000.0, "lean")
