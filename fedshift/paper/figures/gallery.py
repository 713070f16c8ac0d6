"""Which room draws which figure."""

from collections.abc import Callable

from fedshift.paper.figures import (
    curves,
    fence,
    movement,
    partitions,
    predictions,
    quantizing,
    shifting,
    system,
    training,
)
from fedshift.paper.figures.records import Source
from fedshift.paper.figures.style import Drawn

MADE: dict[int, Callable[[], Drawn]] = {
    1: system.draw,
    2: quantizing.draw,
    3: training.draw,
    4: shifting.draw,
    6: partitions.main,
    10: partitions.dirichlet,
}
RECORDED: dict[int, Callable[[Source], Drawn]] = {
    5: fence.draw,
    7: curves.draw,
    8: predictions.draw,
    9: movement.draw,
}
