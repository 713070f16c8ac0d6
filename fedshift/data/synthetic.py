"""Synthetic(alpha, beta): classification tasks of clients whose models and inputs differ.

    W_k, b_k ~ N(u_k, 1),  u_k ~ N(0, alpha)       model of client k, 60 features and 10 classes
    x ~ N(v_k, diag(j^-1.2)),  v_k ~ N(B_k, 1),  B_k ~ N(0, beta)
    y = argmax(x W_k + b_k)

The second argument of N is a standard deviation, except for the covariance of x. Client k has 50 + floor(e^z) examples,
z ~ N(4, 2), of which the last tenth are for testing. beta says how much the inputs of clients differ; their models
differ anyway. alpha has no effect: u_k adds the same number to the scores of all classes. It is kept because the task
is known by both numbers, mostly as Synthetic(1, 1).

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020, section 5.1,
with the sizes and the split of the authors' code, which draws without a seed.
"""

from typing import Any

import numpy as np

from fedshift.data.catalog import DataError

FEATURES, CLASSES = 60, 10
TRAIN = 0.9  # share of a client's examples
MOST = 10_000  # clients


def synthetic(alpha: float = 1.0, beta: float = 1.0, clients: int = 30, seed: int = 0) -> dict[str, Any]:
    """Arrays x, y, test_x, test_y, owner and test_owner; the same for the same arguments.

    >>> arrays = synthetic()
    >>> arrays["x"].shape, arrays["test_x"].shape, np.bincount(arrays["owner"])[:4].tolist()
    ((20101, 60), (2248, 60), [1718, 153, 392, 4388])
    """
    for name, value in (("alpha", alpha), ("beta", beta)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1000:
            raise DataError(f"args.{name} = {value!r}: must be a number from 0 to 1000")
    for name, count, least, most in (("clients", clients, 1, MOST), ("seed", seed, 0, 2**32 - 1)):
        if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= most:
            raise DataError(f"args.{name} = {count!r}: must be a whole number from {least} to {most:,}")
    draw = np.random.RandomState(seed)  # whose draws do not change with the version of numpy
    sizes = draw.lognormal(4, 2, clients).astype(int) + 50
    model_mean, input_mean = draw.normal(0, alpha, clients), draw.normal(0, beta, clients)
    centre = draw.normal(input_mean[:, None], 1, (clients, FEATURES))
    deviation = np.arange(1, FEATURES + 1) ** -0.6
    parts: dict[str, list[Any]] = {key: [] for key in ("x", "y", "test_x", "test_y", "owner", "test_owner")}
    for k, (size, mean) in enumerate(zip(sizes.tolist(), model_mean, strict=True)):
        w, b = draw.normal(mean, 1, (FEATURES, CLASSES)), draw.normal(mean, 1, CLASSES)
        x = centre[k] + deviation * draw.standard_normal((size, FEATURES))
        y, owner, cut = (x @ w + b).argmax(1), np.full(size, k), int(TRAIN * size)
        for key, array in (("x", x.astype(np.float32)), ("y", y), ("owner", owner)):
            parts[key].append(array[:cut])
            parts[f"test_{key}"].append(array[cut:])
    return {key: np.concatenate(arrays) for key, arrays in parts.items()}
