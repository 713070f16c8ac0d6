// Data of the page, and functions that create elements; text is only inserted as text, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === undefined || value === null) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child || child === ""));
  return element;
}

const node = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const shape = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

function button(text, attributes, act) {
  const made = node("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", act);
  return made;
}

const between = (value, low, high) => Math.min(Math.max(value, low), high);
const round = (value) => Math.round(value * 10) / 10; // a tenth of a pixel
const given = (value) => value !== null && value !== undefined;

const pen = document.createElement("canvas").getContext("2d");

function textWidth(text, size = 12) {
  pen.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

function shortened(text, space, size = 12) {
  if (textWidth(text, size) <= space) return text;
  let end = text.length;
  while (end > 1 && textWidth(`${text.slice(0, end)}…`, size) > space) end -= 1;
  return `${text.slice(0, end).trimEnd()}…`;
}

// A label in an SVG; a shortened one has the whole text as its tooltip.
function label(text, x, y, attributes = {}, space = Infinity, size = 12) {
  const cut = shortened(text, space, size);
  const full = cut === text ? null : shape("title", {}, text);
  return shape("text", { x: round(x), y: round(y), ...attributes }, full, cut);
}

const small = (text, x, y, attributes = {}, space = Infinity) => label(text, x, y, attributes, space, 11);
