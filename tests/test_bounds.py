"""Bounds on one client's influence: a minority cannot move them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift.algorithms.bounds import capped, median_integers, outliers, reference, refusal

NORMS = st.floats(1e-3, 1e3)
HOSTILE = st.floats(0, allow_infinity=True) | st.just(math.nan)


@given(st.lists(NORMS, min_size=2, max_size=9), st.lists(HOSTILE, max_size=8))
def test_a_minority_cannot_move_the_reference_beyond_the_honest_norms(honest: list[float], others: list[float]) -> None:
    others = others[: len(honest) - 1]
    assert min(honest) <= reference(honest + others) <= max(honest)


@given(st.lists(NORMS, min_size=2, max_size=9), st.lists(HOSTILE, max_size=8))
def test_accepted_uploads_of_a_minority_are_within_the_bound(honest: list[float], others: list[float]) -> None:
    others = others[: len(honest) - 1]
    norms = honest + others
    if len(norms) < 3:
        assert not any(outliers(norms, 20))
        return
    for norm, out in zip(norms, outliers(norms, 20), strict=True):
        assert out or norm <= 20 * max(honest)
        assert not out or not norm <= 20 * min(honest)


def test_hand_worked_outliers() -> None:
    """Norms 1, 2, 3, 4: their lower median is 2, so 40 is allowed and 41 is not."""
    assert outliers([1.0, 4.0, 2.0, 3.0, 41.0], 20) == [False] * 5  # lower median 3: up to 60
    assert outliers([1.0, 2.0, 3.0, 41.0], 20) == [False, False, False, True]
    assert outliers([1.0, 2.0, 3.0, 40.0], 20) == [False] * 4
    assert outliers([1.0, 2.0, 3.0, 41.0], 20, floor=2.1) == [False] * 4
    assert outliers([1.0, 2.0, math.nan, math.inf, 1.0], 20) == [False, False, True, True, False]


def test_if_most_norms_are_zero_the_floor_is_used_and_then_the_other_norms() -> None:
    assert outliers([0.0, 0.0, 0.0, 1e38], 20, floor=0.5) == [False, False, False, True]
    assert outliers([0.0, 0.0, 0.0, 9.0], 20, floor=0.5) == [False] * 4
    assert outliers([0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 50.0], 20) == [False] * 6 + [True]
    assert outliers([0.0, 0.0, 0.0], 20) == [False] * 3


def test_no_bound_without_a_majority_to_compare_with() -> None:
    assert outliers([1.0, 1e38], 20) == [False, False]
    assert capped([1.0, 1e18], 10) == [1.0, 1e18]


def test_weights_are_capped_at_a_multiple_of_their_median() -> None:
    assert capped([10.0, 30.0, 20.0, 900.0, 201.0], 10) == [10.0, 30.0, 20.0, 300.0, 201.0]
    assert capped([10.0, 30.0, 20.0, 900.0], 0) == [10.0, 30.0, 20.0, 900.0]
    assert capped([1.0] * 5, 1) == [1.0] * 5


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers_are_lower_medians_element_by_element(dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max
    stack = torch.tensor([[1, 9], [most, 8], [3, 7], [2, most]], dtype=dtype)
    assert median_integers(stack).tolist() == [2, 8]
    assert median_integers(stack).dtype == dtype


def test_booleans_are_those_of_the_majority() -> None:
    stack = torch.tensor([[True, True, False], [True, False, False], [False, True, True], [True, False, False]])
    assert median_integers(stack).tolist() == [True, False, False]


def test_a_refusal_names_the_norm_the_reference_and_the_bound() -> None:
    assert refusal("update", 60.0, 2.0, 20) == (
        "update norm 60 is 30 times the round's typical norm 2; at most 20 times is allowed"
    )
    assert "norm 5 is inf times" in refusal("update", 5.0, 0.0, 20)
    assert refusal("message", math.inf, 2.0, 20) == "message contains NaN, infinity or numbers too large to be squared"
