"""What a run that somebody watches from another process has to tell."""

from typing import NamedTuple, Self

from fedshift.rounds.federation import Outcome


class Event(NamedTuple):
    """A round, a sentence, its end, or why it failed."""

    kind: str  # 'round', 'told', 'done', 'stopped', 'failed'
    text: str = ""
    number: int = 0
    score: float | None = None
    loss: float | None = None
    bytes_up: int = 0
    place: int = 0  # of the run, in a grid

    @classmethod
    def of(cls, outcome: Outcome, place: int = 0) -> Self:
        return cls("round", "", outcome.number, outcome.accuracy, outcome.loss, sum(outcome.bytes_up), place)
