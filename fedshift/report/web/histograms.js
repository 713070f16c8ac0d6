// Histograms with common bins: the first filled, others as outlines; each panel has its own axes.

const stepLabels = (chart) => [...new Set(chart.panels.flatMap((panel) => panel.counts.map(([name]) => name)))];
const stepLook = (labels, name) => {
  const place = labels.indexOf(name);
  return place === 0 ? "steps filled" : `steps c${place % COLOURS}${place > COLOURS ? " dashed" : ""}`;
};

function stepKey(labels) {
  const entries = labels.map((name) => {
    const sign = shape("svg", { class: "swatch", width: 22, height: 12, "aria-hidden": "true" });
    sign.append(shape("path", { class: stepLook(labels, name), d: "M1,11V4H8V1H14V6H21V11" }));
    return node("li", {}, sign, name);
  });
  return labels.length > 1 || labels[0] ? node("ul", { class: "key" }, ...entries) : null;
}

function stepsPath(edges, counts, x, y) {
  let path = `M${round(x(edges[0]))},${round(y(0))}`;
  counts.forEach((count, bin) => {
    path += `V${round(y(count))}H${round(x(edges[bin + 1]))}`;
  });
  return `${path}V${round(y(0))}`;
}

function drawHistograms(chart, width) {
  if (!chart.panels.length) return { svg: nothingShown(width, chart.title), spots: [] };
  const columns = columnsFor(chart.panels.length, width, 250);
  const labels = stepLabels(chart);
  const outer = (width + 20) / columns;
  const height = chart.panels.length === 1 ? 220 : 150;
  const rows = Math.ceil(chart.panels.length / columns);
  const svg = drawing(width, 22 + rows * (height + 60) + 8, histogramsInWords(chart, labels));
  svg.append(label("count", 0, 12, { class: "title" }));
  const spots = [];
  let unit = "";
  chart.panels.forEach((panel, place) => {
    const highest = Math.max(1e-12, ...panel.counts.flatMap(([, counts]) => counts));
    const top = 46 + Math.floor(place / columns) * (height + 60);
    const y = makeScale(0, highest * 1.05, top + height, top);
    const ticks = ticksOf(y, { unit: "" }, 4);
    const left = (place % columns) * outer + tickWidth(ticks);
    const frame = { left, right: (place % columns) * outer + outer - 20, top, bottom: top + height };
    const x = makeScale(panel.edges[0], panel.edges.at(-1), frame.left, frame.right, chart.x.log);
    unit = axisTitle(x, chart.x);
    svg.append(
      label(panel.title, frame.left, top - 9, { class: "panel" }, frame.right - frame.left),
      uprightAxis(frame, y, ticks, true),
      levelAxis(frame, x, ticksOf(x, chart.x, (frame.right - frame.left) / 60)),
    );
    for (const [name, counts] of panel.counts) {
      svg.append(shape("path", { class: stepLook(labels, name), d: stepsPath(panel.edges, counts, x, y) }));
    }
    panel.edges.slice(0, -1).forEach((edge, bin) => {
      const [from, to] = [x(edge), x(panel.edges[bin + 1])];
      const spot = spots.push(binSpot(chart, panel, bin, (from + to) / 2, top + height / 2)) - 1;
      const size = { x: round(from), y: top, width: round(to - from), height };
      svg.append(shape("rect", { class: "hit", "data-spot": spot, ...size }));
    });
  });
  svg.append(label(unit, width, 22 + rows * (height + 60) + 2, { class: "title", "text-anchor": "end" }));
  return { svg, spots, across: chart.panels[0].edges.length - 1, key: stepKey(labels) };
}

function binSpot(chart, panel, bin, x, y) {
  const ends = `${valueText(panel.edges[bin], chart.x)} to ${valueText(panel.edges[bin + 1], chart.x)}`;
  const rows = panel.counts.map(([name, counts]) => [null, name || "count", decimal(counts[bin])]);
  return { x, y, title: [panel.title, ends].filter(Boolean).join(" · "), rows };
}

function histogramsInWords(chart, labels) {
  const titles = chart.panels.map((panel) => panel.title).filter(Boolean);
  const of = titles.length ? ` of ${titles.join(", ")}` : "";
  return `${chart.title}. Histograms${of} over ${chart.x.label}: ${labels.filter(Boolean).join(", ") || "counts"}.`;
}
