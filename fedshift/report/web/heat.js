// A field of values in colours of one ramp, with numbers where there is room.

// Fields that reach near nothing begin there; others where their values begin.
function heatSpan(values) {
  const [low, high] = extent(values) ?? [0, 1];
  const floor = low >= 0 && low < 0.4 * high ? 0 : low;
  return [floor, high > floor ? high : floor + 1];
}

function heatUnit(chart, span) {
  const unit = unitFor(chart.value, span[1]);
  const places = (span[1] * unit.factor) >= 100 || Number.isInteger(span[1]) ? 0 : chart.value.unit === "%" || span[1] * unit.factor >= 10 ? 1 : 2;
  const whole = chart.values.flat().every((value) => !given(value) || Number.isInteger(value * unit.factor));
  const short = (value) => {
    const told = value * unit.factor;
    return (whole ? String(told) : Math.abs(told) > 0 && Math.abs(told) < 0.005 ? decimal(told, 2) : told.toFixed(places)).replace("-", "−");
  };
  return { unit, short };
}

// Columns that share a mark have it written once above them.
function markGroups(marks) {
  const groups = [];
  marks.forEach((mark, place) => {
    if (groups.at(-1)?.mark === mark) groups.at(-1).to = place;
    else groups.push({ mark, from: place, to: place });
  });
  return groups.filter((group) => group.mark);
}

function columnLabels(chart, left, cell, y) {
  const widest = Math.max(...chart.columns.map((text) => textWidth(text, 11)));
  const every = Math.max(1, Math.ceil((Math.min(widest, 90) + 6) / cell));
  return chart.columns
    .filter((_, place) => place % every === 0)
    .map((text, number) =>
      label(text, left + (number * every + 0.5) * cell, y, { "text-anchor": "middle" }, Math.max(cell * every - 4, 20), 11),
    );
}

function scaleBar(chart, span, short, unit, x, y, width) {
  const id = `ramp-${chart.name.replace(/[^a-z0-9]/gi, "-")}`;
  const stops = RAMP.map((colour, place) => shape("stop", { offset: place / (RAMP.length - 1), "stop-color": rgb(colour) }));
  return shape(
    "g",
    { class: "scale" },
    shape("linearGradient", { id }, ...stops),
    label(titled(chart.value, unit), x, y + 9, { class: "title" }, Infinity, 11),
    shape("rect", { x, y: y + 15, width, height: 8, rx: 2, fill: `url(#${id})` }),
    label(short(span[0]), x, y + 36, {}, Infinity, 11),
    label(short(span[1]), x + width, y + 36, { "text-anchor": "end" }, Infinity, 11),
  );
}

function drawHeat(chart, width) {
  const rows = chart.rows.map((_, row) => row).filter((row) => shown(chart.lines[row] ?? ""));
  if (!rows.length || !chart.columns.length) return { svg: nothingShown(width, chart.title), spots: [] };
  const span = heatSpan(chart.values.flat());
  const { unit, short } = heatUnit(chart, span);
  const longest = Math.max(...rows.map((row) => textWidth(chart.rows[row])));
  const above = width < 560 && longest > width * 0.3; // rows' names
  const left = above ? 0 : Math.min(longest, width * 0.3) + 10;
  const cell = Math.min((width - left) / chart.columns.length, 72);
  const height = rows.length > 60 ? 9 : rows.length > 30 ? 15 : 24;
  const groups = markGroups(chart.marks);
  const top = groups.length ? 42 : 22;
  const step = above ? height + 18 : height;
  const bottom = top + rows.length * step;
  const svg = drawing(width, bottom + 52, heatInWords(chart, rows));
  const right = left + cell * chart.columns.length;
  for (const { mark, from, to } of groups) {
    const [x1, x2] = [left + from * cell + 1, left + (to + 1) * cell - 2];
    svg.append(shape("path", { class: "brace", d: `M${round(x1)},22v-4H${round(x2)}v4` }));
    svg.append(label(mark, (x1 + x2) / 2, 13, { "text-anchor": "middle" }, Math.max(x2 - x1, 24), 11));
  }
  svg.append(...columnLabels(chart, left, cell, top - 6));
  const widest = Math.max(...rows.flatMap((row) => chart.values[row].filter(given).map((value) => textWidth(short(value), 11))));
  const written = height >= 15 && widest + 5 <= cell;
  const every = Math.max(1, Math.ceil(14 / height));
  const spots = [];
  rows.forEach((row, place) => {
    const y = top + (place + 1) * step - height;
    const group = shape("g", { "data-line": chart.lines[row] ?? "" });
    if (above) group.append(label(chart.rows[row], 0, y - 5, {}, width));
    else if (place % every === 0) {
      group.append(label(chart.rows[row], left - 8, y + height / 2 + 4, { "text-anchor": "end" }, left - 10));
    }
    chart.columns.forEach((column, number) => {
      const value = chart.values[row][number];
      const x = left + number * cell;
      const colour = given(value) ? ramp((value - span[0]) / (span[1] - span[0])) : null;
      const spot = spots.push(heatSpot(chart, row, number, x + cell / 2, y + height / 2)) - 1;
      const size = { x: round(x), y: round(y), width: round(cell - 1), height: height - 1 };
      group.append(shape("rect", { class: colour ? "cell" : "cell empty", fill: colour && rgb(colour), "data-spot": spot, ...size }));
      if (!colour || !written) return;
      const inside = { "text-anchor": "middle", class: `inside ${inkOn(colour)}` };
      group.append(label(short(value), x + (cell - 1) / 2, y + height / 2 + 3.5, inside, Infinity, 11));
    });
    svg.append(group);
  });
  const bar = Math.min(200, right - left);
  svg.append(scaleBar(chart, span, short, unit, right - bar, bottom + 10, bar - 1));
  return { svg, spots, across: chart.columns.length };
}

function heatSpot(chart, row, column, x, y) {
  const mark = chart.marks[column] ? ` (${chart.marks[column]})` : "";
  const value = tell(chart.values[row][column], chart.value);
  return { x, y, title: chart.rows[row], rows: [[null, `${chart.columns[column]}${mark}`, value]] };
}

function heatInWords(chart, rows) {
  const ends = extent(rows.flatMap((row) => chart.values[row]));
  const spans = ends ? ` from ${tell(ends[0], chart.value)} to ${tell(ends[1], chart.value)}` : "";
  return `${chart.title}. ${rows.length} rows by ${chart.columns.length} columns of ${chart.value.label}${spans}.`;
}
