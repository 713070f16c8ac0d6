// The readout: a small box beside the pointer, and the same words for screen readers when keys moved it.

const tip = document.getElementById("tip");
const live = document.getElementById("live");

// rows: [swatch or null, label, value]
function showTip(x, y, title, rows, more = "") {
  const items = rows.map(([sign, text, value]) =>
    node("tr", {}, node("td", {}, sign), node("th", {}, text), node("td", {}, value)),
  );
  tip.replaceChildren(node("strong", {}, title), node("table", {}, ...items));
  if (more) tip.append(node("em", {}, more));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const room = document.documentElement.clientWidth;
  const right = x + 16 + width <= room - 4;
  const left = right ? x + 16 : x - 16 - width >= 4 ? x - 16 - width : between(x - width / 2, 4, Math.max(4, room - width - 4));
  const beside = right || x - 16 - width >= 4;
  const top = beside ? y - height / 2 : y - height - 24;
  tip.style.left = `${left}px`;
  tip.style.top = `${between(top, 4, Math.max(4, window.innerHeight - height - 4))}px`;
}

function hideTip() {
  tip.hidden = true;
}

function announce(title, rows, more = "") {
  const parts = rows.map(([, text, value]) => (text ? `${text} ${value}` : value));
  live.textContent = [`${title}: ${parts.join("; ")}`, more].filter(Boolean).join("; ");
}

window.addEventListener("scroll", hideTip, { passive: true });
