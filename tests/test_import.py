"""Importing the library is cheap: an edge device that only encodes pays for nothing else."""

import subprocess
import sys

HEAVY = [
    "matplotlib",
    "plotly",
    "flask",
    "aiohttp",
    "requests",
    "datasets",
    "scipy",
    "sklearn",
    "pandas",
    "rich",
    "typer",
    "flwr",
    "mlflow",
    "tensorboard",
    "wandb",
]


def test_import_loads_no_heavy_library() -> None:
    use = "import fedshift, sys; [getattr(fedshift, name) for name in fedshift.__all__]"
    program = f"{use}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_exist_and_none_is_listed_twice() -> None:
    import fedshift

    assert len(fedshift.__all__) == len(set(fedshift.__all__))
    assert all(hasattr(fedshift, name) for name in fedshift.__all__)
    assert set(fedshift.__all__) == {*fedshift._HOME, "__version__"}


def test_the_command_line_starts_without_torch_and_scipy() -> None:
    program = "import fedshift.cli, sys; print([name for name in ('torch', 'scipy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_summaries_of_single_seeds_do_not_wait_for_scipy() -> None:
    program = (
        "from fedshift.runs.summary import paired; import sys; paired({0: 1}, {0: 2}); print('scipy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
