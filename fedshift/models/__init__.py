"""Models by name, built for the shape of the examples and the number of classes."""

from collections.abc import Callable

from torch import nn

from fedshift.models.convolutional import CNN, PaperCNN, SmallPaperCNN
from fedshift.models.perceptron import MLP, Logistic
from fedshift.models.resnet import ResNet, resnet8, resnet18
from fedshift.models.text import CharLSTM, CharTransformer

__all__ = [
    "CNN",
    "MLP",
    "MODELS",
    "CharLSTM",
    "CharTransformer",
    "Logistic",
    "PaperCNN",
    "ResNet",
    "SmallPaperCNN",
    "resnet8",
    "resnet18",
]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": MLP,
    "paper-cnn": PaperCNN,
    "small-paper-cnn": SmallPaperCNN,
    "logistic": Logistic,
    "cnn": CNN,
    "resnet8": resnet8,
    "resnet18": resnet18,
    "char-lstm": CharLSTM,
    "char-transformer": CharTransformer,
}
