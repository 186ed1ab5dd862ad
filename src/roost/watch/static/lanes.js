// Lanes: the calls and waits of each worker over time, by component, and the idle share.
"use strict";

const MOST_LANES = 64;
const DRIVER = "driver";

function laneRow(lane, seconds) {
  const names = [...new Set(lane.spans.filter((span) => !span[6]).map((span) => span[2]))].slice(0, 5).join(", ");
  const waits = [...new Set(lane.spans.filter((span) => span[6]).map((span) => span[2]))].slice(0, 5).join(", ");
  const label = `${lane.address}: ${names || "no calls"}${waits ? `; waits for ${waits}` : ""}` +
    (lane.idle === null ? "" : `; idle ${percent(lane.idle)}`);
  const picture = draw("svg", { viewBox: `0 0 ${seconds} 20`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  for (const [start, end, name, calls, share, failed, isWait] of lane.spans) {
    const from = Math.max(0, start);
    const width = Math.max(seconds / 1200, Math.min(seconds, end) - from);
    const text = `${isWait ? "waits for " : ""}${name}: ${calls > 1 ? `${calls} ${isWait ? "times" : "calls"} in ` : ""}` +
      `${duration(end - start)}${failed ? `, ${failed} failed` : ""}`;
    const shape = isWait ? { y: 12, height: 8, class: "wait" } : { y: failed ? 0 : 2, height: failed ? 20 : 16, fill: methodColour(component(lane.address), name),
      "fill-opacity": 0.35 + 0.65 * share, class: failed ? "failed" : "call" };
    picture.append(draw("rect", { x: from, width, ...shape }, text));
  }
  return make("div", { class: "lane" }, make("span", { text: lane.address, title: lane.address }), picture,
    make("span", { text: lane.idle === null ? "" : percent(lane.idle), title: "idle share of the last 30 s, waits included" }));
}

/** The method in which a role spends most has its colour itself. */
function rankMethods(role, lanes) {
  const totals = new Map();
  for (const [start, end, name, , share, , isWait] of lanes.flatMap((lane) => lane.spans)) {
    if (!isWait) totals.set(name, (totals.get(name) ?? 0) + (end - start) * share);
  }
  const known = methods.get(role) ?? [];
  const first = [...totals].reduce((most, item) => (item[1] > most[1] ? item : most), ["", 0])[0];
  if (first && known[0] !== first) methods.set(role, [first, ...known.filter((name) => name !== first)]);
}

/** The methods of a role with their shades, where it has more than one. */
function shades(role, lanes) {
  const names = [...new Set(lanes.flatMap((lane) => lane.spans.filter((span) => !span[6]).map((span) => span[2])))].slice(0, 8);
  return names.length < 2 ? [] : names.map((name) => {
    const item = make("small", { class: "shade", text: name });
    item.style.setProperty("--component", methodColour(role, name));
    return item;
  });
}

function component(address) {
  return address === DRIVER ? DRIVER : address.slice(0, address.lastIndexOf(":"));
}

async function drawLanes() {
  if (!page.run || !page.run.workers.length || document.hidden) return;
  const seconds = Number(byId("window").value);
  const query = new URLSearchParams({ seconds });
  const end = page.laneEnd;
  if (end !== null) query.set("end", end);
  query.append("worker", DRIVER);
  for (const worker of page.run.workers.slice(0, MOST_LANES)) query.append("worker", worker.address);
  const answer = await fetch(`lanes?${query}`).catch(() => null);
  if (!answer?.ok) return;
  const found = await answer.json();
  // Another part of the run may have been asked for since.
  if (page.laneEnd !== end || laneSeconds() !== seconds) return;
  setText(byId("range"), `${clock(found.start)} to ${clock(found.end)}`);
  const groups = new Map();
  for (const lane of found.lanes) {
    const name = component(lane.address);
    if (name === DRIVER && !lane.spans.length) continue;
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(lane);
  }
  byId("lanes").replaceChildren(...[...groups].map(([name, lanes]) => {
    const idle = lanes.map((lane) => lane.idle).filter((share) => share !== null);
    rankMethods(name, lanes);
    const bubble = idle.length ? `idle ${percent(idle.reduce((sum, share) => sum + share, 0) / idle.length)}` : "";
    return make("section", { "aria-label": `lanes of ${name}` }, make("h3", {}, `${name} `, make("small", { text: bubble }), ...shades(name, lanes)),
      ...lanes.map((lane) => laneRow(lane, found.end - found.start)));
  }));
  const left = page.run.workers.length - MOST_LANES;
  setText(byId("more-lanes"), left > 0 ? `and ${left} more workers without a lane` : "");
}

function moveTo(end) {
  page.laneEnd = end !== null && page.run && end < page.run.now ? end : null;
  byId("live").setAttribute("aria-pressed", String(page.laneEnd === null));
  drawLanes();
}
const laneNow = () => page.laneEnd ?? page.run?.now ?? 0;
const laneSeconds = () => Number(byId("window").value);
const move = (by) => moveTo(laneNow() + (by * laneSeconds()) / 2);

function zoom(by, at = 0.5) {
  const options = [...byId("window").options];
  const place = byId("window").selectedIndex - by;
  if (place < 0 || place >= options.length) return;
  const middle = laneNow() - (1 - at) * laneSeconds();
  const wasLive = page.laneEnd === null;
  byId("window").selectedIndex = place;
  moveTo(wasLive && at >= 0.5 ? null : middle + (1 - at) * laneSeconds());
}

byId("earlier").addEventListener("click", () => move(-1));
byId("later").addEventListener("click", () => move(1));
byId("closer").addEventListener("click", () => zoom(1));
byId("wider").addEventListener("click", () => zoom(-1));
byId("live").addEventListener("click", () => moveTo(null));
byId("window").addEventListener("change", drawLanes);
byId("lanes").addEventListener("wheel", (event) => {
  const picture = event.target.closest("svg");
  if (!picture || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  const box = picture.getBoundingClientRect();
  zoom(event.deltaY < 0 ? 1 : -1, (event.clientX - box.left) / box.width);
}, { passive: false });
document.addEventListener("keydown", (event) => {
  if (event.target.closest("select, input, pre, .scroll, #map") || event.ctrlKey || event.metaKey || event.altKey) return;
  const act = { ArrowLeft: () => move(-1), ArrowRight: () => move(1), "+": () => zoom(1), "-": () => zoom(-1), l: () => moveTo(null) }[event.key];
  if (act) { act(); event.preventDefault(); }
});
