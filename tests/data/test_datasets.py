"""Data sets: arrays are checked and normalised, and found by name, path or function."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedshift.data import DataError, Dataset, dataset, load
from fedshift.experiment.build import build
from tests.federations import settings

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


def test_owners_are_numbered_in_the_order_of_their_ids() -> None:
    x = np.zeros((4, 2))
    data = dataset(x, [0, 1, 0, 1], x[:2], [0, 1], owner=["b", "a", "b", "z"], test_owner=["z", "c"])
    assert data.owner is not None
    assert data.test_owner is not None
    assert (data.owners, data.owner.tolist(), data.test_owner.tolist()) == (("a", "b", "c", "z"), [1, 0, 1, 3], [3, 2])
    numbers = dataset(x, [0, 1, 0, 1], x[:2], [0, 1], owner=torch.tensor([70, -3, 70, 5], dtype=torch.int32))
    assert numbers.owner is not None
    assert (numbers.owners, numbers.owner.tolist(), numbers.test_owner) == (("-3", "5", "70"), [2, 0, 2, 1], None)


def test_owners_are_part_of_the_checksum() -> None:
    made = [dataset(*four(), owner=owner) for owner in ([0, 1], [1, 1], None)]
    assert len({data.checksum for data in made}) == 3
    assert made[2].checksum == dataset(*four()).checksum


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ({"owner": [0]}, "own: owner has 1 values for 2 examples"),
        ({"owner": [0, 1], "test_owner": [0]}, "own: test_owner has 1 values for 2 examples"),
        ({"test_owner": [0, 1]}, "own: has test_owner and no owner"),
        ({"owner": [0.5, 1]}, "own: owner has float64 of shape"),
        ({"owner": [[0], [1]]}, r"own: owner has int64 of shape \(2, 1\)"),
        ({"owner": [0, 1], "test_owner": ["a", "b"]}, "both must be of one kind"),
        ({"owner": [b"a", b"\xe4"]}, r"own: owner has b'\\xe4', which is not text in UTF-8"),
        ({"owner": np.array([1, 2**63], np.uint64)}, "own: owner has 9223372036854775808; .* below 2\\^63"),
    ],
)
def test_wrong_owners_are_refused(owners: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataset(*four(), **owners)


def test_files_may_have_owners(tmp_path: Path) -> None:
    arrays = dict(zip(("x", "y", "test_x", "test_y"), four(y=np.array([0, 1])), strict=True))
    np.savez(tmp_path / "a.npz", **arrays, owner=np.array(["Ann", "Bob"]), test_owner=np.array([b"Bob", b"Bob"]))
    data = load(str(tmp_path / "a.npz"))
    assert data.test_owner is not None
    assert (data.owners, data.test_owner.tolist()) == (("Ann", "Bob"), [1, 1])
    tensors = {name: torch.tensor(np.asarray(x)) for name, x in arrays.items()}
    save_file(tensors | {"owner": torch.tensor([9, 4])}, tmp_path / "b.safetensors")
    stored = load(str(tmp_path / "b.safetensors"))
    assert stored.owner is not None
    assert (stored.owners, stored.owner.tolist()) == (("4", "9"), [1, 0])


def test_pickled_owners_are_refused(tmp_path: Path) -> None:
    arrays = dict(zip(("x", "y", "test_x", "test_y"), four(y=np.array([0, 1])), strict=True))
    np.savez(tmp_path / "a.npz", **arrays, owner=np.array(["Ann", None], dtype=object))
    with pytest.raises(DataError, match="cannot be read"):
        load(str(tmp_path / "a.npz"))


def client(path: Path, n: int, tests: int = 0, **changed: Any) -> None:
    arrays: dict[str, Any] = {"x": np.full((n, 3), n, np.float32), "y": np.arange(n) % 2}
    if tests:
        arrays |= {"test_x": np.full((tests, 3), -n, np.float32), "test_y": np.arange(tests) % 2}
    arrays |= changed
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        save_file({name: torch.from_numpy(x) for name, x in arrays.items()}, path)


def test_a_folder_has_one_client_per_file_in_the_order_of_names(tmp_path: Path) -> None:
    client(tmp_path / "lisa.npz", 4)
    client(tmp_path / "bart.safetensors", 2, tests=3)
    client(tmp_path / "maggie.npz", 1, tests=1)
    (tmp_path / "README.txt").write_text("not a client")
    data = load(f"{tmp_path}/")
    assert data.owner is not None
    assert data.test_owner is not None
    assert data.owners == ("bart", "lisa", "maggie")
    assert data.owner.tolist() == [0, 0, 1, 1, 1, 1, 2]
    assert data.test_owner.tolist() == [0, 0, 0, 2]
    assert data.x[:, 0].tolist() == [2, 2, 4, 4, 4, 4, 1]
    assert data.test_x[:, 0].tolist() == [-2, -2, -2, -1]


def test_a_client_of_a_folder_may_have_no_examples(tmp_path: Path) -> None:
    client(tmp_path / "bart.npz", 0, x=np.zeros((0, 3)), y=np.zeros(0))
    client(tmp_path / "lisa.npz", 4, tests=2)
    client(tmp_path / "maggie.npz", 0, tests=1)
    data = load(str(tmp_path))
    assert data.owner is not None
    assert data.test_owner is not None
    assert data.owners == ("bart", "lisa", "maggie")
    assert (data.owner.tolist(), data.test_owner.tolist()) == ([1, 1, 1, 1], [1, 1, 2])
    natural = {"clients": 0, "partition": "natural", "least": 0}
    fed = build(settings(data=natural, train={"cohort": 1}), data=data)
    assert fed.partition.owners is not None
    assert (fed.partition.owners.tolist(), fed.partition.left_out) == ([1], 2)
    client(tmp_path / "lisa.npz", 0)
    with pytest.raises(DataError, match="none of 3 files has training examples"):
        load(str(tmp_path))


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_owners_in_a_file_of_a_folder_are_refused(tmp_path: Path, name: str) -> None:
    client(tmp_path / name, 2, tests=1, owner=np.arange(2))
    with pytest.raises(DataError, match=rf"{name}: contains owner; in a folder, each file is one client"):
        load(str(tmp_path))


def test_clients_of_a_folder_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        load(f"{tmp_path}/nothing")
    with pytest.raises(DataError, match=r"contains no .npz or .safetensors file; needs one per client"):
        load(str(tmp_path))
    client(tmp_path / "a.npz", 2)
    with pytest.raises(DataError, match="no file has test_x and test_y"):
        load(str(tmp_path))
    client(tmp_path / "b.npz", 2, tests=1, x=np.zeros((2, 4), np.float32))
    with pytest.raises(
        DataError, match=r"b.npz: x has float32 of shape \(4,\); in a.npz it is float32 of shape \(3,\)"
    ):
        load(str(tmp_path))
    client(tmp_path / "b.npz", 2, test_x=np.zeros((1, 3), np.float32))
    with pytest.raises(
        DataError, match=r"b.npz: needs arrays x and y, and optionally test_x and test_y, got x, y, test_x"
    ):
        load(str(tmp_path))
    np.savez(tmp_path / "b.npz", x=np.zeros(3))
    with pytest.raises(DataError, match=r"b.npz: needs arrays x and y, and .*, got x"):
        load(str(tmp_path))
    client(tmp_path / "b.npz", 2, tests=1, y=np.zeros(3, np.int64))
    with pytest.raises(DataError, match=r"b.npz: x has 2 examples and y has 3; the numbers must be equal"):
        load(str(tmp_path))
    client(tmp_path / "b.npz", 2, tests=1)
    client(tmp_path / "b.safetensors", 2)
    with pytest.raises(DataError, match="two files are named b"):
        load(str(tmp_path))


def test_tokens_of_any_integer_type_become_int64() -> None:
    data = dataset(*four(X.astype(np.int64)))
    assert data.inputs(data.x.to(torch.int8)).dtype == torch.int64
    assert data.inputs(data.x) is data.x


def test_a_label_that_would_mean_millions_of_classes_is_refused() -> None:
    x, y = np.zeros((2, 3)), np.array([0, 3_000_000_000])
    with pytest.raises(ValueError, match=r"found label 3,000,000,000; .* may be 1,000,000\. Number the classes"):
        dataset(x, y, x, y)
    assert dataset(x, [0, 999_999], x, [0, 1]).classes == 1_000_000
