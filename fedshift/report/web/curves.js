// Curves: panels side by side with the same axes, what is shown of them decided by the legend and the zoom.

// What tells curves apart besides their lines; where there is one line only, it decides the colour.
function curveLook(chart, curve) {
  const all = chart.panels.flatMap((panel) => panel.curves);
  const labels = [...new Set(all.map((each) => each.label))];
  const place = labels.indexOf(curve.label);
  if (labels.length > 1 && new Set(all.map((each) => each.line)).size === 1) {
    return { hue: `c${place % COLOURS}`, dash: curve.dashed ? "second" : "", mark: Math.floor(place / COLOURS) % (MARKS + 1) };
  }
  const look = lookOf(curve.line);
  return { ...look, dash: curve.dashed ? `${look.dash} second` : look.dash };
}

const curveName = (curve) => [named(curve.line), curve.label].filter(Boolean).join(", ");

// The curves of a panel that are shown, as points [x, y, low, high] with null where there is nothing to draw.
function seen(chart, panel) {
  const wide = stretch(chart);
  const fits = (value, axis) => given(value) && (!axis.log || value > 0);
  return panel.curves
    .filter((curve) => shown(curve.line))
    .map((curve) => {
      const points = DATA.shared[curve.x].map((x, place) => {
        const y = curve.y[place];
        if (!fits(y, chart.y) || !fits(x, chart.x)) return null;
        return [x * wide, y, curve.low?.[place] ?? null, curve.high?.[place] ?? null];
      });
      return { curve, points, look: curveLook(chart, curve), name: curveName(curve) };
    })
    .filter(({ points }) => points.some(Boolean));
}

// Panels whose curves are all hidden make room for others.
function shownPanels(chart) {
  const panels = chart.panels.map((panel) => ({ title: panel.title, curves: seen(chart, panel) }));
  return panels.filter((panel) => panel.curves.length);
}

// Marks are for curves that colour and dash do not tell apart.
function alike(curves) {
  const looks = curves.map(({ look }) => `${look.hue} ${look.dash}`);
  return new Set(looks).size < looks.length;
}

function domains(chart, panels, zoom) {
  const points = panels.flatMap((curves) => curves.flatMap((each) => each.points.filter(Boolean)));
  const whole = extent(points.map(([x]) => x));
  if (!whole) return null;
  const x = zoom ?? (whole[0] < whole[1] ? whole : roomy(whole, chart.x));
  const within = points.filter((point) => point[0] >= x[0] && point[0] <= x[1]);
  const values = (within.length ? within : points).flatMap(([, ...rest]) => rest);
  const positive = chart.y.log ? values.filter((value) => value > 0) : values;
  if (given(chart.level)) positive.push(chart.level);
  return { whole, x, y: roomy(extent(positive), chart.y) };
}

function endLabels(curves, frame, scales, room) {
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
    group.append(
      label(each.name, frame.right + 8, at + 4, { class: `end ${each.look.hue}`, "data-line": each.curve.line }, room - 10),
    );
  }
  return group;
}

function drawCurve({ curve, points, look }, scales, marked) {
  const low = (value) => scales.y(scales.y.log ? Math.max(value, scales.y.low) : value);
  const at = points.map((point) => point && [scales.x(point[0]), scales.y(point[1])]);
  const group = shape("g", { class: look.hue, "data-line": curve.line });
  if (curve.low) {
    const around = points.map((point) =>
      point && given(point[2]) && given(point[3]) ? [scales.x(point[0]), low(point[2]), low(point[3])] : null,
    );
    group.append(shape("path", { class: "band", d: bandPath(around) }));
  }
  group.append(shape("path", { class: `curve ${look.dash}${marked ? " thin" : ""}`, d: curvePath(at) }));
  const marks = marksPath(at, marked ? look.mark : 0);
  if (marks) group.append(shape("path", { class: "mark", d: marks }));
  return group;
}

function drawLevel(chart, frame, scales) {
  const y = round(scales.y(chart.level));
  return shape("g", { class: "level" }, shape("line", { x1: frame.left, x2: frame.right, y1: y, y2: y }));
}

// At the end, and on the side of the line, where curves are furthest away.
function levelLabel(chart, curves, frame, scales) {
  const text = `expected ${tell(chart.level, chart.y)}`;
  const wide = textWidth(text, 11);
  const line = scales.y(chart.level);
  const points = curves.flatMap((each) => each.points.filter(Boolean).map(([x, y]) => [scales.x(x), scales.y(y)]));
  const places = [frame.right - wide, frame.left + 2].flatMap((x) => [[x, line - 4], [x, line + 13]]);
  const clear = ([x, y]) =>
    Math.min(...points.filter(([at]) => at > x - 8 && at < x + wide + 8).map(([, at]) => Math.abs(at - y + 4)), 60);
  const [x, y] = places.reduce((best, place) => (clear(place) > clear(best) ? place : best));
  return shape("g", { class: "level" }, label(text, x, y, {}, Infinity, 11));
}

// Where every panel is: a row of them has one upright axis, at its left.
function framesOf(panels, width, ticks, room) {
  const count = panels.length;
  const columns = columnsFor(count, width, 250);
  const gap = 22;
  const left = tickRoom(ticks);
  const each = (width - left - room - gap * (columns - 1)) / columns;
  const height = count === 1 ? between(each * 0.5, 210, 350) : between(each * 0.72, 150, 240);
  const head = panels.some((panel) => panel.title) ? 24 : 8;
  return panels.map((_, place) => {
    const x = left + (place % columns) * (each + gap);
    const top = 20 + head + Math.floor(place / columns) * (height + head + 34);
    return { left: x, right: x + each, top, bottom: top + height, first: place % columns === 0 };
  });
}

// The drawing, and what a readout needs to know of it.
function drawCurves(chart, width, view, id) {
  const filled = shownPanels(chart);
  const panels = filled.map((panel) => panel.curves);
  const domain = domains(chart, panels, view.zoom);
  if (!domain) return { svg: nothingShown(width, chart.title), panels: [] };
  const upright = makeScale(...domain.y, 1, 0, chart.y.log);
  const ticks = ticksOf(upright, chart.y, 5);
  const few = panels.length === 1 && panels[0].length <= 8 && width >= 560 && panels[0].every((each) => each.name);
  const longest = few && panels[0].length > 1 ? Math.max(...panels[0].map((each) => textWidth(each.name))) + 16 : 0;
  const frames = framesOf(filled, width, ticks, Math.max(8, Math.min(longest, width * 0.28)));
  const bottom = Math.max(...frames.map((frame) => frame.bottom));
  const svg = drawing(width, bottom + 40, curvesInWords(chart, panels, domain));
  svg.append(label(axisTitle(upright, chart.y), 0, 12, { class: "title" }));
  const geometry = frames.map((frame, place) => {
    const scales = {
      x: makeScale(...domain.x, frame.left, frame.right, chart.x.log),
      y: makeScale(...domain.y, frame.bottom, frame.top, chart.y.log),
    };
    const clip = `clip-${id}-${place}`;
    const box = { x: frame.left - 3, y: frame.top - 4, width: frame.right - frame.left + 6, height: frame.bottom - frame.top + 8 };
    const crowd = panels[place].length > 7 ? "many" : panels[place].length > 3 ? "several" : "";
    const inside = shape("g", { "clip-path": `url(#${clip})`, class: crowd });
    const marked = alike(panels[place]);
    inside.append(...panels[place].map((each) => drawCurve(each, scales, marked)));
    svg.append(
      shape("clipPath", { id: clip }, shape("rect", box)),
      uprightAxis(frame, scales.y, ticks, frame.first),
      levelAxis(frame, scales.x, ticksOf(scales.x, chart.x, (frame.right - frame.left) / 55)),
      label(filled[place].title, frame.left, frame.top - 9, { class: "panel" }, frame.right - frame.left),
    );
    if (given(chart.level)) svg.append(drawLevel(chart, frame, scales));
    svg.append(inside);
    if (given(chart.level) && place === 0) svg.append(levelLabel(chart, panels[place], frame, scales));
    if (longest) svg.append(endLabels(panels[place], frame, scales, longest));
    return { frame, scales, curves: panels[place], title: filled[place].title };
  });
  const base = geometry[0].scales.x;
  svg.append(label(axisTitle(base, chart.x), frames.at(-1).right, bottom + 34, { class: "title", "text-anchor": "end" }));
  return { svg, panels: geometry, domain, log: chart.x.log };
}

function curvesInWords(chart, panels, domain) {
  const curves = panels.flat();
  const spans = `${chart.x.label} from ${tell(domain.x[0], chart.x)} to ${tell(domain.x[1], chart.x)}`;
  const lasts = curves.slice(0, 6).map((each) => `${each.name} ends at ${tell(each.points.findLast(Boolean)[1], chart.y)}`);
  const rest = curves.length > 6 ? `; and ${curves.length - 6} more` : "";
  return `${chart.title}. ${chart.y.label} by ${spans}. ${lasts.join("; ")}${rest}.`;
}
