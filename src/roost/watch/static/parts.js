// What all parts of the page share. Text from the run is only ever set as text, never as markup.
"use strict";

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"];
const MARKS = { busy: "■", waiting: "◔", idle: "·", silent: "?", stuck: "!", asleep: "z", dead: "✕", ended: "–" };

/** What the page shows now; every part reads it, and only page.js changes `run`. */
const page = { run: null, selected: null, node: 0, laneEnd: null };

function make(name, options = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key === "text") element.textContent = value;
    else if (key === "on") element.addEventListener("click", value);
    else if (key === "class") element.className = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function draw(name, attributes = {}, text = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) {
    const title = document.createElementNS(SVG, "title");
    title.textContent = text;
    element.append(title);
  }
  return element;
}

/** Set a text or an attribute only if it differs: an element that does not change keeps its focus and its tooltip. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.max(0, seconds);
  if (s < 0.001) return `${(s * 1e6).toFixed(0)} µs`;
  if (s < 1) return `${(s * 1e3).toFixed(s < 0.1 ? 1 : 0)} ms`;
  if (s < 60) return `${s.toFixed(1)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

const clock = (when) => new Date(when * 1000).toLocaleTimeString([], { hourCycle: "h23" });
const percent = (share) => (share === null ? "–" : `${Math.round(share * 100)} %`);
const gibibytes = (mebibytes) => (mebibytes / 1024).toFixed(mebibytes < 10240 ? 1 : 0);
const number = (value) => (value === null || value === undefined ? "–"
  : Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4)));

/** A role has the colour of the plan's picture everywhere, and its methods are shades of it. */
const isDark = matchMedia("(prefers-color-scheme: dark)");
const roleColour = (name) => COLOURS[(page.run?.colours[name] ?? 7) % COLOURS.length];
const SHADES = [[0, 0], [255, 0.45], [0, 0.4], [255, 0.7], [0, 0.65]];

function mix(colour, towards, part) {
  return `#${[1, 3, 5].map((at) => Math.round(parseInt(colour.slice(at, at + 2), 16) * (1 - part) + towards * part)
    .toString(16).padStart(2, "0")).join("")}`;
}

const methods = new Map();
function methodColour(role, method) {
  if (!methods.has(role)) methods.set(role, []);
  const known = methods.get(role);
  if (!known.includes(method)) known.push(method);
  return mix(roleColour(role), ...SHADES[known.indexOf(method) % SHADES.length]);
}
const hasDevices = (worker) => worker.devices.length > 0;
