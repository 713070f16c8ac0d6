// Heat map, with numbers where they fit.

// Range of colours: from 0 if the smallest value is near it, otherwise from the smallest value.
function heatSpan(values) {
  const [low, high] = extent(values) ?? [0, 1];
  const floor = low >= 0 && low < 0.4 * high ? 0 : low;
  return [floor, high > floor ? high : floor + 1];
}

// Unit of a heat map, and the text of a value in a cell.
function heatUnit(chart, span) {
  const unit = unitFor(chart.value, span[1]);
  const most = span[1] * unit.factor;
  const whole = chart.values.flat().every((value) => !given(value) || Number.isInteger(value * unit.factor));
  const places = whole || most >= 100 ? 0 : most >= 10 ? 1 : most >= 1 ? 2 : 3;
  const short = (value) => {
    const scaled = value * unit.factor;
    return most < 0.01 ? decimal(scaled, 2) : scaled.toFixed(places).replace("-", "−");
  };
  return { unit, short };
}

// Adjacent columns with the same mark have one label above them.
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
    .map((text, number) => {
      const x = left + (number * every + 0.5) * cell;
      return label(text, x, y, { "text-anchor": "middle" }, Math.max(cell * every - 4, 20), 11);
    });
}

function scaleBar(chart, span, short, unit, x, y, width) {
  const id = `ramp-${chart.name.replace(/[^a-z0-9]/gi, "-")}`;
  const offset = (place) => place / (RAMP.length - 1);
  const stops = RAMP.map((colour, place) => shape("stop", { offset: offset(place), "stop-color": rgb(colour) }));
  return shape(
    "g",
    { class: "scale" },
    shape("linearGradient", { id }, ...stops),
    small(titled(chart.value, unit), x, y + 9, { class: "title" }),
    shape("rect", { x, y: y + 15, width, height: 8, rx: 2, fill: `url(#${id})` }),
    small(short(span[0]), x, y + 36),
    small(short(span[1]), x + width, y + 36, { "text-anchor": "end" }),
  );
}

// A mark, or its first three letters if no more fit; the readout has the whole mark.
function shortest(mark, space) {
  return textWidth(mark, 11) <= space ? mark : mark.slice(0, 3);
}

// Names of columns, and above them the marks of adjacent columns.
function heatHead(chart, left, cell, top) {
  const group = shape("g");
  for (const { mark, from, to } of markGroups(chart.marks)) {
    const [x1, x2] = [left + from * cell + 1, left + (to + 1) * cell - 2];
    group.append(
      shape("path", { class: "brace", d: `M${round(x1)},22v-4H${round(x2)}v4` }),
      label(shortest(mark, x2 - x1), (x1 + x2) / 2, 13, { "text-anchor": "middle" }, Math.max(x2 - x1, 24), 11),
    );
  }
  group.append(...columnLabels(chart, left, cell, top - 6));
  return group;
}

// Layout of a heat map; on a phone, long names of rows are above them.
function heatLayout(chart, rows, width) {
  const longest = Math.max(...rows.map((row) => textWidth(chart.rows[row])));
  const above = width < 560 && longest > width * 0.3;
  const left = above ? 0 : Math.min(longest, width * 0.3) + 10;
  const cell = Math.min((width - left) / chart.columns.length, 72);
  const height = rows.length > 60 ? 9 : rows.length > 30 ? 15 : 24;
  const step = above ? height + 18 : height;
  const top = chart.marks.some(Boolean) ? 42 : 22;
  const [right, bottom] = [left + cell * chart.columns.length, top + rows.length * step];
  return { above, left, right, top, bottom, cell, height, step };
}

function heatCell(value, x, y, { cell, height }, share, text) {
  const colour = given(value) ? ramp(share(value)) : null;
  const gap = Math.min(1, cell / 4); // cells of a thousand labels are narrower than a pixel
  const size = { x: round(x), y: round(y), width: round(cell - gap), height: height - 1 };
  const field = shape("rect", { class: colour ? "cell" : "cell empty", fill: colour && rgb(colour), ...size });
  if (!colour || !text) return [field];
  const inside = { "text-anchor": "middle", class: `inside ${inkOn(colour)}` };
  return [field, small(text(value), x + (cell - 1) / 2, y + height / 2 + 3.5, inside)];
}

function drawHeat(chart, width) {
  const rows = chart.rows.map((_, row) => row).filter((row) => shown(chart.lines[row] ?? ""));
  if (!rows.length || !chart.columns.length) return { svg: nothingShown(width, chart.title), spots: [] };
  const span = heatSpan(chart.values.flat());
  const { unit, short } = heatUnit(chart, span);
  const place = heatLayout(chart, rows, width);
  const { above, left, cell, height } = place;
  const values = rows.flatMap((row) => chart.values[row]).filter(given);
  const widest = Math.max(...values.map((value) => textWidth(short(value), 11)));
  const text = height >= 15 && widest + 5 <= cell ? short : null;
  const share = (value) => (value - span[0]) / (span[1] - span[0]);
  const every = Math.max(1, Math.ceil(14 / height));
  const svg = drawing(width, place.bottom + 52, heatInWords(chart, rows));
  svg.append(heatHead(chart, left, cell, place.top));
  const spots = [];
  rows.forEach((row, number) => {
    const y = place.top + (number + 1) * place.step - height;
    const group = shape("g", { "data-line": chart.lines[row] ?? "" });
    if (above) group.append(label(chart.rows[row], 0, y - 5, {}, width));
    else if (number % every === 0) {
      group.append(label(chart.rows[row], left - 8, y + height / 2 + 4, { "text-anchor": "end" }, left - 10));
    }
    chart.columns.forEach((_, column) => {
      const x = left + column * cell;
      const parts = heatCell(chart.values[row][column], x, y, place, share, text);
      parts[0].dataset.spot = spots.push(heatSpot(chart, row, column, x + cell / 2, y + height / 2)) - 1;
      group.append(...parts);
    });
    svg.append(group);
  });
  const bar = Math.min(200, place.right - left);
  svg.append(scaleBar(chart, span, short, unit, place.right - bar, place.bottom + 10, bar - 1));
  return { svg, spots, across: chart.columns.length };
}

function heatSpot(chart, row, column, x, y) {
  const mark = chart.marks[column] ? ` (${chart.marks[column]})` : "";
  const value = valueText(chart.values[row][column], chart.value);
  return { x, y, title: chart.rows[row], rows: [[null, `${chart.columns[column]}${mark}`, value]] };
}

function heatInWords(chart, rows) {
  const ends = extent(rows.flatMap((row) => chart.values[row]));
  const spans = ends ? ` from ${valueText(ends[0], chart.value)} to ${valueText(ends[1], chart.value)}` : "";
  return `${chart.title}. ${rows.length} rows by ${chart.columns.length} columns of ${chart.value.label}${spans}.`;
}
