// Settings as points: score against bytes, with the Pareto front.

function shownFields(chart) {
  const fits = (value, axis) => given(value) && (!axis.log || value > 0);
  return chart.fields
    .map(({ title, points }) => ({
      title,
      points: points
        .filter((point) => shown(point.line) && fits(point.x, chart.x) && fits(point.y, chart.y))
        .sort((one, other) => one.x - other.x || one.y - other.y),
    }))
    .filter(({ points }) => points.length);
}

const pointEnds = ({ y, spread }) => [y - (spread ?? 0), y, y + (spread ?? 0)];

function pointSpot(chart, point, x, y) {
  const spread = given(point.spread) ? ` ± ${valueText(point.spread, chart.y)}` : "";
  const rows = [
    [swatch(point.line), chart.y.label, `${valueText(point.y, chart.y)}${spread}`],
    [null, chart.x.label, valueText(point.x, chart.x)],
    [null, "Pareto-optimal", point.front ? "yes" : "no"],
  ];
  return { x, y, title: named(point.line) || chart.title, rows };
}

function drawPoint(point, x, y, scale) {
  const look = lookOf(point.line);
  const group = shape("g", { class: `point ${look.hue}`, "data-line": point.line });
  if (given(point.spread)) {
    const [y1, y2] = [-1, 1].map((side) => round(scale(point.y + side * point.spread)));
    group.append(shape("line", { class: "spread", x1: x, x2: x, y1, y2 }));
  }
  if (point.front) group.append(shape("circle", { class: "optimal", cx: x, cy: y, r: 8.5 }));
  const mark = marker(look.mark || (look.dash === "dotdash" ? 4 : 1), x, y, 4.6);
  group.append(shape("path", { class: look.dash === "dashed" ? "mean hollow" : "mean", d: mark }));
  return group;
}

// Names beside points, where they fit.
function pointNames(placed, frame) {
  const group = shape("g", { class: "names" });
  const taken = placed.map(({ x, y }) => [x - 9, y - 9, x + 9, y + 9]);
  const meets = ([left, top, right, bottom]) =>
    taken.some((box) => left < box[2] && right > box[0] && top < box[3] && bottom > box[1]);
  for (const { point, x, y } of placed) {
    const text = named(point.line);
    const wide = textWidth(text, 11);
    const corners = [[x + 12, y + 4], [x - 12 - wide, y + 4], [x - wide / 2, y - 14], [x - wide / 2, y + 22]];
    const boxes = corners.map(([left, base]) => [left, base - 10, left + wide, base + 3]);
    const free = boxes.findIndex(
      (box) => !meets(box) && box[0] >= frame.left && box[2] <= frame.right && box[1] >= frame.top - 6,
    );
    if (!text || free < 0) continue;
    taken.push(boxes[free]);
    group.append(small(text, ...corners[free], { class: `end ${lookOf(point.line).hue}`, "data-line": point.line }));
  }
  return group;
}

function drawField(chart, { title, points }, frame, domain, ticks, spots) {
  const x = makeScale(...domain.x, frame.left, frame.right, chart.x.log);
  const y = makeScale(...domain.y, frame.bottom, frame.top, chart.y.log);
  const wide = frame.right - frame.left;
  const placed = points.map((point) => ({ point, x: round(x(point.x)), y: round(y(point.y)) }));
  const front = placed.filter(({ point }) => point.front).map((each) => [each.x, each.y]);
  const group = shape(
    "g",
    {},
    uprightAxis(frame, y, ticks, true),
    levelAxis(frame, x, ticksOf(x, chart.x, wide / 70)),
    label(title, frame.left, frame.top - 9, { class: "panel" }, wide),
    shape("path", { class: "front", d: front.length > 1 ? curvePath(front) : "" }),
    ...placed.map((each) => drawPoint(each.point, each.x, each.y, y)),
    wide >= 300 && LINES.size > 1 && pointNames(placed, frame),
  );
  for (const each of placed) {
    const spot = spots.push(pointSpot(chart, each.point, each.x, each.y)) - 1;
    group.append(shape("circle", { class: "hit", "data-spot": spot, cx: each.x, cy: each.y, r: 12 }));
  }
  return group;
}

function drawPoints(chart, width) {
  const fields = shownFields(chart);
  if (!fields.length) return { svg: nothingShown(width, chart.title), spots: [] };
  const domains = fields.map(({ points }) => ({
    x: roomyPoints(extent(points.map((point) => point.x)), chart.x),
    y: padded(extent(points.flatMap(pointEnds)), chart.y),
  }));
  const upright = domains.map(({ y }) => makeScale(...y, 1, 0, chart.y.log));
  const ticks = upright.map((scale) => ticksOf(scale, chart.y, 5));
  const frames = framesOf(fields, width, ticks, 14, true);
  const bottom = Math.max(...frames.map((frame) => frame.bottom));
  const svg = drawing(width, bottom + 40, pointsInWords(chart, fields));
  const spots = [];
  svg.append(label(axisTitle(upright[0], chart.y), 0, 12, { class: "title" }));
  fields.forEach((field, place) => svg.append(drawField(chart, field, frames[place], domains[place], ticks[place], spots)));
  const below = { class: "title", "text-anchor": "end" };
  svg.append(label(chart.x.label, frames.at(-1).right, bottom + 34, below));
  return { svg, spots, across: 1 };
}

// Wider margins than for curves: points have rings and names.
function roomyPoints([low, high], axis) {
  if (!axis.log) return padded([low, high], axis);
  const extra = Math.max((high / low) ** 0.12, 1.3);
  return [low / extra, high * extra];
}

function pointsInWords(chart, fields) {
  const all = fields.flatMap((field) => field.points);
  const front = all.filter((point) => point.front);
  const place = (point) => `${valueText(point.y, chart.y)} at ${valueText(point.x, chart.x)}`;
  const texts = front.slice(0, 6).map((point) => `${named(point.line)} ${place(point)}`);
  const rest = front.length > 6 ? `; and ${front.length - 6} more` : "";
  return `${chart.title}. ${all.length} settings; Pareto-optimal: ${texts.join("; ")}${rest}.`;
}
