// Texts of numbers: fractions in percent, bytes and seconds in a unit that suits their size.

const UNITS = {
  "%": [[0, 100, "%"]],
  B: [[0, 1, "B"], [1e3, 1e-3, "kB"], [1e6, 1e-6, "MB"], [1e9, 1e-9, "GB"], [1e12, 1e-12, "TB"]],
  s: [[0, 1e3, "ms"], [1, 1, "s"], [120, 1 / 60, "min"], [7200, 1 / 3600, "h"]],
};
const RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹";

// Unit for the largest of some values, and its factor.
function unitFor(axis, largest) {
  const steps = UNITS[axis.unit] ?? [[0, 1, axis.unit]];
  const fits = steps.filter(([from]) => Math.abs(largest) >= from);
  const [, factor, name] = fits.at(-1) ?? steps[0];
  return { factor, name };
}

function power(exponent) {
  const figures = [...String(Math.abs(exponent))].map((figure) => RAISED[figure]).join("");
  return `10${exponent < 0 ? "⁻" : ""}${figures}`;
}

function decimal(value, digits = 4) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    const [front, exponent] = value.toExponential(digits - 1).split("e");
    const mantissa = String(Number(front)).replace("-", "−");
    const ten = power(Number(exponent));
    if (mantissa === "1") return ten;
    return `${mantissa}·${ten}`;
  }
  const rounded = Number.isInteger(value) ? value : Number(value.toPrecision(digits));
  return String(rounded).replace("-", "−");
}

function percent(value) {
  const small = value !== 0 && Math.abs(value) < 0.1;
  return small ? decimal(value, 2) : value.toFixed(1).replace("-", "−");
}

// A value with its unit.
function valueText(value, axis, digits = 4) {
  if (!given(value)) return "–";
  if (axis.unit === "%") return `${percent(value * 100)}%`;
  const { factor, name } = unitFor(axis, value);
  return name ? `${decimal(value * factor, digits)} ${name}` : decimal(value, digits);
}

// A value without its unit, for columns with the unit in their head.
function bare(value, unit) {
  return given(value) ? decimal(Number((value * unit.factor).toPrecision(6)), 6) : "–";
}

function titled(axis, unit) {
  return unit.name ? `${axis.label} (${unit.name})` : axis.label;
}
