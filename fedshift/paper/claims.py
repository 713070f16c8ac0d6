"""The paper's claims, each answered from the records: yes, no or not tested, with the figures beside it.

Each function says in its first line what makes the answer a yes. Where some of a claim's cells were not run, the others
answer it, and the figures show which they are.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedshift.paper import by_accuracy, by_movement
from fedshift.paper.by_accuracy import Told
from fedshift.paper.records import Results
from fedshift.paper.tables import Listing
from fedshift.paper.uplinks import Upload

NOT_TESTED = "not tested"


class Answer(NamedTuple):
    claim: str
    answer: str  # yes, no, not tested
    why: str = ""


CLAIMS: list[tuple[str, Callable[[Results], Told]]] = [
    ("the shift helps in every cell", by_accuracy.shift_helps),
    ("accuracy rises with bits, then saturates", by_accuracy.more_bits),
    ("5-bit FedShift beats full-precision FedAvg", by_accuracy.five_bits),
    ("FedAvg is lowest", by_accuracy.fedavg_lowest),
    ("Fed-EF is best at 4 bits", by_accuracy.feedback_best),
    ("SCAFFOLD is best elsewhere", by_accuracy.scaffold_best),
    ("all are alike at 8 bits", by_accuracy.alike_at_eight),
    ("predictions lean to the quantized clients' labels", by_movement.leans),
    ("mixed precision itself is the cause", by_movement.precision_is_the_cause),
    ("the shift evens predictions out", by_movement.evens_out),
    ("divergence between rounds shrinks", by_movement.smaller("step")),
    ("client drift shrinks", by_movement.smaller("drift")),
    ("the mean weight goes to zero", by_movement.mean_to_zero),
    ("uniform matches K-means from 6 bits", by_accuracy.uniform_matches),
    ("uniform fails at 4 bits", by_accuracy.uniform_fails),
]


def answers(results: Results, uploads: Sequence[Upload] = ()) -> list[Answer]:
    """All of them; `uploads` are the codecs as they were measured."""
    made = [Answer(claim, *(function(results) or (NOT_TESTED,))) for claim, function in CLAIMS]
    told = by_accuracy.advice(results, uploads) or (NOT_TESTED,)
    return [*made, Answer("the advice: 8-bit uniform on good links, 4-bit K-means on poor ones", *told)]


def listing(made: Sequence[Answer]) -> Listing:
    return Listing("The paper's claims", ("claim", "answer", "figures"), list(map(tuple, made)), 3)
