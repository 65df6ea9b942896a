// Makes elements without markup: a name from the inspection only becomes text.
const $ = (selector, root = document) => root.querySelector(selector);
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return node;
}

const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const name = (text) => el("bdi", {}, text);
const swatch = (kind) => el("span", { class: `swatch k${kind}`, "aria-hidden": "true" });
const colour = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

// Returns a button for an owner: its kind, slot and length. A click shows the slot on the map.
function chip(at, label = "") {
  const slot = owners.slots[at];
  const text = `${label || data.kinds[owners.kinds[at]]}: slot ${slot}, ${tokens(owners.labels[at])}`;
  return el(
    "button",
    { type: "button", class: "chip", title: owners.names[at], onclick: () => map.choose(slot, true) },
    swatch(owners.kinds[at]),
    text,
  );
}

const later = (() => {
  // runs the last of several requests for the same call, after the delay
  const waiting = new Map();
  return (call, milliseconds = 0) => {
    clearTimeout(waiting.get(call));
    waiting.set(call, setTimeout(call, milliseconds));
  };
})();
