// Means over seeds with their spread, under headings.

function intervalRows(chart) {
  return chart.bands.map(([heading, bands]) => [
    heading,
    bands
      .map(({ label: name, intervals }) => ({
        label: name,
        intervals: intervals.filter((each) => shown(each.line) && given(each.mean)),
      }))
      .filter((band) => band.intervals.length),
  ]);
}

function intervalEnds(interval) {
  const spread = interval.spread ?? 0;
  return [interval.mean - spread, interval.mean + spread, ...Object.values(interval.seeds)];
}

const meanText = (interval, axis) => {
  const mean = valueText(interval.mean, axis);
  return given(interval.spread) ? `${mean} ± ${valueText(interval.spread, axis)}` : mean;
};

function intervalSpot(interval, band, axis, x, y) {
  const seeds = Object.entries(interval.seeds).map(([seed, value]) => [null, `seed ${seed}`, valueText(value, axis)]);
  const mean = [swatch(interval.line), seeds.length > 1 ? "mean" : "value", meanText(interval, axis)];
  return { x, y, title: named(interval.line) || band.label, rows: [mean, ...(seeds.length > 1 ? seeds : [])] };
}

function drawInterval(interval, scale, y) {
  const look = lookOf(interval.line);
  const group = shape("g", { class: `interval ${look.hue}`, "data-line": interval.line });
  if (given(interval.spread)) {
    const [x1, x2] = [-1, 1].map((side) => round(scale(interval.mean + side * interval.spread)));
    group.append(shape("line", { class: "spread", x1, x2, y1: y, y2: y }));
  }
  for (const value of Object.values(interval.seeds)) {
    group.append(shape("circle", { class: "seed", cx: round(scale(value)), cy: y, r: 2.2 }));
  }
  const mean = marker(look.mark || (look.dash === "dotdash" ? 4 : 1), scale(interval.mean), y, 4.2);
  group.append(shape("path", { class: look.dash === "dashed" ? "mean hollow" : "mean", d: mean }));
  return group;
}

// Draws a row of intervals at y, its name at the left or above it; returns the y of the next row.
function drawBand(body, chart, band, { scale, left, width, tight }, spots, y) {
  const alone = band.intervals.length === 1;
  const height = Math.max(band.intervals.length * 15, 18);
  let top = y;
  if (!tight) body.append(label(band.label, left - 14, y + height / 2 + 4, { "text-anchor": "end" }, left - 14));
  else if (alone || band.label) body.append(label(band.label, left, (top += 13), {}, width - left - (alone ? 90 : 0)));
  band.intervals.forEach((interval, place) => {
    const middle = top + (height * (place + 0.5)) / band.intervals.length;
    const spot = spots.push(intervalSpot(interval, band, chart.x, scale(interval.mean), middle)) - 1;
    const hit = { x: left, width: width - left, y: middle - 8, height: 16 };
    const value = { "text-anchor": "end", class: "value" };
    body.append(drawInterval(interval, scale, round(middle)));
    if (!tight || alone) body.append(small(meanText(interval, chart.x), width, tight ? top : middle + 4, value));
    body.append(shape("rect", { class: "hit", "data-spot": spot, ...hit }));
  });
  const end = top + height + 4;
  body.append(shape("line", { class: "rule", x1: 0, x2: width, y1: end, y2: end }));
  return end + 4;
}

function drawIntervals(chart, width) {
  const groups = intervalRows(chart).filter(([, bands]) => bands.length);
  const all = groups.flatMap(([, bands]) => bands.flatMap((band) => band.intervals));
  if (!all.length) return { svg: nothingShown(width, chart.title), spots: [] };
  const tight = width < 560;
  const names = groups.flatMap(([, bands]) => bands.map((band) => textWidth(band.label)));
  const left = tight ? 8 : Math.min(width * 0.32, Math.max(40, ...names)) + 14;
  const right = width - (tight ? 10 : 116);
  const scale = makeScale(...padded(extent(all.flatMap(intervalEnds)), chart.x), left, right, chart.x.log);
  const body = shape("g");
  const spots = [];
  let y = 4;
  for (const [heading, bands] of groups) {
    if (heading) {
      body.append(label(heading, 0, y + 16, { class: "panel" }, width));
      y += 22;
    }
    for (const band of bands) y = drawBand(body, chart, band, { scale, left, width, tight }, spots, y);
    y += 4;
  }
  const svg = drawing(width, y + 40, intervalsInWords(chart, all));
  const ticks = ticksOf(scale, chart.x, (right - left) / 80);
  svg.append(gridBelow({ left, right, bottom: y }, scale, ticks, 4), body);
  svg.append(label(axisTitle(scale, chart.x), right, y + 34, { class: "title", "text-anchor": "end" }));
  return { svg, spots, across: 1 };
}

function intervalsInWords(chart, intervals) {
  const beats = (one, other) => (chart.lower ? one.mean < other.mean : one.mean > other.mean);
  const best = intervals.reduce((one, other) => (beats(other, one) ? other : one));
  const most = `the ${chart.lower ? "lowest" : "highest"} is ${named(best.line)} with ${valueText(best.mean, chart.x)}`;
  return `${chart.title}. ${intervals.length} means of ${chart.x.label}; ${most}.`;
}
