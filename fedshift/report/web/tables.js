// Tables follow the legend, and are sorted by a column when its head is pressed.

// Rows of hidden lines are left out, and their number is shown.
function followLegend(table) {
  const rows = [...table.querySelectorAll("tr[data-line]")];
  if (LINES.size < 2 || !rows.length) return;
  for (const row of rows) row.firstElementChild?.prepend(swatch(DATA.lines[row.dataset.line].key));
  watch(() => {
    for (const row of rows) row.hidden = !shown(DATA.lines[row.dataset.line].key);
    const out = rows.filter((row) => row.hidden).length;
    const note = out ? `${out} ${out === 1 ? "row" : "rows"} of hidden lines left out` : "";
    table.querySelector(".left-out").textContent = note;
  });
}

// All columns are visible: a table that is too wide is wrapped, and if that is not enough, the cells of each row are
// placed below each other, each with the name of its column.
function fitTable(table) {
  const scroll = table.querySelector(".scroll");
  const names = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
  for (const row of table.querySelectorAll("tbody tr")) {
    [...row.cells].forEach((cell, place) => (cell.dataset.column = names[place]));
  }
  const fit = () => {
    table.classList.remove("wrapped", "stacked");
    for (const way of ["wrapped", "stacked"]) {
      if (scroll.scrollWidth > scroll.clientWidth) table.classList.add(way);
    }
  };
  window.addEventListener("resize", fit);
  table.addEventListener("toggle", fit);
  fit();
}

// Numbers by size, texts by alphabet, missing values last.
function inOrder(one, other) {
  const numbers = [one, other].map((text) => parseFloat(text.replace("−", "-")));
  if (numbers.every(Number.isFinite) && numbers[0] !== numbers[1]) return numbers[0] - numbers[1];
  return one.localeCompare(other, "en", { numeric: true });
}

function sortBy(table, column, direction) {
  const body = table.querySelector("tbody");
  const text = (row) => row.cells[column].textContent.trim();
  const missing = (row) => Number(["", "-", "–", "—"].includes(text(row)));
  const rows = [...body.rows].sort((one, other) => {
    if (!direction) return one.dataset.place - other.dataset.place; // original order
    return missing(one) - missing(other) || direction * inOrder(text(one), text(other));
  });
  body.append(...rows);
}

// Orders after each press.
const NEXT = { none: ["ascending", 1], ascending: ["descending", -1], descending: ["none", 0] };

function makeSortable(table) {
  const heads = [...table.querySelectorAll("thead th")];
  const rows = [...table.querySelectorAll("tbody tr")];
  if (rows.length < 3) return;
  rows.forEach((row, place) => (row.dataset.place = place));
  heads.forEach((head, column) => {
    const press = button(head.textContent, { class: "sort" }, () => {
      const [sorted, direction] = NEXT[head.getAttribute("aria-sort") ?? "none"];
      for (const other of heads) other.setAttribute("aria-sort", other === head ? sorted : "none");
      sortBy(table, column, direction);
    });
    head.replaceChildren(press);
  });
}
