"use strict";
// Puts the page together from the values in #data, and again whenever a live run has new ones.

const TITLES = { loss: "Loss", metric: "The metric of the run", lr: "Learning rate", gradient: "Norm of the gradient", rate: "Throughput",
  wait: "Waiting for data", memory: "Memory, GiB", busy: "Busy, %", stages: "Stages of the loader: threads busy", ready: "Queue: micro-batches that lie ready",
  "longest wait": "Longest waits for a batch" };
const LEARNING = ["loss", "metric", "lr", "gradient"], SPEED = ["rate", "wait", "memory", "busy"], LOADER = ["stages", "ready", "longest wait"];
const MARKED = ["loss", "metric", "rate"];
const asTime = seconds => seconds < 1 ? `${figure(1000 * seconds)} ms` : seconds < 120 ? `${figure(seconds)} s` : seconds < 7200 ? `${figure(seconds / 60)} min` : `${figure(seconds / 3600)} h`;

function chapter(id, title, ...content) {
  return { id, title, element: make("section", { id, "aria-label": title }, make("h2", { text: title }), ...content) };
}

function chartsOf(runs, ids) {
  return ids.map(id => {
    const found = runs.map(run => ({ run: runs.length > 1 ? run.name : "", chart: run.charts.find(chart => chart.id === id) })).filter(one => one.chart);
    if (!found.length) return null;
    const marks = runs.length === 1 && MARKED.includes(id) ? runs[0].marks : [];
    const title = TITLES[id] || found[0].chart.series[0].name;
    return lineChart(id === "metric" ? `${title}: ${found[0].chart.series[0].name}` : title, found, marks, { log: found[0].chart.log, baseline: found[0].chart.baseline, least: found[0].chart.least, smoothing });
  }).filter(Boolean);
}

function findingOf(finding) {
  const share = typeof finding.share === "number" && finding.of !== "learning" ? ` (${Math.round(100 * finding.share)} %)` : "";
  const severity = finding.severity || (finding.share >= 0.2 ? "critical" : finding.share >= 0.1 ? "warning" : "notice");
  const predicted = typeof finding.factor === "number" ? `predicted: ${figure(finding.factor)} times the rate (${figure(finding.low)} to ${figure(finding.high)})` : null;
  return make("div", { class: `finding ${["critical", "warning", "notice"].includes(severity) ? severity : ""}` },
    make("b", { text: `${severity} ${finding.rule}${share}` }), make("div", { text: finding.sentence }),
    make("ul", {}, ...(finding.evidence || []).map(one => make("li", { text: one }))),
    make("div", { text: `change: ${finding.change}` }), predicted ? make("div", { text: predicted }) : null, finding.cost ? make("div", { text: `costs: ${finding.cost}` }) : null);
}

function sectionOf(section) {
  const kinds = { curve, sky, pictures, matrix, events: eventDisplay,
    table: one => make("div", { class: "panel" }, make("h3", { text: one.title }), tableOf(one.rows, one.heading), one.note ? make("p", { class: "note", text: one.note }) : null) };
  if (!Object.hasOwn(kinds, section.kind)) return make("p", { class: "note", text: `This page does not know how to draw "${section.kind}".` });
  try {
    return kinds[section.kind](section);
  } catch (error) {
    return make("p", { class: "note", text: `"${section.title}" cannot be drawn: ${error.message}` });
  }
}

function normsOf(norms) {
  const place = make("div");
  const draw = what => {
    const rows = what === "gradient" ? norms.gradient : norms.update;
    place.replaceChildren(heatMap(rows, norms.names, norms.steps, { log: true, label: what === "gradient" ? "norm of the gradient" : "update relative to the weights", x: "step" }));
  };
  const choose = make("select", { "aria-label": "what is shown", onchange: event => draw(event.target.value) },
    make("option", { value: "gradient", text: "gradient" }), make("option", { value: "update", text: "update / weights" }));
  draw("gradient");
  const some = norms.names.length < norms.of ? make("p", { class: "note", text: `${norms.names.length} of ${norms.of} parameters: those with the largest gradients.` }) : null;
  return make("div", { class: "panel" }, make("div", { class: "controls" }, choose), place, some);
}

function differences(runs) {
  const keys = [...new Set(runs.flatMap(run => run.config.map(row => row[0])))];
  const values = runs.map(run => Object.fromEntries(run.config.map(row => [row[0], row[1]])));
  const figures = runs.map(run => Object.fromEntries(run.figures));
  const results = [...new Set(runs.flatMap(run => run.figures.map(row => row[0])))].map(key => [key, ...figures.map(one => one[key] ?? "-")]);
  const changed = keys.filter(key => new Set(values.map(one => one[key])).size > 1).map(key => [key, ...values.map(one => one[key] ?? "-")]);
  const heading = ["", ...runs.map(run => run.name)];
  return [tableOf(results, heading), make("h3", { text: changed.length ? "Keys that differ" : "No key of their configurations differs." }), changed.length ? tableOf(changed, heading) : null];
}

function configOf(run) {
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...["key", "value", "the preset has"].map(text => make("th", { scope: "col", text })))));
  table.append(make("tbody", {}, ...[...run.config].sort((one, other) => other[2] - one[2]).map(([key, value, changed, preset]) =>
    make("tr", changed ? { class: "changed" } : {}, make("td", { text: key }), make("td", { text: value }), make("td", { text: changed ? preset : "" })))));
  return make("div", { class: "scroll", tabindex: "0" }, table);
}

function chaptersOf(data) {
  const runs = data.runs, found = [], one = runs.length === 1 ? runs[0] : null;
  if (data.diagnosis) {
    found.push(chapter("diagnosis", "Diagnosis", make("p", { class: "verdict", text: data.diagnosis.verdict }), make("div", { class: "panel" }, waterfall(data.diagnosis.bars, asTime)),
      ...data.diagnosis.findings.map(findingOf), ...(data.diagnosis.troubles || []).map(text => make("p", { class: "note", text }))));
  }
  if (runs.length) found.push(chapter("verdict", one ? "Verdict" : "Runs", ...runs.map(run => make("p", { class: "verdict", text: one ? run.verdict : `${run.name}: ${run.verdict}` })),
    one ? make("div", { class: "figures" }, ...one.figures.map(([name, value]) => make("div", { class: "figure" }, make("span", { text: name }), make("b", { text: value })))) : null,
    ...(one ? [] : differences(runs))));
  const charts = ids => chartsOf(runs, ids);
  const others = [...new Set(runs.flatMap(run => run.charts.map(chart => chart.id)))].filter(id => id.startsWith("metric "));
  const add = (id, title, panels, ...more) => { if (panels.length || more.filter(Boolean).length) found.push(chapter(id, title, make("div", { class: "grid" }, ...panels), ...more)); };
  add("learning", "Learning", charts(LEARNING), one && one.marks.length ? markLegend(one.marks, one.counts) : null);
  add("metrics", "Other metrics", charts(others));
  for (const run of runs) if (run.bars.length) found.push(chapter(`time-${runs.indexOf(run)}`, one ? "Where the time went" : `Where the time of ${run.name} went`, make("div", { class: "panel" }, waterfall(run.bars, asTime))));
  add("speed", "Speed and the machine", charts(SPEED));
  add("loader", "Loader", charts(LOADER));
  if (one && one.norms) found.push(chapter("norms", "Gradients by layer", normsOf(one.norms)));
  for (const run of runs) if (run.findings.length) found.push(chapter(`doctor-${runs.indexOf(run)}`, one ? "What the doctor says" : `What the doctor says of ${run.name}`, ...run.findings.map(findingOf)));
  if (data.record.length > 1) found.push(chapter("record", "The doctor's record on this machine", tableOf(data.record.slice(1), data.record[0])));
  for (const [place, owner] of [data, ...runs].entries()) {
    if (owner.sections && owner.sections.length) found.push(chapter(`evaluation-${place}`, owner.name && !one ? `Evaluation of ${owner.name}` : owner.heading || "Evaluation",
      make("div", { class: "grid" }, ...owner.sections.filter(section => section.kind === "curve" || section.kind === "sky").map(sectionOf)),
      ...owner.sections.filter(section => section.kind !== "curve" && section.kind !== "sky").map(sectionOf)));
  }
  if (one && one.marks.length) found.push(chapter("events", "What happened", tableOf(one.marks.slice(0, 500).map(mark => [mark.step, mark.text]), ["step", "event"]),
    one.marks.length > 500 ? make("p", { class: "note", text: `The first 500 of ${one.marks.length}.` }) : null));
  if (one && one.config.length) found.push(chapter("config", "Configuration", configOf(one)));
  if (one && one.environment.length) found.push(chapter("environment", "Environment", tableOf(one.environment)));
  return found;
}

function render(data) {
  const main = document.getElementById("main"), reached = () => [...main.querySelectorAll("[tabindex], select, button, input")];
  const focused = reached().indexOf(document.activeElement);
  letGo();
  const chapters = chaptersOf(data);
  main.replaceChildren(...chapters.map(one => one.element));
  if (focused >= 0) reached()[focused]?.focus({ preventScroll: true });
  document.getElementById("nav").replaceChildren(...chapters.map(one => make("a", { href: `#${one.id}`, text: one.title })));
  document.body.dataset.ready = String(Date.now());
}

let smoothing = 0;
let data = JSON.parse(document.getElementById("data").textContent);
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  render(data);
});
document.getElementById("smooth").addEventListener("change", event => { smoothing = +event.target.value; render(data); });
document.getElementById("smooth").parentElement.hidden = !data.runs.length;
render(data);
if (data.live) setInterval(async () => {
  try {
    const text = await (await fetch("data.json", { cache: "no-store" })).text(), now = JSON.parse(text);
    if (now.version === data.version) return;
    data = now;
    const height = scrollY;
    render(data);
    scrollTo(0, height);
  } catch { /* the server is gone: what was drawn stays */ }
}, data.live * 1000);
