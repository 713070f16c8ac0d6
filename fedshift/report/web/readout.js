// Values of curves at one x: by pointer, by touch, and by arrow keys.

// A phone shows fewer rows, and only values.
const most = () => (narrow() ? 6 : 10);

function nearest(points, x, scale) {
  let best = null;
  let distance = Infinity;
  for (const point of points) {
    if (!point || point[0] < scale.low || point[0] > scale.high) continue;
    const away = Math.abs(scale(point[0]) - scale(x));
    if (away < distance) [best, distance] = [point, away];
  }
  return best && { point: best, distance };
}

// All x of the curves of a panel within the zoom.
function places({ curves, scales }) {
  const all = curves.flatMap((each) => each.points.filter(Boolean).map(([x]) => x));
  return [...new Set(all)].filter((x) => x >= scales.x.low && x <= scales.x.high).sort((one, other) => one - other);
}

// Values of curves at x, with their own x if it differs. height: of the pointer, if there is one.
function valuesAt(panel, x, height) {
  const reach = Math.max(12, (panel.frame.right - panel.frame.left) / 40);
  const found = panel.curves
    .map((each) => ({ each, ...nearest(each.points, x, panel.scales.x) }))
    .filter(({ point, distance }) => point && distance <= reach);
  const away = ({ point }) => Math.abs(panel.scales.y(point[1]) - height);
  if (height !== null) found.sort((one, other) => away(one) - away(other));
  const first = height === null ? null : found[0];
  const rows = found.slice(0, most()).sort((one, other) => other.point[1] - one.point[1]);
  return { rows, first, more: found.length - rows.length };
}

function rowText(chart, { point }, x) {
  const [at, y, low, high] = point;
  if (narrow()) return valueText(y, chart.y);
  const band = `(${valueText(low, chart.y)} to ${valueText(high, chart.y)})`;
  const around = given(low) && given(high) && low < high ? ` ${band}` : "";
  const where = Math.abs(at - x) > Math.abs(x) * 1e-9 ? ` at ${valueText(at, chart.x)}` : "";
  return `${valueText(y, chart.y)}${around}${where}`;
}

function crossAt(panel, x, rows) {
  const at = round(panel.scales.x(x));
  const group = shape("g", { class: "cross" });
  group.append(shape("line", { x1: at, x2: at, y1: panel.frame.top, y2: panel.frame.bottom }));
  for (const { each, point } of rows) {
    const spot = { cx: round(panel.scales.x(point[0])), cy: round(panel.scales.y(point[1])), r: 3.5 };
    group.append(shape("circle", { class: each.look.hue, ...spot }));
  }
  return group;
}

// Shows the readout at x of a panel; spoken when keys moved it there.
function readCurves(figure, place, x, height = null) {
  const { drawn, chart, box } = figure;
  const panel = drawn.panels[place];
  clearReadout(figure);
  const { rows, first, more } = valuesAt(panel, x, height);
  if (!rows.length) return;
  figure.view.at = { place, x };
  drawn.svg.append(crossAt(panel, x, rows));
  const items = rows.map((row) => {
    const name = row.each.name || chart.y.label;
    const bold = row === first && rows.length > 1;
    return [stroke(row.each.look), bold ? node("b", {}, name) : name, rowText(chart, row, x)];
  });
  const title = [panel.title, `${chart.x.label} ${valueText(x, chart.x)}`].filter(Boolean).join(" · ");
  const rest = more > 0 ? `and ${more} more` : "";
  const { left, top } = box.getBoundingClientRect();
  showTip(left + panel.scales.x(x), top + (height ?? panel.frame.top + 30), title, items, rest);
  if (height === null) announce(title, rows.map((row, number) => [null, row.each.name, items[number][2]]), rest);
}

function clearReadout({ drawn }) {
  drawn?.svg.querySelector(".cross")?.remove();
  hideTip();
}

// The panel at a position of the drawing.
function panelAt(drawn, x, y) {
  return drawn.panels.findIndex(
    ({ frame }) => x >= frame.left - 12 && x <= frame.right + 12 && y >= frame.top - 12 && y <= frame.bottom + 12,
  );
}

function pointCurves(figure, x, y) {
  const place = panelAt(figure.drawn, x, y);
  if (place < 0) return clearReadout(figure);
  const panel = figure.drawn.panels[place];
  const wanted = panel.scales.x.back(between(x, panel.frame.left, panel.frame.right));
  const near = panel.curves.map((each) => nearest(each.points, wanted, panel.scales.x)).filter(Boolean);
  if (!near.length) return clearReadout(figure);
  near.sort((one, other) => one.distance - other.distance);
  readCurves(figure, place, near[0].point[0], y);
}

// Left and right go from value to value, up and down from panel to panel.
function stepCurves(figure, key) {
  const { drawn, view } = figure;
  if (!drawn.panels.length) return;
  const count = drawn.panels.length;
  let place = Math.min(view.at?.place ?? 0, count - 1);
  if (key === "ArrowUp") place = (place + count - 1) % count;
  if (key === "ArrowDown") place = (place + 1) % count;
  const all = places(drawn.panels[place]);
  if (!all.length) return;
  let index = view.at ? all.findIndex((x) => x >= view.at.x * (1 - 1e-9)) : -1;
  if (index < 0) index = view.at ? all.length - 1 : key === "ArrowLeft" ? all.length : -1;
  if (key === "ArrowLeft") index -= 1;
  if (key === "ArrowRight") index += 1;
  if (key === "Home") index = 0;
  if (key === "End") index = all.length - 1;
  if (view.zoom && (index < 0 || index >= all.length)) return pan(figure, index < 0 ? -1 : 1);
  readCurves(figure, place, all[between(index, 0, all.length - 1)]);
}
