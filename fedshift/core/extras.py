"""Optional packages: supported versions and installation hints."""

REQUIREMENTS = {
    "flwr": "flwr[simulation]>=1.41,<1.43",
    "matplotlib": "matplotlib>=3.9",
    "mlflow": "mlflow>=3.4",
    "pfl": "pfl[pytorch]>=0.6,<0.7",
    "tensorboard": "tensorboard>=2.18",
    "trustme": "trustme>=1.2",
    "wandb": "wandb>=0.20",
}


def needs(package: str, why: str = "") -> str:
    """Message on how to install a missing package.

    >>> needs("matplotlib")
    "needs matplotlib: pip install 'matplotlib>=3.9'"
    """
    return f"needs {package}{why}: pip install '{REQUIREMENTS[package]}'"
