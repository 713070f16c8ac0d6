// Axes: thin, with round numbers, and no box around them.

// Number of panels side by side, so that all rows are equally full.
function columnsFor(count, width, least) {
  const most = between(Math.floor(width / least), 1, count);
  return Math.ceil(count / Math.ceil(count / most));
}

// Width of the numbers of a y axis.
function tickWidth(ticks) {
  return Math.max(16, ...ticks.map((tick) => textWidth(tick.text, 11))) + 8;
}

function uprightAxis({ left, right }, scale, ticks, written) {
  const group = shape("g", { class: "axis y" });
  for (const { value, text } of ticks) {
    const y = round(scale(value));
    group.append(shape("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
    if (written) group.append(small(text, left - 7, y + 4, { "text-anchor": "end" }));
  }
  return group;
}

function levelAxis({ left, right, bottom }, scale, ticks) {
  const group = shape("g", { class: "axis x" });
  group.append(shape("line", { class: "base", x1: left, x2: right, y1: bottom, y2: bottom }));
  let free = -Infinity;
  for (const { value, text } of ticks) {
    const x = round(scale(value));
    group.append(shape("line", { class: "tick", x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
    const half = textWidth(text, 11) / 2;
    const middle = between(x, left - 12 + half, right + 12 - half);
    if (middle - half < free) continue; // no space: a tick without a number
    free = middle + half + 8;
    group.append(small(text, middle, bottom + 17, { "text-anchor": "middle" }));
  }
  return group;
}

// Vertical lines through rows of bars, with numbers below.
function gridBelow(frame, scale, ticks, top) {
  const group = levelAxis(frame, scale, ticks);
  for (const { value } of ticks) {
    const x = round(scale(value));
    group.prepend(shape("line", { class: "grid", x1: x, x2: x, y1: top, y2: frame.bottom }));
  }
  return group;
}

function drawing(width, height, words) {
  return shape("svg", {
    viewBox: `0 0 ${round(width)} ${round(height)}`,
    width: round(width),
    height: round(height),
    role: "img",
    "aria-label": words,
  });
}

function nothingShown(width, title) {
  const words = state.visible.size < LINES.size ? "No lines are shown." : "Nothing was measured.";
  const svg = drawing(width, 90, `${title}. ${words}`);
  svg.append(label(words, width / 2, 48, { "text-anchor": "middle", class: "muted" }));
  return svg;
}
