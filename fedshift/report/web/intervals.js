// Means over seeds with their spread, under headings: what overlaps is not told apart.

function intervalRows(chart) {
  return chart.bands.map(([heading, bands]) => [
    heading,
    bands
      .map((band) => ({ label: band.label, intervals: band.intervals.filter((each) => shown(each.line)) }))
      .filter((band) => band.intervals.length),
  ]);
}

function intervalEnds(interval) {
  const spread = interval.spread ?? 0;
  return [interval.mean - spread, interval.mean + spread, ...Object.values(interval.seeds)];
}

const meanText = (interval, axis) =>
  given(interval.spread) ? `${tell(interval.mean, axis)} ± ${tell(interval.spread, axis)}` : tell(interval.mean, axis);

function intervalSpot(interval, band, axis, x, y) {
  const seeds = Object.entries(interval.seeds).map(([seed, value]) => [null, `seed ${seed}`, tell(value, axis)]);
  const mean = [swatch(interval.line), seeds.length > 1 ? "mean" : "value", meanText(interval, axis)];
  return { x, y, title: named(interval.line) || band.label, rows: [mean, ...(seeds.length > 1 ? seeds : [])] };
}

function drawInterval(interval, scale, y) {
  const look = lookOf(interval.line);
  const group = shape("g", { class: `interval ${look.hue}`, "data-line": interval.line });
  if (given(interval.spread)) {
    const ends = { x1: round(scale(interval.mean - interval.spread)), x2: round(scale(interval.mean + interval.spread)) };
    group.append(shape("line", { class: "spread", ...ends, y1: y, y2: y }));
  }
  for (const value of Object.values(interval.seeds)) {
    group.append(shape("circle", { class: "seed", cx: round(scale(value)), cy: y, r: 2.2 }));
  }
  const mean = marker(look.mark || 1, scale(interval.mean), y, 4.2);
  group.append(shape("path", { class: look.dash ? "mean hollow" : "mean", d: mean }));
  return group;
}

function drawIntervals(chart, width) {
  const groups = intervalRows(chart).filter(([, bands]) => bands.length);
  const all = groups.flatMap(([, bands]) => bands.flatMap((band) => band.intervals));
  if (!all.length) return { svg: nothingShown(width, chart.title), spots: [] };
  const narrow = width < 560;
  const labels = groups.flatMap(([, bands]) => bands.map((band) => band.label));
  const left = narrow ? 8 : Math.min(width * 0.32, Math.max(40, ...labels.map((text) => textWidth(text)))) + 14;
  const right = width - (narrow ? 10 : 116);
  const scale = makeScale(...roomy(extent(all.flatMap(intervalEnds)), chart.x), left, right, chart.x.log);
  const svg = drawing(width, 10, intervalsInWords(chart, all));
  const body = shape("g");
  const spots = [];
  let y = 4;
  for (const [heading, bands] of groups) {
    if (heading) {
      body.append(label(heading, 0, (y += 16), { class: "panel" }, width));
      y += 6;
    }
    for (const band of bands) {
      const height = Math.max(band.intervals.length * 15, 18);
      const alone = band.intervals.length === 1;
      const room = width - left - (alone ? 90 : 0);
      if (narrow && (alone || band.label)) body.append(label(band.label, left, (y += 13), {}, room));
      if (!narrow) body.append(label(band.label, left - 14, y + height / 2 + 4, { "text-anchor": "end" }, left - 14));
      band.intervals.forEach((interval, place) => {
        const middle = y + (height * (place + 0.5)) / band.intervals.length;
        const spot = spots.push(intervalSpot(interval, band, chart.x, scale(interval.mean), middle)) - 1;
        body.append(drawInterval(interval, scale, round(middle)));
        const value = { "text-anchor": "end", class: "value" };
        if (!narrow || alone) body.append(label(meanText(interval, chart.x), width, narrow ? y : middle + 4, value, Infinity, 11));
        const hit = { x: left, width: width - left, y: middle - 8, height: 16 };
        body.append(shape("rect", { class: "hit", "data-spot": spot, ...hit }));
      });
      y += height + 4;
      body.append(shape("line", { class: "rule", x1: 0, x2: width, y1: y, y2: y }));
      y += 4;
    }
    y += 4;
  }
  const ticks = ticksOf(scale, chart.x, (right - left) / 80);
  svg.append(gridBelow({ left, right, bottom: y }, scale, ticks, 4), body);
  svg.append(label(axisTitle(scale, chart.x), right, y + 34, { class: "title", "text-anchor": "end" }));
  svg.setAttribute("height", y + 40);
  svg.setAttribute("viewBox", `0 0 ${round(width)} ${round(y + 40)}`);
  return { svg, spots, across: 1 };
}

function intervalsInWords(chart, intervals) {
  const best = intervals.reduce((one, other) => (other.mean > one.mean ? other : one));
  const most = `the greatest is ${named(best.line)} with ${tell(best.mean, chart.x)}`;
  return `${chart.title}. ${intervals.length} means of ${chart.x.label}; ${most}.`;
}
