"""Optional packages are named once: what a message asks for is what an extra installs."""

import tomllib

from fedshift.core.extras import REQUIREMENTS
from tests.docs.blocks import ROOT


def test_requirements_are_those_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {
        one.partition(";")[0] for extra in ("flower", "peers", "report", "testing", "track") for one in extras[extra]
    }
    assert sorted(asked) == sorted(REQUIREMENTS.values())
