// Curves: the steps, the metrics of the job, channels, engines, weights and nodes.
"use strict";

const charts = new Map();
/** A metric of the user's may be called as one of ours. */
const nameOf = (chart) => `${chart.title}\n${chart.unit}\n${chart.axis}`;
// The palette, where a thin line would be too pale or too dark.
const ON_DARK = ["#3B8FD9", "#E69F00", "#2BC79B", "#E48FC0", "#7CCBF5", "#FF8C4B", "#F0E442", "#B0B0B0"];
const ON_LIGHT = ["#0072B2", "#C98B00", "#009E73", "#CC79A7", "#3FA0DA", "#D55E00", "#A89A00", "#808080"];

/** Lines are thin: they have the colour of their role, as far as that can be seen; others are grey. Those alike are shades. */
function lineColour(chart, place) {
  const role = chart.series[place].role;
  const alike = chart.series.filter((line) => line.role === role).length;
  const before = chart.series.slice(0, place).filter((line) => line.role === role).length;
  const known = page.run?.colours[role] ?? COLOURS.length - 1;
  const colour = (isDark.matches ? ON_DARK : ON_LIGHT)[known % COLOURS.length];
  return mix(colour, isDark.matches ? 255 : 0, (0.7 * before) / Math.max(2, alike - 1));
}
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function chartLabel(chart) {
  return `${chart.title}: ` + chart.series.map((line) => {
    const ys = line.points.map((point) => point[1]);
    return `${line.name}, ${ys.length} points from ${number(Math.min(...ys))} to ${number(Math.max(...ys))}, last ${number(ys.at(-1))}`;
  }).join("; ") + (chart.bound ? `; bound ${number(chart.bound)}` : "");
}

function chartData(chart) {
  const lines = chart.series.map((line) => [line.points.map((point) => point[0]), line.points.map((point) => point[1])]);
  const data = lines.length > 1 ? uPlot.join(lines) : [...lines[0]];
  if (chart.bound) data.push(data[0].map(() => chart.bound));
  return data;
}

function chartOptions(chart, width) {
  const axis = { stroke: style("--dim"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 }, font: "11px system-ui" };
  const series = chart.series.map((line, place) => ({ label: line.name, stroke: lineColour(chart, place), width: 1.5,
    points: { show: line.points.length < 30, size: 4 }, spanGaps: true, value: (_, value) => number(value) }));
  if (chart.bound) series.push({ label: "bound of roost search", stroke: style("--dim"), dash: [6, 4], width: 1.5, points: { show: false }, value: (_, value) => number(value) });
  return { width, height: 150, padding: [8, 32, 0, 0], series: [{ label: chart.axis, value: (_, x) => (x === null ? "–" : chart.axis === "time" ? clock(x) : number(x)) }, ...series],
    scales: { x: { time: chart.axis === "time" }, y: { range: (_, low, high) => (chart.unit || chart.title === "Items in channels" ? [0, Math.max(high * 1.1, 1e-6)] : [low, high === low ? low + 1 : high + (high - low) * 0.05]) } },
    axes: [{ ...axis, size: 26, space: 60, ...(chart.axis === "time" ? { values: "{HH}:{mm}:{ss}" } : {}) },
      { ...axis, size: (_, labels) => 20 + 7 * Math.max(3, ...(labels ?? []).map((label) => label.length)), values: (_, values) => values.map((value) => number(value)) }],
    legend: { show: series.length > 1 }, cursor: { y: false }, hooks: { setCursor: [(plot) => showCaption(nameOf(chart), plot.cursor.idx)] } };
}

/** Show the values under the pointer in the caption, or the last ones. */
function showCaption(name, place = null) {
  const made = charts.get(name);
  if (!made) return;
  const { chart, plot, caption } = made;
  const unit = chart.unit ? ` ${chart.unit}` : "";
  const values = chart.series.slice(0, 3).map((line, at) => {
    const value = place === null ? line.points.at(-1)[1] : plot.data[at + 1][place];
    return `${chart.series.length > 1 ? `${line.name} ` : ""}${number(value)}${unit}`;
  });
  if (chart.bound) values.push(`bound ${number(chart.bound)}${unit}`);
  if (place !== null) values.push(chart.axis === "time" ? clock(plot.data[0][place]) : `${chart.axis} ${number(plot.data[0][place])}`);
  setText(caption, values.join(", "));
}

function drawChart(chart) {
  const key = `${nameOf(chart)}\n${chart.series.map((line) => line.name).join("\n")}\n${chart.bound}`;
  let made = charts.get(nameOf(chart));
  if (!made || made.key !== key) {
    made?.plot.destroy();
    const place = make("div");
    const picture = make("div", { role: "img" }, place);
    const figure = made?.figure ?? make("figure");
    figure.replaceChildren(make("figcaption", {}, make("b", { text: chart.title }), " ", make("span")), picture);
    byId("charts").append(figure);
    made = { key, figure, picture, place, caption: figure.querySelector("figcaption span"),
      chart, plot: new uPlot(chartOptions(chart, Math.max(200, figure.clientWidth - 16)), chartData(chart), place) };
    charts.set(nameOf(chart), made);
  } else made.plot.setData(chartData(chart));
  made.chart = chart;
  setAttribute(made.picture, "aria-label", chartLabel(chart));
  if (made.plot.cursor.idx === null || made.plot.cursor.idx === undefined) showCaption(nameOf(chart));
}

let lastCharts = [];
function drawCharts(found) {
  lastCharts = found.filter((chart) => chart.series.length);
  for (const [name, made] of charts) {
    if (!lastCharts.some((chart) => nameOf(chart) === name)) { made.plot.destroy(); made.figure.remove(); charts.delete(name); }
  }
  byId("no-charts").hidden = lastCharts.length > 0;
  lastCharts.forEach(drawChart);
}

/** Make all charts again, as after a change of the width or of light and dark. */
function redrawCharts() {
  for (const made of charts.values()) made.key = "";
  lastCharts.forEach(drawChart);
}
let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(redrawCharts, 150); });
isDark.addEventListener("change", redrawCharts);
