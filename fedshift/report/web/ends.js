// Labels inside a chart: at the ends of curves, and at the expected level.

// Names at the ends of curves, moved apart where they would overlap.
function endLabels({ curves, frame, scales }, space) {
  const group = shape("g", { class: "ends" });
  const ends = curves
    .map((each) => ({ each, last: each.points.findLast((point) => point && point[0] <= scales.x.high) }))
    .filter(({ last }) => last)
    .map(({ each, last }) => ({ each, x: scales.x(last[0]), y: between(scales.y(last[1]), frame.top, frame.bottom) }))
    .sort((one, other) => one.y - other.y);
  const step = 15;
  ends.forEach((end, place) => {
    end.at = Math.max(end.y, place ? ends[place - 1].at + step : frame.top);
  });
  for (let place = ends.length - 1, floor = frame.bottom; place >= 0; place -= 1, floor -= step) {
    ends[place].at = Math.min(ends[place].at, floor);
  }
  for (const { each, x, y, at } of ends) {
    const leader = { x1: round(x) + 5, y1: round(y), x2: frame.right + 5, y2: at };
    if (x < frame.right - 15) group.append(shape("line", { class: "leader", ...leader }));
    const look = { class: `end ${each.look.hue}`, "data-line": each.curve.line };
    group.append(label(each.name, frame.right + 8, at + 4, look, space - 10));
  }
  return group;
}

function drawLevel(chart, frame, scales) {
  const y = round(scales.y(chart.level));
  return shape("g", { class: "level" }, shape("line", { x1: frame.left, x2: frame.right, y1: y, y2: y }));
}

// At the end, and on the side of the line, where curves are furthest away.
function levelLabel(chart, { curves, frame, scales }) {
  const text = `expected ${valueText(chart.level, chart.y)}`;
  const wide = textWidth(text, 11);
  const line = scales.y(chart.level);
  const points = curves.flatMap((each) => each.points.filter(Boolean).map(([x, y]) => [scales.x(x), scales.y(y)]));
  const corners = [frame.right - wide, frame.left + 2].flatMap((x) => [[x, line - 4], [x, line + 13]]);
  const clear = ([x, y]) =>
    Math.min(...points.filter(([at]) => at > x - 8 && at < x + wide + 8).map(([, at]) => Math.abs(at - y + 4)), 60);
  const [x, y] = corners.reduce((best, place) => (clear(place) > clear(best) ? place : best));
  return shape("g", { class: "level" }, small(text, x, y));
}
