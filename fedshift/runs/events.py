"""Events of a run that is trained in another process."""

from typing import NamedTuple, Self

from fedshift.rounds.federation import Outcome


class Event(NamedTuple):
    """Round, message, end or failure of a run."""

    kind: str  # 'round', 'message', 'done', 'stopped', 'failed'
    text: str = ""
    number: int = 0
    score: float | None = None
    loss: float | None = None
    bytes_up: int = 0
    place: int = 0  # index of the run in a grid

    @classmethod
    def of(cls, outcome: Outcome, place: int = 0) -> Self:
        return cls("round", "", outcome.number, outcome.accuracy, outcome.loss, sum(outcome.bytes_up), place)
