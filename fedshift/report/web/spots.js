// Readouts of charts that consist of separate items: cells, parts of bars, means, bins.

function readSpot(figure, number, spoken) {
  const { drawn, box } = figure;
  const { x, y, title, rows } = drawn.spots[number];
  clearSpot(figure);
  figure.view.spot = number;
  drawn.svg.querySelector(`[data-spot="${number}"]`).classList.add("read");
  const { left, top } = box.querySelector("svg").getBoundingClientRect();
  showTip(left + x, top + y, title, rows);
  if (spoken) announce(title, rows);
}

function clearSpot({ drawn }) {
  drawn?.svg.querySelector(".read")?.classList.remove("read");
  hideTip();
}

function pointSpots(figure, event) {
  const hit = event.target.closest("[data-spot]");
  if (hit) readSpot(figure, Number(hit.dataset.spot), false);
  else clearSpot(figure);
}

// Left and right go to the next item, up and down to the next row.
function stepSpots(figure, key) {
  const { spots, across = 1 } = figure.drawn;
  if (!spots.length) return;
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -across, ArrowDown: across };
  const before = figure.view.spot;
  let next = given(before) ? before + (steps[key] ?? 0) : 0;
  if (key === "Home") next = 0;
  if (key === "End") next = spots.length - 1;
  if (next < 0 || next >= spots.length) next = before;
  readSpot(figure, between(next, 0, spots.length - 1), true);
}
