"""Engines: train clients one after another, in worker processes, or stacked on one device."""

from fedshift.engines.gpu.engine import Batched
from fedshift.engines.gpu.stacked import StackError
from fedshift.engines.processes import ForkError, Processes
from fedshift.engines.sequential import Sequential
from fedshift.rounds.engine import Engine, Job, Task, TrainingError, Upload

__all__ = [
    "Batched",
    "Engine",
    "ForkError",
    "Job",
    "Processes",
    "Sequential",
    "StackError",
    "Task",
    "TrainingError",
    "Upload",
]
