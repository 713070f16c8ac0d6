// One stacked bar per line.

const partColour = (place, count) => ramp(count > 1 ? 0.3 + (0.65 * place) / (count - 1) : 0.35);

function partKey(parts) {
  const entries = parts.map((part, place) => {
    const sign = shape("svg", { class: "swatch", width: 12, height: 12, "aria-hidden": "true" });
    sign.append(shape("rect", { width: 12, height: 12, rx: 2, fill: rgb(partColour(place, parts.length)) }));
    return node("li", {}, sign, part);
  });
  return node("ul", { class: "key" }, ...entries);
}

function drawStacks(chart, width) {
  const stacks = chart.stacks.filter((stack) => shown(stack.line));
  if (!stacks.length) return { svg: nothingShown(width, chart.title), spots: [] };
  const total = (stack) => stack.values.reduce((sum, value) => sum + value, 0);
  const narrow = width < 560;
  const names = stacks.map((stack) => named(stack.line));
  const left = narrow ? 2 : Math.min(width * 0.34, Math.max(...names.map((text) => textWidth(text)))) + 12;
  const right = width - 76;
  const scale = makeScale(0, Math.max(...stacks.map(total)) || 1, left, right);
  const step = narrow ? 42 : 27;
  const bottom = 6 + stacks.length * step;
  const svg = drawing(width, bottom + 40, stacksInWords(chart, stacks.map(total), names));
  const spots = [];
  svg.append(gridBelow({ left, right, bottom }, scale, ticksOf(scale, chart.x, (right - left) / 80), 2));
  stacks.forEach((stack, row) => {
    const top = 6 + row * step + (narrow ? 17 : 4);
    const group = shape("g", { "data-line": stack.line });
    if (narrow) group.append(label(names[row], left, top - 5, {}, width - left));
    else group.append(label(names[row], left - 12, top + 13, { "text-anchor": "end" }, left - 12));
    let from = 0;
    stack.values.forEach((value, place) => {
      const x = scale(from);
      const wide = Math.max(0, scale(from + value) - x);
      const spot = spots.push(stackSpot(chart, stack, place, total(stack), x + wide / 2, top + 8)) - 1;
      const colour = rgb(partColour(place, chart.parts.length));
      const size = { x: round(x), y: top, width: round(wide), height: 18 };
      group.append(shape("rect", { class: "part", fill: colour, "data-spot": spot, ...size }));
      from += value;
    });
    group.append(small(valueText(total(stack), chart.x, 3), scale(from) + 7, top + 13, { class: "value" }));
    svg.append(group);
  });
  svg.append(label(axisTitle(scale, chart.x), right, bottom + 34, { class: "title", "text-anchor": "end" }));
  return { svg, spots, across: chart.parts.length, key: partKey(chart.parts) };
}

function stackSpot(chart, stack, place, total, x, y) {
  const value = stack.values[place];
  const share = total > 0 ? ` (${((100 * value) / total).toFixed(1)}%)` : "";
  const rows = [
    [null, chart.parts[place], `${valueText(value, chart.x)}${share}`],
    [null, "total", valueText(total, chart.x)],
  ];
  return { x, y, title: named(stack.line), rows };
}

function stacksInWords(chart, totals, names) {
  const texts = totals.slice(0, 6).map((total, place) => `${names[place] || "all"} ${valueText(total, chart.x)}`);
  return `${chart.title}. ${chart.x.label}, parts ${chart.parts.join(", ")}: ${texts.join("; ")}.`;
}
