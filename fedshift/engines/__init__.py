"""Where clients live: one after another, on every core, or all at once."""

from fedshift.engines.base import Engine, Job, Task, TrainingError, Upload
from fedshift.engines.batched import Batched
from fedshift.engines.processes import ForkError, Processes
from fedshift.engines.sequential import Sequential
from fedshift.engines.stacked import StackError

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
