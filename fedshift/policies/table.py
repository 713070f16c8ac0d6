"""Policies by the names that settings use."""

from collections.abc import Callable

from fedshift.policies.adaquantfl import AdaQuantFL
from fedshift.policies.dadaquant import DAdaQuant
from fedshift.policies.deadline import Deadline
from fedshift.rounds.policy import Policy

POLICIES: dict[str, Callable[..., Policy]] = {
    "adaquantfl": AdaQuantFL,
    "dadaquant": DAdaQuant,
    "deadline": Deadline,
}
