// Sets up the page.

const figures = [...document.querySelectorAll("figure[data-chart]")].map(makeFigure);
const byBox = new Map(figures.map((figure) => [figure.box, figure]));

const nearby = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      const figure = byBox.get(target);
      figure.near = isIntersecting;
      if (isIntersecting && figure.stale) figure.draw();
    }
  },
  { rootMargin: "500px" },
);
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const figure = byBox.get(target);
    if (target.clientWidth === figure.width) continue;
    figure.stale = true;
    if (figure.near) figure.draw();
  }
});
for (const { box } of figures) {
  nearby.observe(box);
  resized.observe(box);
}

let waiting = 0;
let lastRate = null;
watch(() => {
  if (state.rate !== lastRate) {
    for (const { chart, view } of figures) if (chart.rate) view.zoom = view.at = null; // values on another axis
    lastRate = state.rate;
  }
  for (const figure of figures) figure.stale = true;
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => figures.filter((figure) => figure.near).forEach((figure) => figure.draw()));
});
window.addEventListener("beforeprint", () => {
  for (const figure of figures) if (figure.stale) figure.draw();
});

for (const choice of document.querySelectorAll(".choice")) {
  const select = choice.querySelector("select");
  const places = [...choice.querySelectorAll("figure")];
  const turn = () => places.forEach((place, number) => (place.hidden = number !== select.selectedIndex));
  select.addEventListener("change", turn);
  turn(); // a browser may restore the selection after a reload
}

// Light or dark: as the system, until the reader switches. A browser may forbid storage for a page opened from a disk.
const theme = document.getElementById("theme");
const system = window.matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;

function remembered(value) {
  try {
    if (value) localStorage.setItem("fedshift-theme", value);
    return localStorage.getItem("fedshift-theme");
  } catch {
    return null;
  }
}

const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
const nameTheme = () => {
  theme.textContent = isDark() ? "Light" : "Dark";
  theme.setAttribute("aria-label", `switch to ${isDark() ? "light" : "dark"} colours`);
};
const before = remembered();
if (before === "dark" || before === "light") root.dataset.theme = before;
theme.hidden = false;
theme.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  remembered(root.dataset.theme);
  nameTheme();
});
system.addEventListener("change", nameTheme);
nameTheme();

buildLegend();
for (const table of document.querySelectorAll(".table")) {
  followLegend(table);
  fitTable(table);
  makeSortable(table);
}
