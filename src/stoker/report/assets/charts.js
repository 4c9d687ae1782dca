"use strict";
// Charts: lines by uPlot, everything else by hand. Whatever comes from data goes in as text, never as HTML.

const COLOURS = ["#2f7ed8", "#d1495b", "#2a9d4a", "#c77d00", "#8a63d2", "#0b9aa5", "#b3589a", "#7a7f35"];
const MARKS = { bad_step: "#d1495b", spike: "#c77d00", resume: "#8a63d2", fork: "#8a63d2", checkpoint: "#8899aa55", stuck: "#c77d00",
  compilation: "#0b9aa588", not_saved: "#d1495b", left_out: "#d1495b", out_of_patience: "#8a63d2", end: "#888888" };

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "line", "path", "circle", "text", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

const plots = [];  // of uPlot, and what watches their size: let go when the page is drawn anew

function letGo() {
  for (const one of plots.splice(0)) one();
}

const ink = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const figure = value => value === null || value === undefined ? "-" : Math.abs(value) >= 1000
  ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : String(+value.toPrecision(4));

function tableOf(rows, heading) {
  const table = make("table");
  if (heading) table.append(make("thead", {}, make("tr", {}, ...heading.map(cell => make("th", { scope: "col", text: cell })))));
  const body = make("tbody");
  for (const row of rows) body.append(make("tr", {}, ...row.map(cell => make("td", { text: cell === null ? "" : String(cell) }))));
  table.append(body);
  return make("div", { class: "scroll" }, table);
}

// Lines of one quantity over steps, of one run or several. Drag to zoom, double-click or Escape to see all; + - and arrows too.
function lineChart(title, charts, marks, options = {}) {
  const panel = make("div", { class: "panel" }, make("h3", { text: title }));
  const place = make("div", { class: "chart", tabindex: "0", role: "img", "aria-label": title });
  panel.append(place);
  const tables = [], series = [{ label: "step", value: (u, v) => v === null ? "-" : v.toLocaleString("en") }];
  let count = 0;
  for (const { chart, run } of charts) {
    tables.push([chart.x]);
    for (const one of chart.series) {
      tables[tables.length - 1].push(one.y);
      const colour = COLOURS[count++ % COLOURS.length];
      const label = run ? `${run}: ${one.name}` : one.name, points = { show: chart.x.length < 60, size: 4 };
      series.push({ label, stroke: options.smoothing ? `${colour}55` : colour, width: 1.5, spanGaps: false, points, value: (u, v) => figure(v) });
      if (options.smoothing) {
        tables[tables.length - 1].push(smoothed(one.y, options.smoothing));
        series.push({ label: `${label}, smoothed`, stroke: colour, width: 2, points: { show: false }, value: (u, v) => figure(v) });
      }
    }
  }
  const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
  const log = options.log && data.slice(1).every(column => column.every(v => v === null || v === undefined || v > 0));
  const baseline = options.baseline;
  const drawOver = u => {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
    for (const mark of marks || []) {
      const x = u.valToPos(mark.step, "x", true);
      ctx.strokeStyle = MARKS[mark.kind] || "#888888"; ctx.lineWidth = mark.kind === "checkpoint" ? 1 : 1.5;
      ctx.setLineDash(mark.kind === "checkpoint" ? [2, 4] : []);
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    }
    if (typeof baseline === "number") {
      const y = u.valToPos(baseline, "y", true);
      ctx.strokeStyle = ink("--soft"); ctx.fillStyle = ink("--soft"); ctx.setLineDash([6, 4]); ctx.lineWidth = 1;
      ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
      ctx.setLineDash([]); ctx.textAlign = "left"; ctx.textBaseline = "bottom"; ctx.font = `${11 * devicePixelRatio}px system-ui`;
      ctx.fillText(options.baselineText || "knowing nothing", bbox.left + bbox.width - 120 * devicePixelRatio, y - bbox.top > 16 * devicePixelRatio ? y - 2 : y + 16 * devicePixelRatio);
    }
    ctx.restore();
  };
  const axis = { stroke: () => ink("--ink"), grid: { stroke: () => ink("--line"), width: 1 }, ticks: { stroke: () => ink("--line") } };
  const plot = new uPlot({
    width: 500, height: 260, series, hooks: { draw: [drawOver] }, cursor: { drag: { x: true, y: false } },
    scales: { x: { time: false, range: (u, low, high) => low === high ? [0, high || 1] : [low, high] }, y: { distr: log ? 3 : 1,
      range: log ? undefined : (u, low, high) => spread(low, high, baseline, options.least) } },
    axes: [axis, { ...axis, size: 70, values: (u, values) => values.map(figure) }],
  }, data, place);
  const fit = () => { if (place.clientWidth) plot.setSize({ width: place.clientWidth, height: 260 }); };
  const watcher = new ResizeObserver(fit);
  watcher.observe(place);
  plots.push(() => { watcher.disconnect(); plot.destroy(); });
  place.addEventListener("keydown", event => moveByKeys(event, plot, data[0]));
  place.dataset.points = data.slice(1).reduce((sum, column) => sum + column.filter(v => v !== null && v !== undefined).length, 0);
  const drawn = charts.reduce((sum, one) => sum + one.chart.x.length, 0), all = charts.reduce((sum, one) => sum + one.chart.of, 0);
  if (drawn < all) panel.append(make("p", { class: "note", text: `${drawn.toLocaleString("en")} of ${all.toLocaleString("en")} points; every extreme is among them.` }));
  return panel;
}

// A running mean that forgets; what is no number is passed over. Its beginning is not pulled towards zero.
function smoothed(values, keep) {
  let sum = 0, weight = 0;
  return values.map(value => {
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value; weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}

function spread(low, high, baseline, least) {
  if (low === null || high === null) return [0, 1];
  if (typeof least === "number") return [Math.min(low, least), 1.06 * high || 1];
  // A baseline far off would press the curve into a line.
  if (typeof baseline === "number" && Math.abs(baseline - (low + high) / 2) < 3 * (high - low || Math.abs(high) || 1)) {
    low = Math.min(low, baseline); high = Math.max(high, baseline);
  }
  const room = 0.06 * (high - low || Math.abs(high) || 1);
  return [low - room, high + room];
}

function moveByKeys(event, plot, x) {
  const first = x[0], last = x[x.length - 1], { min, max } = plot.scales.x, width = max - min;
  const range = { "+": [min + width / 4, max - width / 4], "-": [min - width / 2, max + width / 2],
    ArrowLeft: [min - width / 4, max - width / 4], ArrowRight: [min + width / 4, max + width / 4], Escape: [first, last] }[event.key];
  if (!range) return;
  event.preventDefault();
  plot.setScale("x", { min: Math.max(first, range[0]), max: Math.min(last, range[1]) });
}

function markLegend(marks, counts) {
  const kinds = {};
  for (const mark of marks) kinds[mark.kind] = (kinds[mark.kind] || 0) + 1;
  for (const kind of Object.keys(kinds)) kinds[kind] = counts[kind] || kinds[kind];
  return make("div", { class: "legend" }, ...Object.entries(kinds).map(([kind, count]) =>
    make("span", {}, make("i", { style: `background:${MARKS[kind] || "#888888"}` }), `${kind.replaceAll("_", " ")} (${count})`)));
}

// Bars that begin where the one before ends: their sum is the whole.
function waterfall(bars, unit) {
  const total = bars.reduce((sum, bar) => sum + Math.max(0, bar.seconds), 0) || 1, row = 30, left = 210, width = 860;
  const svg = make("svg", { viewBox: `0 0 ${width + 20} ${bars.length * row + 8}`, role: "img", "aria-label": "where the time went",
    "data-points": bars.length });
  let begin = 0;
  bars.forEach((bar, place) => {
    const seconds = Math.max(0, bar.seconds), x = left + (width - left - 170) * begin / total, length = (width - left - 170) * seconds / total;
    svg.append(make("text", { x: 0, y: place * row + 20, text: bar.name }),
      make("rect", { x, y: place * row + 6, width: Math.max(1, length), height: row - 10, fill: COLOURS[place % COLOURS.length] },
        make("title", { text: `${bar.name}: ${figure(seconds)} s` })),
      make("text", { x: x + length + 8, y: place * row + 20,
        text: `${unit(seconds)}, ${(100 * seconds / total).toFixed(1)} %${bar.unsure ? " (not significant)" : ""}` }));
    begin += seconds;
  });
  return svg;
}

// Dark blue over green to yellow: order is visible without colours too.
function colourOf(share) {
  const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
  const at = Math.min(0.9999, Math.max(0, share)) * (stops.length - 1), low = Math.floor(at), part = at - low;
  return stops[low].map((value, channel) => Math.round(value + part * (stops[low + 1][channel] - value)));
}

// Rows of numbers as colours; nothing is drawn where there is none, and red where it is not finite.
function heatMap(rows, names, columns, { log = false, label = "", x = "" }) {
  if (!rows.length || !columns.length) return make("p", { class: "note", text: `${label}: nothing to draw.` });
  const known = rows.flat().filter(value => value !== null && (!log || value > 0)).map(value => log ? Math.log10(value) : value);
  const low = known.reduce((a, b) => Math.min(a, b), Infinity), high = known.reduce((a, b) => Math.max(a, b), -Infinity);
  const canvas = make("canvas", { width: Math.max(1, columns.length), height: Math.max(1, rows.length), role: "img", tabindex: "0",
    "aria-label": label, "data-points": known.length });
  canvas.style.width = "100%"; canvas.style.height = `${Math.min(900, Math.max(140, 12 * rows.length))}px`; canvas.style.imageRendering = "pixelated";
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  rows.forEach((row, r) => row.slice(0, columns.length).forEach((value, c) => {
    const at = 4 * (r * canvas.width + c);
    let colour = [209, 73, 91];
    if (value !== null) colour = log && value <= 0 ? [0, 0, 0] : colourOf(((log ? Math.log10(value) : value) - low) / (high - low || 1));
    image.data.set([...colour, 255], at);
  }));
  context.putImageData(image, 0, 0);
  const told = make("p", { class: "note", "aria-live": "polite", text: `${label}: ${figure(log ? 10 ** low : low)} (dark) to ${figure(log ? 10 ** high : high)} (bright). Point at a cell.` });
  const tell = (r, c) => { told.textContent = `${names[r]}, ${x} ${columns[c]}: ${rows[r][c] === null ? "not finite or not there" : figure(rows[r][c])}`; };
  let place = [0, 0];
  canvas.addEventListener("mousemove", event => {
    const box = canvas.getBoundingClientRect();
    place = [Math.min(rows.length - 1, Math.floor((event.clientY - box.top) / box.height * rows.length)),
      Math.min(columns.length - 1, Math.floor((event.clientX - box.left) / box.width * columns.length))];
    if (rows[place[0]]) tell(...place);
  });
  canvas.addEventListener("keydown", event => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    place = [Math.max(0, Math.min(rows.length - 1, place[0] + move[0])), Math.max(0, Math.min(columns.length - 1, place[1] + move[1]))];
    tell(...place);
  });
  return make("div", {}, canvas, told);
}

// Points with error bars against a quantity, several of them beside each other.
function curve(section) {
  const width = 560, height = 300, left = 62, bottom = 42, top = 12, right = 12;
  const value = v => section.log ? Math.log10(v) : v;
  const xs = section.series.flatMap(one => one.x).map(value).filter(Number.isFinite);
  const ys = section.series.flatMap(one => [...one.y, ...(one.low || []), ...(one.high || [])]).filter(v => typeof v === "number");
  if (!xs.length || !ys.length) return make("p", { class: "note", text: `${section.title}: no points to draw.` });
  const least = (a, b) => Math.min(a, b), most = (a, b) => Math.max(a, b);
  let x0 = xs.reduce(least), x1 = xs.reduce(most), y0 = ys.reduce(least, 0), y1 = ys.reduce(most);
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (y0 === y1) y1 = y0 + 1;
  const px = v => left + (width - left - right) * (value(v) - x0) / (x1 - x0), py = v => height - bottom - (height - bottom - top) * (v - y0) / (y1 - y0);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": section.title, "data-points": xs.length });
  for (let tick = 0; tick <= 4; tick++) {
    const y = y0 + (y1 - y0) * tick / 4, x = x0 + (x1 - x0) * tick / 4;
    svg.append(make("line", { x1: left, x2: width - right, y1: py(y), y2: py(y), class: "axis" }), make("text", { x: 4, y: py(y) + 4, text: figure(y) }),
      make("text", { x: left + (width - left - right) * tick / 4 - 14, y: height - bottom + 16, text: figure(section.log ? 10 ** x : x) }));
  }
  svg.append(make("text", { x: width / 2 - 60, y: height - 6, text: section.x }));
  section.series.forEach((one, number) => {
    const colour = COLOURS[number % COLOURS.length];
    const there = i => typeof one.y[i] === "number" && Number.isFinite(value(one.x[i]));
    const path = one.x.map((x, i) => there(i) ? `${i ? "L" : "M"}${px(x)},${py(one.y[i])}` : "").join("");
    svg.append(make("path", { d: path.replace(/^L/, "M"), fill: "none", stroke: colour, "stroke-width": one.points === false ? 1 : 2,
      "stroke-dasharray": one.points === false ? "5 4" : "none" }));
    one.x.forEach((x, i) => {
      if (!there(i) || one.points === false) return;
      if (one.low && typeof one.low[i] === "number" && typeof one.high[i] === "number") svg.append(make("line", { x1: px(x), x2: px(x), y1: py(one.low[i]), y2: py(one.high[i]), stroke: colour }));
      const told = `${one.name} at ${figure(x)}: ${figure(one.y[i])}${one.low ? ` (${figure(one.low[i])} to ${figure(one.high[i])})` : ""}${one.n ? `, n = ${figure(one.n[i])}` : ""}`;
      svg.append(make("circle", { cx: px(x), cy: py(one.y[i]), r: 3.5, fill: colour }, make("title", { text: told })));
    });
  });
  const legend = make("div", { class: "legend" }, ...section.series.map((one, number) =>
    make("span", {}, make("i", { style: `background:${COLOURS[number % COLOURS.length]}` }), one.name)));
  return make("div", { class: "panel" }, make("h3", { text: section.title }), svg, legend, make("p", { class: "note", text: section.note || section.y }));
}

// The whole sky: zenith downwards, azimuth to the right; cells hold equal solid angles.
function sky(section) {
  if (!section.cells.length) return make("p", { class: "note", text: `${section.title}: nothing to draw.` });
  const names = section.cells.map((row, place) => `cosine of the zenith ${figure(1 - 2 * (place + 0.5) / section.cells.length)}`);
  const columns = section.cells[0].map((cell, place) => `${Math.round(360 * (place + 0.5) / section.cells[0].length)} degrees`);
  return make("div", { class: "panel" }, make("h3", { text: section.title }),
    heatMap(section.cells, names, columns, { label: section.label, x: "azimuth" }), make("p", { class: "note", text: section.note }));
}

function pictures(section) {
  return make("div", {}, make("h3", { text: section.title }), make("div", { class: "pictures" }, ...section.items.map(item =>
    make("figure", {}, make("img", { src: `data:image/jpeg;base64,${item.jpeg}`, alt: item.text, loading: "lazy" }), make("figcaption", { text: item.text })))),
    section.note ? make("p", { class: "note", text: section.note }) : null);
}

function matrix(section) {
  return make("div", { class: "panel" }, make("h3", { text: section.title }),
    heatMap(section.rows, section.names.map(name => `is ${name}`), section.columns, { label: section.label, x: "taken for" }),
    section.note ? make("p", { class: "note", text: section.note }) : null);
}
