// Visible lines, and the look of each line.

const COLOURS = 8;
const MARKS = 5; // see marker() in paths.js
const LINES = new Map(DATA.lines.map((line) => [line.key, line]));

// Lines of the same colour and dash have different marks.
const worn = new Map();
for (const line of DATA.lines) {
  line.hue = line.colour % COLOURS;
  const look = `${line.hue} ${line.dash}`;
  const before = worn.get(look) ?? 0;
  worn.set(look, before + 1);
  line.mark = before ? ((before - 1) % MARKS) + 1 : 0;
}

// Look of a line: classes for its colour and dash, and the number of its mark.
function lookOf(key) {
  const line = LINES.get(key);
  if (!line) return { hue: "c-plain", dash: "", mark: 0 };
  return { hue: `c${line.hue}`, dash: line.dash, mark: line.mark };
}

const state = {
  visible: new Set(LINES.keys()),
  chosen: new Map(), // setting -> selected values
  rate: null, // bytes per second, for every chart that has a rate
};
const watchers = [];
const watch = (act) => watchers.push(act);
const changed = () => watchers.forEach((act) => act());

const shown = (key) => !LINES.has(key) || state.visible.has(key);
const named = (key) => LINES.get(key)?.label ?? "";

function show(keys) {
  state.visible = new Set(keys);
  changed();
}

function toggle(key) {
  state.chosen.clear(); // visible lines no longer follow the selection
  const keys = new Set(state.visible);
  if (!keys.delete(key)) keys.add(key);
  show(keys);
}

function showAll() {
  state.chosen.clear();
  show(LINES.keys());
}

function showOnly(...keys) {
  state.chosen.clear();
  show(keys);
}

// Two selected values of one setting show lines with either; those of two settings, lines with both.
function choose(setting, value) {
  const values = new Set(state.chosen.get(setting));
  if (!values.delete(value)) values.add(value);
  if (values.size) state.chosen.set(setting, values);
  else state.chosen.delete(setting);
  const fits = (line) => [...state.chosen].every(([name, wanted]) => wanted.has(line.settings[name]));
  show(DATA.lines.filter(fits).map((line) => line.key));
}

// Settings in which lines differ, with their values in the order of the lines.
function settingsOf(lines) {
  const found = new Map();
  for (const line of lines) {
    for (const [name, value] of Object.entries(line.settings)) {
      if (!found.has(name)) found.set(name, new Set());
      found.get(name).add(value);
    }
  }
  return [...found].map(([name, values]) => [name, [...values]]).filter(([, values]) => values.length > 1);
}

function rateOf(chart) {
  return state.rate ?? chart.rate;
}

// Factor of x of a chart at the selected uplink.
function stretch(chart) {
  return chart.rate ? chart.rate / rateOf(chart) : 1;
}
