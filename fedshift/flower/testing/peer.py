"""Flower app for `fedshift bench peers`: FedAvg in Flower's simulation, without any part of fedshift in the round."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from fedshift.core.types import Params
from fedshift.flower.app.superlink import environment
from fedshift.flower.testing.bench import reply_with

Train = Callable[[Params, int, int], Params]  # (model, client, round) -> trained model; pickled by name
TIMEOUT = 600.0  # seconds for a round


class CountingFedAvg(FedAvg):
    """FedAvg of `cohort` clients per round, which counts the bytes of their replies as Flower does."""

    def __init__(self, cohort: int) -> None:
        super().__init__(
            fraction_train=1e-9,  # rounded down to none, so that the minimum applies
            fraction_evaluate=0.0,
            min_train_nodes=cohort,
            min_available_nodes=cohort,
        )
        self.bytes_up = 0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrived = list(replies)
        if failed := [reply.error.reason for reply in arrived if reply.has_error()]:
            raise RuntimeError(f"round {server_round}: {len(failed)} clients failed: {failed[0]}")
        self.bytes_up = sum(record.count_bytes() for reply in arrived for record in reply.content.values())
        return super().aggregate_train(server_round, arrived)


def client_app(train: Train) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train_(message: Message, context: Context) -> Message:
        sent = message.content.array_records["arrays"].to_torch_state_dict()
        client, number = context.node_config["partition-id"], message.content.config_records["config"]["server-round"]
        return reply_with(train(dict(sent), int(client), int(number)), message)  # type: ignore[arg-type]

    return app


def server_app(start: Params, each: Callable[[Params, int], None], cohort: int, rounds: int) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = CountingFedAvg(cohort)

        def evaluate(number: int, arrays: ArrayRecord) -> None:
            if number:
                each(dict(arrays.to_torch_state_dict()), strategy.bytes_up)

        strategy.start(grid, ArrayRecord(start), rounds, TIMEOUT, evaluate_fn=evaluate)

    return app


def simulate(
    train: Train,
    start: Params,
    each: Callable[[Params, int], None],
    clients: int,
    cohort: int,
    rounds: int,
    workers: int,
    home: Path,
) -> None:
    """Train on Ray with one worker process per core; `each` is called with the model and the bytes after every round.

    The environment of this process is changed: Flower's files are below `home`, and nothing is sent to other hosts.
    """
    os.environ.update(environment(home))
    os.makedirs(os.environ["RAY_TMPDIR"], exist_ok=True)
    run_simulation(
        server_app(start, each, cohort, rounds),
        client_app(train),
        num_supernodes=clients,
        backend_config={
            "init_args": {"num_cpus": workers, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
