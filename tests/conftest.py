"""Settings of all tests: one torch thread, one hypothesis profile, and a small model."""

import pytest
import torch
from hypothesis import settings

from fedshift import Params

settings.register_profile("fedshift", deadline=None, max_examples=100, derandomize=True)
settings.load_profile("fedshift")
torch.set_num_threads(1)


@pytest.fixture
def params() -> Params:
    """A small model with everything a model may hold."""
    g = torch.Generator().manual_seed(0)
    return {
        "conv.weight": torch.randn(4, 3, 3, 3, generator=g),
        "norm.weight": torch.ones(4),
        "norm.running_mean": torch.randn(4, generator=g),
        "norm.num_batches_tracked": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
        "half.weight": torch.randn(5, 7, generator=g).half(),
        "empty": torch.zeros(0, 3),
        "fc.weight": torch.randn(10, 36, generator=g) * 0.1,
        "fc.bias": torch.randn(10, generator=g),
    }
