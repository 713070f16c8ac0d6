import torch

from fedshift.models import MODELS


def test_the_papers_cnn_has_the_papers_size() -> None:
    model = MODELS["paper-cnn"]()
    shapes = [tuple(p.shape) for p in model.parameters()]
    assert shapes == [(32, 3, 5, 5), (64, 32, 5, 5), (512, 4096), (10, 512)]
    assert sum(p.numel() for p in model.parameters()) == 2_155_872
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
