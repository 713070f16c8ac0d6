// Curves: panels side by side.

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

// Position of every panel: a row has one y axis, at its left, unless each panel has its own.
function framesOf(panels, width, ticks, space, apart) {
  const count = panels.length;
  const columns = columnsFor(count, width, 250);
  const left = tickWidth(ticks.flat());
  const gap = apart ? left + 10 : 22;
  const each = (width - left - space - gap * (columns - 1)) / columns;
  const height = count === 1 ? between(each * 0.5, 210, 350) : between(each * 0.72, 150, 240);
  const head = panels.some((panel) => panel.title) ? 24 : 8;
  return panels.map((_, place) => {
    const x = left + (place % columns) * (each + gap);
    const top = 20 + head + Math.floor(place / columns) * (height + head + 34);
    return { left: x, right: x + each, top, bottom: top + height, first: apart || place % columns === 0 };
  });
}

function drawPanel(chart, { title, curves }, frame, domain, ticks, clip) {
  const scales = {
    x: makeScale(...domain.x, frame.left, frame.right, chart.x.log),
    y: makeScale(...domain.y, frame.bottom, frame.top, chart.y.log),
  };
  const [width, height] = [frame.right - frame.left, frame.bottom - frame.top];
  const box = { x: frame.left - 3, y: frame.top - 4, width: width + 6, height: height + 8 };
  const crowd = curves.length > 7 ? "many" : curves.length > 3 ? "several" : "";
  const marked = alike(curves);
  const inside = shape("g", { "clip-path": `url(#${clip})`, class: crowd });
  inside.append(...curves.map((each) => drawCurve(each, scales, marked)));
  const group = shape(
    "g",
    {},
    shape("clipPath", { id: clip }, shape("rect", box)),
    uprightAxis(frame, scales.y, ticks, frame.first),
    levelAxis(frame, scales.x, ticksOf(scales.x, chart.x, width / 55)),
    label(title, frame.left, frame.top - 9, { class: "panel" }, width),
    given(chart.level) && drawLevel(chart, frame, scales),
    inside,
  );
  return { group, frame, scales, curves, title };
}

// The drawing, and the data that a readout needs.
function drawCurves(chart, width, view, id) {
  const filled = shownPanels(chart);
  const all = filled.flatMap((panel) => panel.curves);
  const domain = domains(chart, all, view.zoom);
  if (!domain) return { svg: nothingShown(width, chart.title), panels: [] };
  const own = filled.map((panel) => (chart.apart && domains(chart, panel.curves, view.zoom)) || domain);
  const upright = own.map(({ y }) => makeScale(...y, 1, 0, chart.y.log));
  const ticks = upright.map((scale) => ticksOf(scale, chart.y, 5));
  const few = filled.length === 1 && all.length > 1 && all.length <= 8;
  const labelled = few && width >= 560 && all.every((each) => each.name);
  const space = labelled ? Math.min(Math.max(...all.map((each) => textWidth(each.name))) + 16, width * 0.28) : 8;
  const frames = framesOf(filled, width, ticks, space, chart.apart);
  const bottom = Math.max(...frames.map((frame) => frame.bottom));
  const svg = drawing(width, bottom + 40, curvesInWords(chart, all, domain));
  const clip = (place) => `clip-${id}-${place}`;
  const panels = frames.map((frame, place) => {
    const within = { x: domain.x, y: own[place].y };
    return drawPanel(chart, filled[place], frame, within, ticks[place], clip(place));
  });
  const [first] = panels;
  svg.append(label(axisTitle(upright[0], chart.y), 0, 12, { class: "title" }), ...panels.map((panel) => panel.group));
  if (given(chart.level)) svg.append(levelLabel(chart, first));
  if (labelled) svg.append(endLabels(first, space));
  const below = { class: "title", "text-anchor": "end" };
  svg.append(label(axisTitle(first.scales.x, chart.x), frames.at(-1).right, bottom + 34, below));
  return { svg, panels, domain, log: chart.x.log };
}

function curvesInWords(chart, curves, domain) {
  const spans = `${chart.x.label} from ${valueText(domain.x[0], chart.x)} to ${valueText(domain.x[1], chart.x)}`;
  const last = (each) => valueText(each.points.findLast(Boolean)[1], chart.y);
  const lasts = curves.slice(0, 6).map((each) => `${each.name} ends at ${last(each)}`);
  const rest = curves.length > 6 ? `; and ${curves.length - 6} more` : "";
  return `${chart.title}. ${chart.y.label} by ${spans}. ${lasts.join("; ")}${rest}.`;
}
