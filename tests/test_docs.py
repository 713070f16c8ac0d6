"""The settings that the documentation lists are the settings there are, with the defaults they have."""

import re
import tomllib
from pathlib import Path

from fedshift import Experiment

PAGE = (Path(__file__).parent.parent / "docs" / "running.md").read_text()
BLOCKS = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


def test_the_documented_settings_are_the_defaults() -> None:
    listed = tomllib.loads(BLOCKS[0])
    defaults = tomllib.loads(Experiment().toml())
    defaults["uplink"].pop("group")
    assert listed == defaults
    assert Experiment(**listed) == Experiment()


def test_every_optional_setting_is_mentioned() -> None:
    for table, fields in Experiment().model_dump().items():
        for name in fields if isinstance(fields, dict) else [table]:
            assert re.search(rf"\b{name}\b", BLOCKS[0]) or name == "group", f"{table}.{name}"


def test_the_other_blocks_are_valid() -> None:
    phones = tomllib.loads(BLOCKS[2])
    assert Experiment(**phones).uplink.group["phones"].bits == 4
    for line in BLOCKS[1].splitlines():
        clients = {"data": {"clients": 4}, "train": {"cohort": 2}}
        Experiment(**clients, uplink=tomllib.loads(line))
