"""Data sets: arrays are checked and normalised, and found by name, path or function."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedshift.data import DataError, Dataset, dataset, load

X = np.arange(2 * 3 * 2 * 2, dtype=np.uint8).reshape(2, 3, 2, 2)
MEAN, STD = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)


def four(x: Any = X, y: Any = (0, 1), test_x: Any = None, test_y: Any = None) -> tuple[Any, Any, Any, Any]:
    return x, y, x if test_x is None else test_x, y if test_y is None else test_y


def test_inputs_are_scaled_and_normalised_by_channel() -> None:
    """(x / 255 - mean) / std: the first green pixel of the second image is 16, (16/255 - 0.2)/0.5."""
    data = dataset(*four(), mean=MEAN, std=STD)
    out = data.inputs(data.x)
    assert out.dtype == torch.float32
    assert float(out[1, 1, 0, 0]) == pytest.approx((16 / 255 - 0.2) / 0.5, abs=1e-6)
    exact = (torch.from_numpy(X).double() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    assert torch.allclose(out.double(), exact, atol=1e-6)


def test_inputs_take_any_number_of_leading_axes() -> None:
    data = dataset(*four(), mean=MEAN, std=STD)
    stacked = data.x.expand(5, 4, 2, 3, 2, 2)
    assert torch.equal(data.inputs(stacked), data.inputs(data.x).expand(5, 4, 2, 3, 2, 2))
    assert torch.equal(data.inputs(data.x[0]), data.inputs(data.x)[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_inputs_are_the_same_on_a_gpu() -> None:
    data = dataset(*four(), mean=MEAN, std=STD)
    assert torch.equal(data.to("cuda").inputs(data.x.cuda()).cpu(), data.inputs(data.x))


def test_inputs_do_not_change_their_source() -> None:
    data = dataset(*four(), mean=MEAN, std=STD)
    data.inputs(data.x)
    assert np.array_equal(data.x, X)


def test_without_mean_uint8_is_only_scaled_and_floats_are_unchanged() -> None:
    assert dataset(*four()).inputs(torch.tensor([[[0, 51, 255]]], dtype=torch.uint8)).flatten().tolist() == (
        pytest.approx([0, 0.2, 1])
    )
    data = dataset(*four(X / 7))
    assert data.inputs(data.x) is data.x


def test_flat_images_have_as_many_channels_as_pixels() -> None:
    data = dataset(*four(X.reshape(2, 12)), mean=(0.5,), std=(0.5,))
    assert data.inputs(data.x)[0, :2].tolist() == pytest.approx([-1, (1 / 255 - 0.5) / 0.5])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (np.float64, torch.float32),
        (np.float16, torch.float32),
        (np.uint8, torch.uint8),
        (np.int32, torch.int64),
        (np.uint16, torch.int64),
        (">f4", torch.float32),
        (">i8", torch.int64),
    ],
)
def test_examples_are_converted(given: Any, kept: torch.dtype) -> None:
    data = dataset(*four(X.astype(given)))
    assert data.x.dtype == kept
    assert data.x.tolist() == X.tolist()


@pytest.mark.parametrize("given", [np.uint8, np.int32, np.int64, bool])
def test_labels_are_converted_to_int64_and_counted(given: Any) -> None:
    data = dataset(*four(y=np.array([0, 1], given)))
    assert data.y.dtype == torch.int64
    assert data.classes == 2


def test_a_label_only_in_the_test_set_counts() -> None:
    assert dataset(*four(test_y=[0, 6])).classes == 7


def test_targets_that_are_not_classes() -> None:
    data = dataset(*four(y=np.ones((2, 4))))
    assert (data.y.dtype, data.classes) == (torch.float32, 0)


def test_arrays_that_cannot_be_shared_are_copied() -> None:
    """Read-only, reversed and transposed arrays are copied, without a warning."""
    frozen = X.copy()
    frozen.flags.writeable = False
    for x in (frozen, X[::-1], X.T.copy().T):
        assert np.array_equal(dataset(*four(x)).x, x)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (four(y=[0, 1, 2]), r"x has 2 examples and y has 3; the numbers must be equal"),
        (four(test_y=[0]), r"test_x has 2 examples and test_y has 1"),
        (four(X[:0], []), r"x is empty, with shape \(0, 3, 2, 2\)"),
        (four(np.uint8(3), 1), r"x is empty, with shape \(\)"),
        (four(np.full((2, 3), np.nan)), r"x contains NaN or infinity"),
        (four(torch.full((2, 3), float("inf"))), r"x contains NaN or infinity"),
        (four(np.full((2, 3), 1e300)), r"x contains NaN or infinity"),
        (four(y=[0.0, np.nan]), r"y contains NaN or infinity"),
        (four(y=[0, -1]), r"found label -1; labels must be 0 or more"),
        (four(y=np.array([None, 1])), r"y contains object; it must contain numbers"),
        (four(y=["cat", "dog"]), r"y contains <U3; it must contain numbers"),
        (four([[1], [1, 2]]), r"x is not an array of numbers"),
        (four(X * 1j), r"x contains complex128; it must contain numbers"),
        (four(torch.zeros(2, 3, dtype=torch.complex64)), r"x contains torch.complex64"),
        (four(test_x=X[:, :1]), r"uint8 of shape \(3, 2, 2\) in x and uint8 of shape \(1, 2, 2\) in test_x"),
        (
            four(test_x=X / 2),
            r"uint8 of shape .* in x and float32 of shape .* in test_x; dtypes and shapes must",
        ),
    ],
)
def test_bad_arrays_are_refused(arrays: tuple[Any, Any, Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"own: .*{message}"):
        dataset(*arrays)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 1}, r"found label 1; with 1 classes labels must be below 1"),
        ({"mean": (0.5, 0.5), "std": (1, 1)}, r"2 means and 2 stds given; x has 3 channels"),
        ({"std": (0.0,)}, r"all values must be above 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataset(*four(), **options)


def test_a_mean_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(ValueError, match="mean and std are for uint8 images"):
        dataset(*four(X / 255), mean=MEAN, std=STD)


def test_to_a_device_keeps_everything_else() -> None:
    data = dataset(*four(), mean=MEAN, std=STD, name="mine")
    moved = data.to("meta")
    assert (moved.x.device.type, moved.test_y.device.type) == ("meta", "meta")
    assert (moved.name, moved.classes, moved.mean, moved.std) == ("mine", 2, MEAN, STD)


def test_every_fifth_image_of_digits_is_in_the_test_set() -> None:
    digits = load("digits")
    assert (len(digits.x), len(digits.test_x), digits.shape, digits.classes) == (1437, 360, (64,), 10)
    assert (digits.x.dtype, digits.y.dtype) == (torch.float32, torch.int64)
    assert digits.checksum == "373542d2"  # in the records of all runs on digits


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    digits, bunch = load("digits"), load_digits()
    kept = np.arange(1797) % 5 != 0
    for ours, theirs in (
        (digits.x, bunch.data[kept] / 16),
        (digits.y, bunch.target[kept]),
        (digits.test_x, bunch.data[::5] / 16),
        (digits.test_y, bunch.target[::5]),
    ):
        assert np.array_equal(ours, theirs)


def test_files_of_arrays(tmp_path: Path) -> None:
    arrays = {"x": X, "y": np.array([0, 1]), "test_x": X[:1], "test_y": np.array([1])}
    np.savez(tmp_path / "own.npz", **arrays)  # type: ignore[arg-type]
    save_file({k: torch.from_numpy(v.copy()) for k, v in arrays.items()}, tmp_path / "own.safetensors")
    for file in ("own.npz", "own.safetensors"):
        data = load(str(tmp_path / file))
        assert (data.name, data.shape, data.classes) == (str(tmp_path / file), (3, 2, 2), 2)
        assert np.array_equal(data.x, X)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    np.savez(tmp_path / "part.npz", x=X, labels=[0, 1])
    np.savez(tmp_path / "objects.npz", x=X, y=np.array([None, 1]), test_x=X, test_y=[0, 1])
    (tmp_path / "damaged.npz").write_bytes(b"PK damaged")
    (tmp_path / "damaged.safetensors").write_bytes(b"damaged")
    for file, message in (
        ("part.npz", "needs arrays x, y, test_x and test_y, got x, labels"),
        ("objects.npz", "cannot be read"),
        ("damaged.npz", "cannot be read"),
        ("damaged.safetensors", "cannot be read"),
        ("missing.npz", "no such file"),
    ):
        with pytest.raises(DataError, match=f"{file}: {message}"):
            load(str(tmp_path / file))


def test_functions_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_data.py").write_text(
        "import numpy as np\n"
        "from fedshift.data import dataset\n"
        "x, y = np.zeros((3, 4)), [0, 1, 1]\n"
        "def as_tuple(): return x, y, x, y\n"
        "def as_dict(): return dict(x=x, y=y, test_x=x, test_y=y)\n"
        "def as_dataset(): return dataset(x, y, x, y, name='mine', classes=5)\n"
        "def as_nothing(): return None\n"
    )
    (tmp_path / "my_broken_data.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    assert load("my_own_data:as_tuple").classes == 2
    assert load("my_own_data:as_dict").shape == (4,)
    assert (load("my_own_data:as_dataset").name, load("my_own_data:as_dataset").classes) == ("mine", 5)
    for name, message in (
        ("my_own_data:as_nothing", "needs arrays x, y, test_x and test_y, got NoneType"),
        ("my_own_data:as_tupel", "no function 'as_tupel' in my_own_data; did you mean 'as_tuple'"),
        ("my_absent_data:f", "no module 'my_absent_data' in the current folder or on the Python path"),
        ("my_absent_data.inside:f", "no module 'my_absent_data.inside' in the current folder or on the Python path"),
    ):
        with pytest.raises(DataError, match=f"{name}: {message}"):
            load(name)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load("my_broken_data:f")


def test_unknown_and_absent_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    with pytest.raises(DataError, match="unknown data set 'cfar10'; did you mean 'cifar10'"):
        load("cfar10")
    with pytest.raises(DataError, match="unknown data set 'imagenet'; known are digits, cifar10, cifar100, mnist"):
        load("imagenet")
    with pytest.raises(DataError, match=r"cifar10 is not in .*; run `fedshift data cifar10` to fetch it"):
        load("cifar10")


def test_a_data_set_is_immutable() -> None:
    data = dataset(*four())
    with pytest.raises(AttributeError):
        data.name = "other"  # type: ignore[misc]
    assert isinstance(data, Dataset)
