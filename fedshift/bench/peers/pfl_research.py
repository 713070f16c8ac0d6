"""The task in pfl-research: its FedAvg, simulated in one process, with the same clients and batches as fedshift."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from fedshift.bench.peers.task import BATCH, COHORT, EPOCHS, LR, Each, RoundResult, Task, size
from fedshift.models import MLP

ACCURACY = "accuracy"


class Model(MLP):
    """The model with the loss and the metrics that pfl calls."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        self.eval()
        outputs = self(x)
        loss, correct = F.cross_entropy(outputs, y, reduction="sum"), (outputs.argmax(1) == y).sum()
        return {"loss": Weighted(loss.item(), len(y)), ACCURACY: Weighted(correct.item(), len(y))}


class Client(Dataset):  # type: ignore[misc]
    """Examples of a client; every epoch of its training has its own order."""

    def __init__(self, task: Task, client: int, batches: list[Tensor]) -> None:
        examples = task.examples(client)
        super().__init__((task.x[examples], task.y[examples]))
        per_epoch = len(batches) // EPOCHS
        self.task, self.epochs = task, iter([batches[i : i + per_epoch] for i in range(0, len(batches), per_epoch)])

    def iter(self, batch_size: int | None) -> Iterator[Any]:
        """Batches of the next epoch; for the evaluation of the first round, whose batch is all examples, this batch."""
        if batch_size != BATCH:
            yield from super().iter(batch_size)
            return
        for batch in next(self.epochs):
            yield self.task.x[batch], self.task.y[batch]


class EachRound(TrainingProcessCallback):  # type: ignore[misc]
    """Callback that reports every round."""

    def __init__(self, each: Each) -> None:
        self.each = each

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        params = dict(model.pytorch_model.state_dict())
        accuracy = next(value for name, value in aggregate_metrics if str(name) == f"Central val | {ACCURACY}")
        self.each(RoundResult(params, float(accuracy.overall_value), COHORT * size(params)))
        return False, Metrics()


def simulate(task: Task, rounds: int, each: Each) -> None:
    """Train; `each` is called after every round."""
    module = Model()
    module.load_state_dict(task.start)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    cohorts = (drawn for number in range(1, rounds + 1) for drawn in task.cohort(number))
    clients = FederatedDataset(lambda drawn: Client(task, *drawn), lambda: next(cohorts))
    test = Dataset((task.test_x, task.test_y))
    central = CentralEvaluationCallback(test)  # after every round but the first, and before training
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,  # by clients: in the first round only
            train_cohort_size=COHORT,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=clients, val_data=clients),
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=EPOCHS, local_learning_rate=LR, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[central, EachRound(each)],
    )
