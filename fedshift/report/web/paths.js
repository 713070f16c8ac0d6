// Paths of curves, bands and marks.

// Pieces between gaps; a single value becomes a dot.
function pieces(points) {
  const found = [];
  let piece = [];
  for (const point of points) {
    if (point) piece.push(point);
    else if (piece.length) {
      found.push(piece);
      piece = [];
    }
  }
  if (piece.length) found.push(piece);
  return found;
}

function curvePath(points) {
  return pieces(points)
    .map((piece) => `M${piece.map(([x, y]) => `${round(x)},${round(y)}`).join("L")}${piece.length === 1 ? "h0" : ""}`)
    .join("");
}

// points: [x, low, high]
function bandPath(points) {
  return pieces(points)
    .map((piece) => {
      const there = piece.map(([x, low]) => `${round(x)},${round(low)}`);
      const back = piece.map(([x, , high]) => `${round(x)},${round(high)}`).reverse();
      return `M${[...there, ...back].join("L")}Z`;
    })
    .join("");
}

// 1 disc, 2 square, 3 triangle, 4 diamond, 5 upside-down triangle
function marker(kind, x, y, size = 3.4) {
  const s = size;
  const at = `M${round(x)},${round(y)}`;
  switch (kind) {
    case 1:
      return `${at}m${-s},0a${s},${s} 0 1,0 ${2 * s},0a${s},${s} 0 1,0 ${-2 * s},0Z`;
    case 2:
      return `${at}m${-s},${-s}h${2 * s}v${2 * s}h${-2 * s}Z`;
    case 3:
      return `${at}m0,${-s * 1.2}l${s * 1.2},${s * 2.1}h${-s * 2.4}Z`;
    case 4:
      return `${at}m0,${-s * 1.35}l${s * 1.35},${s * 1.35}l${-s * 1.35},${s * 1.35}l${-s * 1.35},${-s * 1.35}Z`;
    default:
      return `${at}m0,${s * 1.2}l${s * 1.2},${-s * 2.1}h${-s * 2.4}Z`;
  }
}

// About eight marks per curve, at different places for every mark; curves of few points have one at each.
function marksPath(points, kind) {
  const there = points.filter(Boolean);
  const few = there.length <= 12;
  if (!kind && !few) return "";
  const every = few ? 1 : Math.ceil(there.length / 8);
  const first = few ? 0 : Math.floor((every * kind) / (MARKS + 1));
  return there
    .filter((_, place) => place % every === first)
    .map(([x, y]) => marker(kind || 1, x, y, kind ? 3.4 : 2.6))
    .join("");
}

// Colours of all heat maps: viridis, whose lightness increases evenly, also for the colour-blind and in grey.
const VIRIDIS = "440154 482878 3e4989 31688e 26828e 1f9e89 35b779 6ece58 b5de2b fde725".split(" ");
const RAMP = VIRIDIS.map((hex) => [0, 2, 4].map((place) => parseInt(hex.slice(place, place + 2), 16)));

function ramp(share) {
  const place = between(share, 0, 1) * (RAMP.length - 1);
  const below = Math.min(Math.floor(place), RAMP.length - 2);
  return RAMP[below].map((part, channel) => Math.round(part + (RAMP[below + 1][channel] - part) * (place - below)));
}

const rgb = (colour) => `rgb(${colour.join(",")})`;

// Black or white, whichever has more contrast on a colour.
function inkOn(colour) {
  const [r, g, b] = colour.map((part) => (part / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "black" : "white";
}
