// One legend for all charts and tables.

// A sample of a line, for legends, tables and readouts.
function stroke({ hue, dash, mark }) {
  const drawing = shape("svg", { class: `swatch ${hue}`, width: 26, height: 12, "aria-hidden": "true" });
  drawing.append(shape("path", { class: `curve ${dash}`, d: "M1,6H25" }));
  if (mark) drawing.append(shape("path", { class: "mark", d: marker(mark, 13, 6) }));
  return drawing;
}

const swatch = (key) => stroke(lookOf(key));

function legendRow(line) {
  const about = { class: "line", "aria-pressed": "true", "data-line": line.key, title: line.label };
  const press = button("", about, (event) => (event.shiftKey || event.altKey ? showOnly(line.key) : toggle(line.key)));
  press.append(swatch(line.key), node("span", {}, line.label));
  press.addEventListener("dblclick", () => showOnly(line.key));
  const only = button("only", { class: "only", "aria-label": `only ${line.label}` }, () => showOnly(line.key));
  const row = node("li", {}, press, only);
  for (const name of ["pointerenter", "focusin"]) row.addEventListener(name, () => emphasise(line.key));
  for (const name of ["pointerleave", "focusout"]) row.addEventListener(name, () => emphasise(null));
  return row;
}

// Highlights a line while the pointer is over it.
function emphasise(key) {
  for (const drawn of document.querySelectorAll("svg [data-line]")) {
    drawn.classList.toggle("faded", key !== null && drawn.dataset.line !== "" && drawn.dataset.line !== key);
  }
}

function chip(setting, value) {
  const made = button(value, { class: "chip", "aria-pressed": "false" }, () => choose(setting, value));
  watch(() => made.setAttribute("aria-pressed", String(state.chosen.get(setting)?.has(value) ?? false)));
  return made;
}

function chips() {
  const settings = settingsOf(DATA.lines);
  if (DATA.lines.length < 3 || !settings.length) return null;
  const groups = settings.map(([name, values]) =>
    node(
      "div",
      { class: "chips", role: "group", "aria-label": `only ${name}` },
      node("span", {}, name),
      ...values.map((value) => chip(name, value)),
    ),
  );
  return node("div", { class: "settings" }, ...groups);
}

function buildLegend() {
  const place = document.getElementById("legend");
  if (!place) return;
  const rows = DATA.lines.map(legendRow);
  const counts = [node("span", { class: "count" }), node("span", { class: "count" })];
  const fold = button("", { class: "fold", "aria-expanded": "false", "aria-controls": "legend-body" }, () => {
    const open = place.classList.toggle("open");
    fold.setAttribute("aria-expanded", String(open));
  });
  fold.append(node("span", {}, "Lines"), counts[0]); // on small screens; otherwise a heading
  const all = node(
    "div",
    { class: "all" },
    button("all", {}, showAll),
    button("none", {}, () => showOnly()),
  );
  const list = node("ul", {}, ...rows);
  const heading = node("h2", {}, node("span", {}, "Lines"), counts[1]);
  place.append(heading, fold, node("div", { id: "legend-body", class: "body" }, all, chips(), list));
  const follow = () => {
    for (const count of counts) count.textContent = `${state.visible.size} of ${LINES.size} shown`;
    for (const row of rows) {
      const press = row.firstElementChild;
      press.setAttribute("aria-pressed", String(state.visible.has(press.dataset.line)));
    }
  };
  watch(follow);
  follow();
}
