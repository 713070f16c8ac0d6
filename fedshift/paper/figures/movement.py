"""Figure 9: layer by layer, how far the model moves between rounds (top) and how far clients drift from it (bottom)."""

from operator import methodcaller

from fedshift.core.files import RunError
from fedshift.paper.figures.records import Source
from fedshift.paper.figures.rounds import caption, coloured, fitting, plot
from fedshift.paper.figures.style import PAGE, Drawn, footnote, legend, sheet

ROWS = {
    "step": "between rounds,\n" + r"$|\hat{w}^{t}-\hat{w}^{t-1}|$",
    "drift": "client drift,\n" + r"mean of $|w_k^{t}-\hat{w}^{t-1}|$",
}


def draw(source: Source) -> Drawn:
    panel = source.pair._replace(exact=None)
    every = panel.lines[0].records[0].layers("step")
    if not every:
        raise RunError(f"{panel.lines[0].records[0].folder}: records no layers, which figure 9 is about")
    layers = fitting(every)
    figure = sheet(PAGE, 3.3)
    grid = figure.subplots(len(ROWS), len(layers), sharex=True, squeeze=False)
    for row, (name, what) in enumerate(ROWS.items()):
        for axes, layer in zip(grid[row], layers, strict=True):
            of = methodcaller("series", f"{name}.{layer}")
            late = [x for line, colour in coloured(panel) for x in plot(axes, line, of, colour)]
            axes.set_ylim(0, 1.2 * max(late, default=1.0))
            if not row:
                axes.set_title(layer.removesuffix(".weight"))
            else:
                axes.set_xlabel("round")
        grid[row, 0].set_ylabel(what)
    legend(figure, grid.flat)
    some = "" if layers == every else f"; {len(layers)} of {len(every)} layers"
    footnote(figure, f"{panel.title}. {caption(source, [panel], some)}")
    return Drawn(figure, source.drawn([panel]))
