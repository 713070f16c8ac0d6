"""Where clients live: one after another, or on every core."""

from fedshift.engines.base import Engine, Job, Task, TrainingError, Upload
from fedshift.engines.processes import ForkError, Processes
from fedshift.engines.sequential import Sequential

__all__ = ["Engine", "ForkError", "Job", "Processes", "Sequential", "Task", "TrainingError", "Upload"]
