// The map: each worker on its node and devices, as in the picture of the plan, with what it does now.
"use strict";

const nodeBoxes = new Map();
const tiles = new Map();

function describe(worker) {
  const since = duration(page.run.now - worker.since);
  const doing = worker.state === "busy" ? `in ${worker.doing}`
    : worker.state === "stuck" ? `stuck in ${worker.doing}${worker.waits_for ? `, waiting for ${worker.waits_for},` : ""} without progress`
    : worker.state === "waiting" ? `waiting for ${worker.waits_for}${worker.doing ? ` in ${worker.doing}` : ""}` : worker.state;
  return `${worker.address}: ${doing} for ${since}, idle ${percent(worker.idle_share)}` +
    (worker.restarts ? `, restarted ${worker.restarts} times` : "");
}

function shortly(worker) {
  if (worker.state === "busy") return worker.doing || "busy";
  if (worker.state === "stuck") return `stuck in ${worker.doing}`;
  return worker.state === "waiting" ? `waits for ${worker.waits_for}` : worker.state;
}

function setComponent(element, name) {
  const colour = roleColour(name);
  if (element.dataset.colour !== colour) { element.dataset.colour = colour; element.style.setProperty("--component", colour); }
}

function updateTile(worker) {
  let tile = tiles.get(worker.address);
  if (!tile) {
    tile = make("button", { type: "button", on: () => select(worker.address) },
      make("b", {}, make("i", { "aria-hidden": "true" }), make("span")), make("span", { class: "hidden" }), make("span"));
    tile.dataset.worker = worker.address;
    tiles.set(worker.address, tile);
  }
  setAttribute(tile, "class", `tile ${worker.state}`);
  setComponent(tile, worker.component);
  const text = describe(worker);
  setAttribute(tile, "aria-pressed", String(worker.address === page.selected));
  setAttribute(tile, "title", `${text}\npid ${worker.pid} on ${worker.host}, node ${worker.node ?? 0}, devices ${worker.devices.join(", ") || "none"}` +
    `\nlast call: ${worker.doing || "none"}, ${duration(worker.last_seconds)}`);
  const [head, state, doing] = tile.children;
  setText(head.firstChild, `${MARKS[worker.state]} `);
  setText(head.lastChild, `${worker.address}${worker.restarts ? ` ↻${worker.restarts}` : ""}`);
  // For those who cannot see the colour.
  setText(state, worker.state === "busy" ? "busy in " : "");
  setText(doing, shortly(worker));
  // In the columns of its devices, as in the plan.
  const first = Math.min(...worker.devices);
  const column = worker.devices.length ? `${first + 1} / span ${Math.max(...worker.devices) - first + 1}` : "auto";
  if (tile.dataset.column !== column) { tile.dataset.column = column; tile.style.gridColumn = column; }
  return tile;
}

function makeNode(rank) {
  const box = { all: make("section", { class: "node" }), title: make("h3", { text: `node ${rank}` }), facts: make("p"),
    heads: make("div", { class: "heads", "aria-hidden": "true" }), tiles: make("div", { class: "tiles" }), others: make("div", { class: "others" }), shown: "" };
  box.all.setAttribute("aria-label", `node ${rank}`);
  box.all.append(make("div", { class: "about" }, box.title, box.facts), make("div", { class: "devices" }, box.heads, box.tiles, box.others));
  return box;
}

function nodeFacts(node) {
  const facts = [];
  if (node.cpu !== null) facts.push(`CPU ${percent(node.cpu)}`);
  if (node.of) facts.push(`${gibibytes(node.memory)} of ${gibibytes(node.of)} GiB`);
  return facts.join(" · ");
}

function deviceText(place, device) {
  if (!device) return String(place);
  const [load, used, of] = device;
  return [place, load === null ? "" : percent(load), used === null || !of ? "" : `${gibibytes(used)}/${gibibytes(of)}G`].filter(String).join(" · ");
}

function summary(node) {
  const text = Object.entries(node.counts).map(([state, count]) => `${MARKS[state]} ${count} ${state}`).join("  ");
  return make("button", { type: "button", text: text || "no workers", "aria-label": `open node ${node.rank}: ${text}`,
    class: "summary", on: () => { page.node = node.rank; connect(); } });
}

function updateNode(node, workers) {
  if (!nodeBoxes.has(node.rank)) nodeBoxes.set(node.rank, makeNode(node.rank));
  const box = nodeBoxes.get(node.rank);
  setText(box.facts, nodeFacts(node));
  if (page.run.large && !workers.length) {
    const text = JSON.stringify(node.counts);
    if (box.shown !== text) {
      box.shown = text;
      // It may have been the open one.
      box.headsShown = "";
      box.heads.replaceChildren();
      box.others.replaceChildren();
      box.tiles.replaceChildren(summary(node));
    }
    return box.all;
  }
  // All columns of the plan, also those that nobody uses.
  const heads = JSON.stringify([node.columns, node.devices]);
  if (box.headsShown !== heads) {
    box.headsShown = heads;
    box.all.style.setProperty("--columns", node.columns || 1);
    box.heads.replaceChildren(...Array.from({ length: node.columns }, (_, place) => make("span", { text: deviceText(place, node.devices[place]) })));
  }
  const shown = [node.columns, ...workers.map((worker) => worker.address)].join("\n");
  const made = workers.map(updateTile);
  if (box.shown !== shown) {
    box.shown = shown;
    const used = new Set(workers.flatMap((worker) => worker.devices));
    const idle = Array.from({ length: node.columns }, (_, place) => place).filter((place) => !used.has(place)).map((place) => {
      const cell = make("span", { class: "unused", text: "nobody", "data-place": place, title: `no worker is on device ${place}` });
      cell.style.gridColumn = `${place + 1}`;
      return cell;
    });
    box.tiles.replaceChildren(...idle, ...made.filter((_, place) => hasDevices(workers[place])));
    const others = made.filter((_, place) => !hasDevices(workers[place]));
    box.others.replaceChildren(...(others.length ? [make("small", { text: "on the CPU" })] : []), ...others);
  }
  return box.all;
}

let shownNodes = "";
function drawMap() {
  const byNode = new Map();
  // Workers without devices come below the others.
  const ordered = [...page.run.workers.filter(hasDevices), ...page.run.workers.filter((worker) => !hasDevices(worker))];
  for (const worker of ordered) {
    const rank = worker.node ?? 0;
    if (!byNode.has(rank)) byNode.set(rank, []);
    byNode.get(rank).push(worker);
  }
  const boxes = page.run.nodes.map((node) => updateNode(node, byNode.get(node.rank) ?? []));
  const key = page.run.nodes.map((node) => node.rank).join();
  byId("map").classList.toggle("large", page.run.large);
  if (key !== shownNodes) { shownNodes = key; byId("map").replaceChildren(...boxes); }
  drawLegend();
}

let shownComponents = "";
function drawLegend() {
  const names = [...new Set(page.run.workers.map((worker) => worker.component))];
  const key = JSON.stringify([names, page.run.colours]);
  if (key === shownComponents) return;
  shownComponents = key;
  byId("legend").replaceChildren(...names.map((name) => {
    const item = make("li", { text: name });
    setComponent(item, name);
    return item;
  }));
}

byId("map").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step) return;
  const all = [...byId("map").querySelectorAll("button")];
  const next = all[all.indexOf(document.activeElement) + step];
  if (next) { next.focus(); event.preventDefault(); }
});

// The detail of one worker.

function drawDetail() {
  const worker = page.run?.workers.find((item) => item.address === page.selected);
  byId("detail").hidden = !worker;
  if (!worker) return;
  setText(byId("detail-title"), worker.address);
  const facts = {
    state: describe(worker), process: `pid ${worker.pid} on ${worker.host}, node ${worker.node ?? 0}`,
    devices: worker.devices.join(", ") || "none", calls: `${worker.calls}${worker.failed ? `, ${worker.failed} failed` : ""}`,
    "last call": `${worker.doing || "none"}, ${duration(worker.last_seconds)}`,
    CPU: percent(worker.cpu), memory: worker.memory === null ? "–" : `${worker.memory} MiB`, restarts: String(worker.restarts),
  };
  const old = byId("facts").querySelectorAll("dd");
  if (old.length !== Object.keys(facts).length) {
    byId("facts").replaceChildren(...Object.entries(facts).flatMap(([name, text]) => [make("dt", { text: name }), make("dd", { text })]));
  } else Object.values(facts).forEach((text, place) => setText(old[place], text));
}

async function fetchText(name, address, otherwise) {
  const answer = await fetch(`${name}?worker=${encodeURIComponent(address)}`).catch(() => null);
  if (!answer) return "the watcher does not answer";
  const text = await answer.text();
  return text || (answer.ok ? "(nothing yet)" : otherwise);
}

async function showLog() {
  const address = page.selected;
  const text = await fetchText("log", address, "(no log here)");
  if (page.selected !== address) return;
  const log = byId("log");
  const follows = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  setText(log, text);
  if (follows) log.scrollTop = log.scrollHeight;
}

function select(address) {
  page.selected = address;
  byId("log").textContent = "";
  byId("stack").textContent = "";
  byId("stack").hidden = true;
  drawDetail();
  drawMap();
  showLog();
  byId("detail-title").focus({ preventScroll: true });
  byId("detail").scrollIntoView({ block: "nearest" });
}

byId("ask-stack").addEventListener("click", async () => {
  const address = page.selected;
  byId("stack").hidden = false;
  setText(byId("stack"), `asking ${address}, which takes up to 10 s`);
  const text = await fetchText("stack", address, "(no stack here)");
  if (page.selected === address) setText(byId("stack"), text);
});

function unselect() {
  const tile = tiles.get(page.selected);
  page.selected = null;
  drawDetail();
  if (page.run) drawMap();
  tile?.focus({ preventScroll: true });
}
byId("close").addEventListener("click", unselect);
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && page.selected) unselect(); });
setInterval(() => { if (page.selected && !document.hidden && page.run && !page.run.over) showLog(); }, 2000);
