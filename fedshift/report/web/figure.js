// A chart on the page: drawn when it is scrolled near, and again after changes.

const KINDS = {
  Curves: { draw: drawCurves, numbers: numbersOfCurves },
  Intervals: { draw: drawIntervals, numbers: numbersOfIntervals },
  Points: { draw: drawPoints, numbers: numbersOfPoints },
  Stacks: { draw: drawStacks, numbers: numbersOfStacks },
  Heat: { draw: drawHeat, numbers: numbersOfHeat },
  Histograms: { draw: drawHistograms, numbers: numbersOfHistograms },
};

// Key to the curves of one line.
function curveKey(chart) {
  const curves = chart.panels.flatMap((panel) => panel.curves).filter((curve) => curve.label);
  const first = [...new Map(curves.map((curve) => [curve.label, curve])).values()];
  const one = new Set(curves.map((curve) => curve.line)).size <= 1;
  const plain = (curve) => ({ hue: "c-plain", dash: curve.dashed ? "second" : "", mark: 0 });
  const look = (curve) => (one ? curveLook(chart, curve) : plain(curve));
  const entries = first.map((curve) => node("li", {}, stroke(look(curve)), curve.label));
  return entries.length ? node("ul", { class: "key" }, ...entries) : null;
}

function makeFigure(element) {
  const chart = DATA.charts[element.dataset.chart];
  const kind = KINDS[chart.kind];
  const curves = chart.kind === "Curves";
  const words = `${chart.title}: use arrow keys to read values${curves ? ", plus and minus to zoom" : ""}`;
  const role = { role: "group", "aria-roledescription": "chart", "aria-label": words };
  const box = node("div", { class: "plot", tabindex: 0, ...role });
  const tools = node("div", { class: "tools" });
  const key = node("div", {});
  const numbers = node("details", { class: "numbers" }, node("summary", {}, "Numbers"));
  const view = { zoom: null, at: null, spot: null, dragging: false };
  const figure = { element, chart, box, view, drawn: null, after: [], stale: true, near: false };
  element.append(tools, key, box, numbers);

  figure.draw = () => {
    const width = box.clientWidth;
    if (!width) return;
    figure.stale = false;
    figure.width = width;
    hideTip();
    figure.drawn = kind.draw(chart, width, view, element.dataset.chart);
    box.replaceChildren(figure.drawn.svg);
    const sign = curves ? curveKey(chart) : figure.drawn.key;
    key.replaceChildren(...(sign ? [sign] : []));
    figure.after.forEach((act) => act());
    if (numbers.open) write();
  };
  const write = () => numbers.replaceChildren(numbers.firstElementChild, ...kind.numbers(chart).map(numberTable));
  numbers.addEventListener("toggle", () => numbers.open && write());

  if (chart.rate) rateControl(figure, tools);
  if (curves) dragZoom(figure, tools);
  follow(figure, curves);
  return figure;
}

// Pointer, touch and keys.
function follow(figure, curves) {
  const { box } = figure;
  const point = (event) => {
    if (!figure.drawn || figure.view.dragging) return;
    if (curves) pointCurves(figure, ...placeIn(figure, event));
    else pointSpots(figure, event);
  };
  const clear = () => (curves ? clearReadout(figure) : clearSpot(figure));
  box.addEventListener("pointermove", point);
  box.addEventListener("pointerdown", point);
  box.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && clear()); // a readout by touch stays
  box.addEventListener("blur", clear);
  box.addEventListener("keydown", (event) => {
    if (!figure.drawn || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") clear();
    else if (/^(Arrow|Home$|End$)/.test(event.key)) (curves ? stepCurves : stepSpots)(figure, event.key);
    else if (curves && ACTS[event.key]) ACTS[event.key](figure);
    else return;
    event.preventDefault();
  });
}
