"""`fedshift methods` lists every name that settings accept, with arguments that work."""

import json
from typing import Any, get_args

import pytest

from fedshift import Experiment
from fedshift.algorithms.table import ALGORITHMS
from fedshift.cli.methods import catalog
from fedshift.codecs.named import CODECS
from fedshift.experiment.build import named_algorithm
from fedshift.experiment.settings import CodingSettings, check_used
from fedshift.policies.table import POLICIES
from tests.docs.blocks import ROOT
from tests.runs import fedshift


def given(item: dict[str, Any]) -> dict[str, Any]:
    """Settings of an item that have a default."""
    return {name: value for name, value in item["settings"].items() if value is not None}


def test_all_names_of_settings_are_listed() -> None:
    names = {kind: [item["name"] for item in items] for kind, items in catalog().items()}
    assert names["algorithms"] == list(ALGORITHMS)
    assert names["codecs"] == list(CODECS)
    assert names["policies"] == list(POLICIES)
    for kind, field in (("quantizers", "quantizer"), ("coders", "coder")):
        assert set(names[kind]) == {*get_args(CodingSettings.model_fields[field].annotation)} - {"auto"}


@pytest.mark.parametrize("item", catalog()["algorithms"], ids=lambda item: item["name"])
def test_listed_arguments_are_the_defaults(item: dict[str, Any]) -> None:
    experiment = Experiment(algorithm={"name": item["name"]} | given(item))
    check_used([experiment])
    assert named_algorithm(experiment) == ALGORITHMS[item["name"]]()


@pytest.mark.parametrize("item", catalog()["quantizers"], ids=lambda item: item["name"])
def test_listed_sizes_are_the_defaults(item: dict[str, Any]) -> None:
    bits = item["settings"]["bits"] or 4
    listed = Experiment(uplink={"quantizer": item["name"]} | given(item) | {"bits": bits})
    usual = Experiment(uplink={"quantizer": item["name"], "bits": bits})
    assert listed.uplink.codec_for(bits) == usual.uplink.codec_for(bits)


@pytest.mark.parametrize("item", catalog()["codecs"], ids=lambda item: item["name"])
def test_listed_arguments_of_codecs_are_the_defaults(item: dict[str, Any]) -> None:
    listed = Experiment(uplink={"codec": {"name": item["name"]} | given(item)})
    assert listed.uplink.codec_for(8) == CODECS[item["name"]]()


@pytest.mark.parametrize("item", catalog()["policies"], ids=lambda item: item["name"])
def test_listed_arguments_of_policies_are_the_defaults(item: dict[str, Any]) -> None:
    needed = {"budget": 1e6} if item["name"] == "deadline" else {}
    listed = Experiment(uplink={"policy": {"name": item["name"]} | given(item) | needed})
    assert listed.uplink.policy is not None
    assert listed.uplink.policy.made() == POLICIES[item["name"]](**needed)


def test_every_line_is_a_sentence_and_every_algorithm_has_a_reference() -> None:
    for items in catalog().values():
        for item in items:
            assert item["line"].endswith("."), item
            assert len(item["line"]) <= 120
    for item in [*catalog()["algorithms"], *catalog()["policies"]]:
        assert item["reference"].endswith("."), item


def test_the_tables_have_names_arguments_and_references() -> None:
    done = fedshift("methods")
    assert done.exit_code == 0, done.stderr
    for expected in (
        "Algorithms",
        "feddyn",
        "alpha = 0.01",
        "References",
        "Acar et al.",
        "kmeans-random",
        "keep = 0.02",
    ):
        assert expected in done.stdout
    assert done.stdout.count("Reddi et al.") == 1  # three algorithms, one paper


def test_the_list_as_json() -> None:
    done = fedshift("methods", "--json")
    found = json.loads(done.stdout)
    assert found == catalog()
    assert {"qsgd", "sign", "eden", "topk"} <= {item["name"] for item in found["codecs"]}


def test_the_page_of_methods_describes_every_algorithm_and_cites_it() -> None:
    page, codecs = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("methods.md", "codecs.md"))
    for item in catalog()["codecs"]:
        assert f"`{item['name']}`" in page, item["name"]
        assert f"| `{item['name']}`" in codecs, item["name"]
    overview, measured = (page[page.index(title) :] for title in ("## Overview", "## Measured"))
    for item in catalog()["algorithms"]:
        assert f"`{item['name']}`" in overview[: overview.index("## Notes")], item["name"]
        assert f"| `{item['name']}` |" in measured, item["name"]
        assert f" | {item['reference']} |" in page, item["reference"]
