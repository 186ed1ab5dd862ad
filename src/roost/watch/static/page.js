// Draws a run from what the server sends.
"use strict";

let source = null;

function drawHead() {
  const run = page.run;
  document.title = `${run.title} · Roost`;
  setText(byId("title"), run.title);
  // Set only when it changes: screen readers read it aloud.
  setText(byId("status"), run.status);
  setText(byId("elapsed"), duration(run.now - run.began));
  const took = run.step && run.now - run.step.since;
  setText(byId("step"), run.step ? `step ${number(run.step.number + 1)} for ${duration(took)}, usually ${duration(run.step.usual)}` : "");
  byId("step").classList.toggle("bad", Boolean(run.step) && took > Math.max(5, 3 * run.step.usual));
  const counts = Object.entries(run.counts).filter(([, count]) => count);
  const text = JSON.stringify(counts);
  if (byId("counts").dataset.shown !== text) {
    byId("counts").dataset.shown = text;
    byId("counts").replaceChildren(...counts.map(([state, count]) => make("span", { class: state, text: `${MARKS[state]} ${count} ${state}` })));
  }
  const old = [...byId("notices").children].map((item) => item.textContent).join("\n");
  if (old !== run.notices.join("\n")) byId("notices").replaceChildren(...run.notices.map((notice) => make("p", { text: notice })));
}

/** What limits the run, in a sentence; a click shows why, and leads to the workers it is about. */
function drawVerdict() {
  const found = page.run.verdict;
  const box = byId("verdict");
  box.hidden = !found;
  const key = JSON.stringify(found);
  if (!found || box.dataset.shown === key) return;
  box.dataset.shown = key;
  box.className = ["death", "hang"].includes(found.limit) ? "bad" : "";
  setText(box.firstElementChild, found.text);
  box.lastElementChild.replaceChildren(...found.evidence.map((text) => make("li", { text })),
    ...found.workers.map((address) => make("li", {}, make("button", { type: "button", text: address, on: () => select(address) }))));
}

/** Fill a table: rows are texts; the section is hidden while there are none. */
function fillTable(id, rows) {
  byId(id).hidden = !rows.length;
  const body = byId(id).querySelector("tbody");
  const key = JSON.stringify(rows);
  const heads = [...byId(id).querySelectorAll("thead th")].map((head) => head.textContent);
  if (body.dataset.shown === key) return;
  body.dataset.shown = key;
  body.replaceChildren(...rows.map((row) => make("tr", {}, make("th", { scope: "row", text: row[0] }), ...row.slice(1).map((text, place) => make("td", { text, "data-head": heads[place + 1] })))));
}

function drawTraffic() {
  const run = page.run;
  fillTable("channels", run.channels.map((item) => [item.name, item.most ? `${item.depth} of ${item.most}` : String(item.depth),
    number(item.puts_per_second), number(item.gets_per_second), String(item.getters), String(item.putters)]));
  fillTable("links", run.links.map((item) => [item.name, String(item.version), `${duration(run.now - item.updated)} ago`,
    duration(item.seconds), duration(item.pause), `${item.size || "< 1"} MiB`]));
  fillTable("engines", run.engines.map((item) => [item.worker + (item.is_asleep ? " (asleep)" : ""), item.version === null ? "–" : String(item.version),
    item.behind === null ? "–" : item.behind ? `${item.behind} behind` : "newest", item.per_second === null ? "–" : number(item.per_second), duration(item.latency),
    String(item.busy), `${item.served}${item.failed ? `, ${item.failed} failed` : ""}`]));
}

let shownEvents = "";
function drawEvents() {
  const key = JSON.stringify(page.run.events);
  if (key === shownEvents) return;
  shownEvents = key;
  byId("events").replaceChildren(...page.run.events.map((event) => make("li", {},
    make("time", { text: clock(event.when) }), " ",
    make("button", { type: "button", text: "lane", "aria-label": `lane at ${clock(event.when)}`,
      on: () => { moveTo(event.when + laneSeconds() / 2); byId("lanes-title").scrollIntoView(); } }), " ",
    make("span", { class: ["died", "lost", "failed"].includes(event.what) ? "bad" : "", text: `${event.who} ${event.what}` }),
    event.text ? `${["restarted", "lost"].includes(event.what) ? ":" : ""} ${event.text}` : "")));
}

function drawAll() {
  drawHead();
  drawVerdict();
  drawMap();
  drawDetail();
  drawTraffic();
  drawEvents();
}

function connect() {
  source?.close();
  source = new EventSource(`events?node=${page.node}`);
  source.addEventListener("run", (event) => {
    const isFirst = page.run === null;
    // Of several that arrive between two frames only the last is drawn.
    if (!page.isDue) requestAnimationFrame(() => { page.isDue = false; drawAll(); });
    page.isDue = true;
    page.run = JSON.parse(event.data);
    if (isFirst) drawLanes();
  });
  source.addEventListener("charts", (event) => drawCharts(JSON.parse(event.data)));
  source.addEventListener("error", () => setText(byId("status"), "the watcher has ended: run roost watch again"));
}

connect();
setInterval(() => { if (page.laneEnd === null) drawLanes(); }, 1000);
