// The readout: a small box beside the pointer, with the same text for screen readers if keys moved it.

const tip = document.getElementById("tip");
const live = document.getElementById("live");

const narrow = () => window.innerWidth < 600;

// rows: [swatch or null, label, value]
function showTip(x, y, title, rows, more = "") {
  const items = rows.map(([sign, text, value]) =>
    node("tr", {}, node("td", {}, sign), node("th", {}, text), node("td", {}, value)),
  );
  tip.replaceChildren(node("strong", {}, title), node("table", {}, ...items));
  if (more) tip.append(node("em", {}, more));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const [left, top] = narrow() ? awayFrom(y, height) : beside(x, y, width, height);
  tip.style.left = `${left}px`;
  tip.style.top = `${between(top, 4, Math.max(4, window.innerHeight - height - 4))}px`;
}

function beside(x, y, width, height) {
  const right = x + 16 + width <= document.documentElement.clientWidth - 4;
  return [right ? x + 16 : Math.max(4, x - 16 - width), y - height / 2];
}

// On a phone, at the end of the screen away from the finger; at the bottom, above the folded legend.
function awayFrom(y, height) {
  const folded = document.querySelector("#legend .fold")?.offsetHeight ?? 0;
  return [4, y > window.innerHeight / 2 ? 4 : window.innerHeight - height - folded - 8];
}

function hideTip() {
  tip.hidden = true;
}

function announce(title, rows, more = "") {
  const parts = rows.map(([, text, value]) => (text ? `${text} ${value}` : value));
  live.textContent = [`${title}: ${parts.join("; ")}`, more].filter(Boolean).join("; ");
}

window.addEventListener("scroll", hideTip, { passive: true });
