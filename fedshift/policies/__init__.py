"""Uplink policies: one paper, one file. A policy chooses the uplink of each client in every round."""

from fedshift.policies.adaquantfl import AdaQuantFL
from fedshift.policies.dadaquant import DAdaQuant
from fedshift.policies.deadline import Deadline
from fedshift.rounds.policy import Policy, PolicyStats

__all__ = ["AdaQuantFL", "DAdaQuant", "Deadline", "Policy", "PolicyStats"]
