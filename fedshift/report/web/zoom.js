// Zoom along x: drag over it, or + and - at the keyboard or beside the chart; y fits the visible range.

function setZoom(figure, low, high) {
  const { whole } = figure.drawn.domain;
  const [from, to] = [Math.max(Math.min(low, high), whole[0]), Math.min(Math.max(low, high), whole[1])];
  if (to - from < (whole[1] - whole[0]) * 1e-4) return;
  figure.view.zoom = from <= whole[0] && to >= whole[1] ? null : [from, to];
  figure.draw();
}

function resetZoom(figure) {
  if (!figure.drawn) return;
  figure.view.zoom = null;
  figure.draw();
}

// Keep this share of the visible range, around the readout or the middle; no effect before the chart is drawn.
function zoomBy(figure, share) {
  if (!figure.drawn?.domain) return;
  const { domain, log } = figure.drawn;
  const scale = makeScale(...domain.x, 0, 1, log);
  const at = figure.view.at?.x;
  const centre = given(at) && at >= domain.x[0] && at <= domain.x[1] ? scale(at) : 0.5;
  setZoom(figure, scale.back(centre * (1 - share)), scale.back(centre + (1 - centre) * share));
}

// Move by a quarter of the visible range.
function pan(figure, direction) {
  const { domain, log } = figure.drawn;
  const { whole, x } = domain;
  const scale = makeScale(...x, 0, 1, log);
  const space = direction < 0 ? -scale(whole[0]) : scale(whole[1]) - 1;
  const by = Math.min(0.25, space) * direction;
  setZoom(figure, scale.back(by), scale.back(1 + by));
}

const ACTS = {
  "+": (figure) => zoomBy(figure, 0.5),
  "=": (figure) => zoomBy(figure, 0.5),
  "-": (figure) => zoomBy(figure, 2),
  0: resetZoom,
};

function placeIn(figure, event) {
  const { left, top, width } = figure.drawn.svg.getBoundingClientRect();
  const scale = figure.drawn.svg.viewBox.baseVal.width / width;
  return [(event.clientX - left) * scale, (event.clientY - top) * scale];
}

function dragZoom(figure, tools) {
  const { box } = figure;
  let from = null;
  let cover = null;
  const drop = () => {
    cover?.remove();
    from = cover = null;
    figure.view.dragging = false;
  };
  box.addEventListener("pointerdown", (event) => {
    if (!figure.drawn) return;
    const [x, y] = placeIn(figure, event);
    const place = figure.drawn.domain ? panelAt(figure.drawn, x, y) : -1;
    if (event.pointerType === "touch") return; // touch reads values and scrolls the page
    if (event.button !== 0 || place < 0) return;
    from = { x, place };
    box.setPointerCapture(event.pointerId);
  });
  box.addEventListener("pointermove", (event) => {
    if (!from) return;
    const { frame } = figure.drawn.panels[from.place];
    const ends = [from.x, placeIn(figure, event)[0]].map((x) => between(x, frame.left, frame.right));
    ends.sort((one, other) => one - other);
    cover?.remove();
    cover = null;
    figure.view.dragging = ends[1] - ends[0] >= 6;
    if (!figure.view.dragging) return;
    clearReadout(figure);
    const size = { x: ends[0], width: ends[1] - ends[0], y: frame.top, height: frame.bottom - frame.top };
    cover = shape("rect", { class: "cover", ...size });
    figure.drawn.svg.append(cover);
  });
  box.addEventListener("pointerup", () => {
    const chosen = cover?.getBBox();
    const panel = from && figure.drawn.panels[from.place];
    drop();
    if (chosen) setZoom(figure, panel.scales.x.back(chosen.x), panel.scales.x.back(chosen.x + chosen.width));
  });
  box.addEventListener("pointercancel", drop);
  box.addEventListener("dblclick", () => resetZoom(figure));
  const name = figure.chart.title;
  const reset = button("reset", { "aria-label": `show all of ${name}` }, () => resetZoom(figure));
  tools.append(
    button("−", { "aria-label": `zoom out of ${name}`, class: "zoom" }, () => zoomBy(figure, 2)),
    button("+", { "aria-label": `zoom into ${name}`, class: "zoom" }, () => zoomBy(figure, 0.5)),
    reset,
  );
  figure.after.push(() => (reset.disabled = !figure.view.zoom));
}

const RATES = [
  ["1", "1 Mbit/s", 125e3],
  ["10", "10 Mbit/s", 125e4],
  ["100", "100 Mbit/s", 125e5],
  ["1 MB/s", "1 MB/s", 1e6],
];

// Uplink of charts against time, the same for all of them.
function rateControl(figure, tools) {
  const { chart } = figure;
  const megabits = node("input", { type: "number", min: 0, step: "any", inputmode: "decimal", size: 6 });
  const rateText = () => String(Number(((rateOf(chart) * 8) / 1e6).toPrecision(4)));
  const take = (rate) => {
    if (rate > 0 && Number.isFinite(rate)) state.rate = rate;
    megabits.value = rateText();
    changed();
  };
  megabits.value = rateText();
  megabits.addEventListener("change", () => take((Number(megabits.value) * 1e6) / 8));
  const presets = RATES.map(([name, words, rate]) => {
    const made = button(name, { class: "chip", "aria-label": `uplink ${words}` }, () => take(rate));
    figure.after.push(() => made.setAttribute("aria-pressed", String(Math.abs(rateOf(chart) / rate - 1) < 1e-6)));
    return made;
  });
  tools.append(
    node("span", { class: "rate" }, node("label", {}, "uplink ", megabits, " Mbit/s"), ...presets),
  );
  figure.after.push(() => (megabits.value = rateText()));
}
