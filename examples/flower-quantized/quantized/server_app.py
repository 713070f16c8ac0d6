# ruff: noqa: T201
"""A Flower ServerApp; three lines are added for fedshift."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam

from fedshift.flower import FedShift  # <-- 3
from quantized.task import accuracy, new_model, test_data

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    model, test = new_model(), test_data()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": accuracy(model, test)})

    strategy = FedAdam(fraction_evaluate=0.0, eta=0.05)
    strategy = FedShift(strategy)  # <-- 4
    start, rounds = ArrayRecord(model.state_dict()), context.run_config["num-server-rounds"]
    result = strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds, evaluate_fn=evaluate)
    print(f"accuracy: {result.evaluate_metrics_serverapp[rounds]['accuracy']:.3f}")
    done = strategy.rounds  # <-- 5
    print(f"uploads: {sum(x.bytes_up for x in done):,} bytes; at 32 bits {sum(x.bytes_exact for x in done):,}")
