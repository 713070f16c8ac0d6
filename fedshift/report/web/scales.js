// From values to pixels and back, with ticks at round numbers.

function niceStep(span, count) {
  const rough = span / Math.max(count, 1);
  const ten = 10 ** Math.floor(Math.log10(rough));
  return ten * ([1, 2, 2.5, 5, 10].find((step) => step * ten >= rough * 0.999) ?? 10);
}

function linearTicks(low, high, count) {
  const step = niceStep(high - low, count);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  const ticks = [];
  for (let number = first; number <= last; number += 1) ticks.push(Number((number * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const decades = last - first;
  const every = Math.max(1, Math.ceil(decades / Math.max(count, 1)));
  const fronts = decades <= count / 3 ? [1, 2, 5] : decades <= count / 2 ? [1, 3] : [1];
  const ticks = [];
  for (let decade = first; decade <= last; decade += every) {
    for (const front of every === 1 ? fronts : [1]) ticks.push(front * 10 ** decade);
  }
  const there = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  return there.length > 1 ? there : linearTicks(low, high, count);
}

// low and high are values, from and to pixels.
function makeScale(low, high, from, to, log = false) {
  const bend = log ? Math.log10 : (value) => value;
  const unbend = log ? (value) => 10 ** value : (value) => value;
  const start = bend(low);
  const span = bend(high) - start || 1;
  const at = (value) => from + ((bend(value) - start) / span) * (to - from);
  at.back = (pixel) => unbend(start + ((pixel - from) / (to - from)) * span);
  at.low = low;
  at.high = high;
  at.log = log;
  return at;
}

// Ticks in the unit of the axis: values and texts.
function ticksOf(scale, axis, count) {
  if (scale.log) {
    const wide = scale.low < 1e-3 || scale.high >= 1e5;
    return logTicks(scale.low, scale.high, count).map((value) => ({ value, text: logText(value, axis, wide) }));
  }
  const { factor } = unitFor(axis, Math.max(Math.abs(scale.low), Math.abs(scale.high)));
  const ticks = linearTicks(scale.low * factor, scale.high * factor, count);
  const largest = Math.max(...ticks.map(Math.abs));
  if (largest >= 1e5 || largest < 1e-3) return ticks.map((tick) => ({ value: tick / factor, text: decimal(tick) }));
  const places = Math.max(0, ...ticks.map((tick) => (String(tick).split(".")[1] ?? "").length));
  return ticks.map((tick) => ({ value: tick / factor, text: tick.toFixed(places).replace("-", "−") }));
}

function logText(value, axis, wide) {
  if (axis.unit) return valueText(value, axis);
  const exponent = Math.round(Math.log10(value));
  return wide && Math.abs(value / 10 ** exponent - 1) < 1e-9 ? power(exponent) : decimal(value, 3);
}

// Title of an axis with its unit; on a logarithmic axis every tick has its own unit.
function axisTitle(scale, axis) {
  if (scale.log) return axis.label;
  return titled(axis, unitFor(axis, Math.max(Math.abs(scale.low), Math.abs(scale.high))));
}

// Smallest and largest measured value.
function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (!given(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

// Range with a margin around values; fractions stay between 0 and 1.
function padded([low, high], axis) {
  if (axis.log) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
  const extra = (high - low || Math.abs(high) || 1) * 0.05;
  const floor = low >= 0 && (low - extra < 0 || low < (high - low) * 0.15) ? 0 : low - extra;
  const ceiling = axis.unit === "%" && high <= 1 ? Math.min(1, high + extra) : high + extra;
  return [floor, ceiling > floor ? ceiling : floor + 1];
}
