// Numbers of charts as tables: [title, column heads, rows], made on demand.

function numbersOfCurves(chart) {
  return shownPanels(chart).map(({ title: heading, curves }) => {
    const unitX = unitFor(chart.x, extent(curves.flatMap((each) => each.points.map((point) => point?.[0])))?.[1] ?? 0);
    const unitY = unitFor(chart.y, extent(curves.flatMap((each) => each.points.map((point) => point?.[1])))?.[1] ?? 0);
    const value = (point) => {
      if (!point) return "–";
      const [y, low, high] = point.slice(1).map((each) => bare(each, unitY));
      return given(point[2]) && given(point[3]) ? `${y} (${low} to ${high})` : y;
    };
    const headX = titled(chart.x, unitX);
    const names = curves.map((each) => each.name || titled(chart.y, unitY));
    const title = [heading, titled(chart.y, unitY)].filter(Boolean).join(": ");
    const longest = Math.max(0, ...curves.map((each) => each.points.length));
    const rows = Array.from({ length: longest }, (_, row) => row);
    if (new Set(curves.map((each) => each.curve.x)).size <= 1) {
      const xs = curves.length ? DATA.shared[curves[0].curve.x] : [];
      const at = (row) => bare(xs[row] * stretch(chart), unitX);
      return [title, [headX, ...names], rows.map((row) => [at(row), ...curves.map((each) => value(each.points[row]))])];
    }
    const pair = (point) => [bare(point?.[0], unitX), value(point)];
    const heads = names.flatMap((name) => [headX, name]);
    return [title, heads, rows.map((row) => curves.flatMap((each) => pair(each.points[row])))];
  });
}

function numbersOfIntervals(chart) {
  const groups = intervalRows(chart);
  const all = groups.flatMap(([, bands]) => bands.flatMap((band) => band.intervals));
  const unit = unitFor(chart.x, extent(all.map((interval) => interval.mean))?.[1] ?? 0);
  const seeds = [...new Set(all.flatMap((interval) => Object.keys(interval.seeds)))].sort((one, other) => one - other);
  return groups.map(([heading, bands]) => {
    const rows = bands.flatMap((band) =>
      band.intervals.map((interval) => [
        [band.label, named(interval.line)].filter(Boolean).join(": "),
        bare(interval.mean, unit),
        bare(interval.spread, unit),
        ...seeds.map((seed) => bare(interval.seeds[seed], unit)),
      ]),
    );
    const title = [heading, titled(chart.x, unit)].filter(Boolean).join(": ");
    return [title, ["", "mean", "standard deviation", ...seeds.map((seed) => `seed ${seed}`)], rows];
  });
}

function numbersOfPoints(chart) {
  return shownFields(chart).map(({ title: heading, points }) => {
    const unitX = unitFor(chart.x, extent(points.map((point) => point.x))[1]);
    const unitY = unitFor(chart.y, extent(points.map((point) => point.y))[1]);
    const rows = points.map((point) => [
      named(point.line),
      bare(point.x, unitX),
      bare(point.y, unitY),
      bare(point.spread, unitY),
      point.front ? "yes" : "no",
    ]);
    const heads = ["", titled(chart.x, unitX), titled(chart.y, unitY), "standard deviation", "Pareto-optimal"];
    return [heading, heads, rows];
  });
}

function numbersOfStacks(chart) {
  const stacks = chart.stacks.filter((stack) => shown(stack.line));
  const unit = unitFor(chart.x, extent(stacks.flatMap((stack) => stack.values))?.[1] ?? 0);
  const rows = stacks.map((stack) => [named(stack.line), ...stack.values.map((value) => bare(value, unit))]);
  return [[titled(chart.x, unit), ["", ...chart.parts], rows]];
}

function numbersOfHeat(chart) {
  const unit = unitFor(chart.value, extent(chart.values.flat())?.[1] ?? 0);
  const head = (column, mark) => (mark ? `${column} (${mark})` : column);
  const heads = chart.columns.map((column, place) => head(column, chart.marks[place]));
  const rows = chart.rows
    .map((name, row) => [name, ...chart.values[row].map((value) => bare(value, unit))])
    .filter((_, row) => shown(chart.lines[row] ?? ""));
  return [[titled(chart.value, unit), ["", ...heads], rows]];
}

function numbersOfHistograms(chart) {
  return chart.panels.map((panel) => {
    const unit = unitFor(chart.x, Math.max(...panel.edges.map(Math.abs)));
    const rows = panel.edges.slice(0, -1).map((edge, bin) => [
      bare(edge, unit),
      bare(panel.edges[bin + 1], unit),
      ...panel.counts.map(([, counts]) => decimal(counts[bin], 6)),
    ]);
    const names = panel.counts.map(([name]) => name || "count");
    return [panel.title, [`${titled(chart.x, unit)} from`, "to", ...names], rows];
  });
}

function numberTable([title, heads, rows]) {
  const head = node("tr", {}, ...heads.map((text) => node("th", { scope: "col", class: "number" }, text)));
  const body = rows.map(([first, ...rest]) =>
    node("tr", {}, node("th", { scope: "row" }, first), ...rest.map((text) => node("td", { class: "number" }, text))),
  );
  const table = node("table", {}, node("caption", {}, title), node("thead", {}, head), node("tbody", {}, ...body));
  return node("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title || "numbers" }, table);
}
