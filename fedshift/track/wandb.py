"""Weights & Biases: offline in the run directory, for `wandb sync`, unless WANDB_MODE is set."""

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import wandb

from fedshift.track.base import About, How, Rounds


class WandB:
    def __init__(self, run: About, kept: Mapping[str, Any]) -> None:
        mode = os.environ.get("WANDB_MODE", "offline")
        self.after = kept.get("heard", kept.get("round", 0))  # logged values cannot be removed
        self.kept: dict[str, Any] = {"id": kept.get("id") or secrets.token_hex(4)}
        if mode == "disabled":  # rounds of this session are logged later
            self.kept["heard"] = self.after
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedshift"),
            group=os.environ.get("WANDB_RUN_GROUP") or run.group or None,
            name=run.name,
            id=self.kept["id"],
            config=run.settings,
            mode=mode,  # type: ignore[arg-type]  # checked by wandb
            dir=os.environ.get("WANDB_DIR", run.folder),
            resume="allow",
            reinit="create_new",  # in addition to the other runs of a sweep
            settings=wandb.Settings(console="off", silent=mode == "offline"),
        )

    def add(self, rounds: Rounds) -> None:
        for number, figures in rounds.items():
            self.run.log(dict(figures), step=number)

    def end(self, how: How) -> None:
        try:
            if how == "stopped":
                self.run.mark_preempting()  # it may be resumed
            self.run.finish(exit_code=0 if how == "finished" else 1)
        except ConnectionError:  # W&B's process is gone; without teardown, the exit of this process fails as well
            with suppress(Exception):
                wandb.teardown()
            raise


TRACKER = WandB
