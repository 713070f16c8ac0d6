"""Experiments on Flower that are stopped at any moment and resumed: the server, the nodes, or both."""

from pathlib import Path
from typing import Any

import pytest

from fedshift.flower.testing import LocalGrid
from fedshift.runs.run import Run
from tests.federations import settings
from tests.flower.experiments import grid_of, in_process, on_flower
from tests.runs import checkpoints, damage, record

BOTH = {"algorithm": {"name": "scaffold"}, "uplink": {"bits": 4, "feedback": True, "send": "updates"}}
CASES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold with feedback": BOTH,
    "scaffold with feedback, every third round": BOTH | {"record": {"checkpoint": 3}},
    "scaffold sent, on disk": {
        "algorithm": {"name": "scaffold", "control": "sent"},
        "record": {"memory": "disk", "checkpoint": 2},
    },
}
ROUNDS = 8


def experiment(name: str) -> Any:
    return settings(**CASES[name]).changed(**{"train.rounds": ROUNDS})


def undisturbed(name: str, out: Path) -> dict[str, Any]:
    list(in_process(experiment(name), out))
    return record(out)


def recorded(out: Path) -> dict[str, Any]:
    found = record(out)
    found["settings.toml"] = found["settings.toml"].replace('"flower"', '"sequential"')
    return found


def stop(run: Run, after: int) -> None:
    """Stop a run after a round without saving."""
    for outcome in run:
        if outcome.number == after:
            run.close()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("files", [True, False], ids=["state in files", "state in the context"])
def test_a_server_that_is_stopped_at_any_round_ends_in_the_same_bytes(name: str, files: bool, tmp_path: Path) -> None:
    messages: list[str] = []
    grid = grid_of(experiment(name), 5, state_dir=tmp_path / "state" if files else None)
    for after in (1, 2, 4, 5, 7):
        stop(on_flower(experiment(name), grid, tmp_path / "run", tell=messages.append), after)
        if files:  # the nodes were restarted, too
            for node in list(grid.contexts):
                grid.back(node, anew=True)
    list(on_flower(experiment(name), grid, tmp_path / "run", tell=messages.append))
    assert messages == []
    assert recorded(tmp_path / "run") == undisturbed(name, tmp_path / "whole")


def test_a_server_that_is_stopped_within_a_round_ends_in_the_same_bytes(tmp_path: Path) -> None:
    """Nodes have a memory of a round that the server does not know."""
    name = "scaffold with feedback, every third round"

    class Crash(Exception):  # noqa: N818
        pass

    class Breaking(LocalGrid):
        at = 0

        def pull_messages(self, message_ids: Any) -> Any:
            replies = super().pull_messages(message_ids)
            if any(reply.metadata.group_id == str(self.at) for reply in replies):
                raise Crash
            return replies

    grid = Breaking(grid_of(experiment(name)).app, 5)
    for grid.at in (1, 2, 5, 6, 8):
        with pytest.raises(Crash):
            list(on_flower(experiment(name), grid, tmp_path / "run"))
    grid.at = 0
    list(on_flower(experiment(name), grid, tmp_path / "run"))
    assert recorded(tmp_path / "run") == undisturbed(name, tmp_path / "whole")


def test_nodes_keep_the_memory_that_an_older_checkpoint_needs(tmp_path: Path) -> None:
    name, messages = "scaffold with feedback", list[str]()
    grid = grid_of(experiment(name), 5)
    stop(on_flower(experiment(name), grid, tmp_path / "run"), after=6)
    damage(checkpoints(tmp_path / "run")[-1])
    list(on_flower(experiment(name), grid, tmp_path / "run", tell=messages.append))
    assert len(messages) == 1
    assert "resuming from round 5" in messages[0]
    assert recorded(tmp_path / "run") == undisturbed(name, tmp_path / "whole")


def test_a_new_run_in_another_folder_does_not_use_old_memories(tmp_path: Path) -> None:
    name = "scaffold with feedback"
    grid = grid_of(experiment(name), 5, state_dir=tmp_path / "state")
    stop(on_flower(experiment(name), grid, tmp_path / "a"), after=4)
    list(on_flower(experiment(name), grid, tmp_path / "b"))
    list(on_flower(experiment(name), grid, tmp_path / "a"))  # and the first is not disturbed by the second
    assert recorded(tmp_path / "a") == recorded(tmp_path / "b") == undisturbed(name, tmp_path / "whole")
