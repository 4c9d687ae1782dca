"use strict";
// An event in three dimensions: DOMs as grey points, pulses as discs, red early to blue late, as large as their charge.

function eventDisplay(section) {
  if (!section.items.length || !section.detector.length) return make("p", { class: "note", text: `${section.title}: no events.` });
  const canvas = make("canvas", { class: "display", tabindex: "0", role: "img",
    "aria-label": "event display: drag or arrow keys turn it, + and - zoom, space plays, n and p change the event" });
  const choose = make("select", { "aria-label": "event" }, ...section.items.map((item, place) => make("option", { value: place, text: item.text })));
  const time = make("input", { type: "range", min: 0, max: 1000, value: 1000, "aria-label": "time" });
  const play = make("button", { type: "button", text: "play" });
  const told = make("p", { class: "note", "aria-live": "polite" });
  const view = { turn: 0.6, tilt: 0.25, zoom: 1, item: 0, share: 1, playing: false };
  const middle = [0, 1, 2].map(axis => {
    const values = section.detector.map(place => place[axis]);
    return (values.reduce((a, b) => Math.min(a, b)) + values.reduce((a, b) => Math.max(a, b))) / 2;
  });
  const size = section.detector.map(place => Math.hypot(...place.map((value, axis) => value - middle[axis]))).reduce((a, b) => Math.max(a, b), 1);

  const project = ([x, y, z], scale, width, height) => {
    const [a, b, c] = [x - middle[0], y - middle[1], z - middle[2]];
    const right = a * Math.cos(view.turn) + b * Math.sin(view.turn), into = -a * Math.sin(view.turn) + b * Math.cos(view.turn);
    const up = c * Math.cos(view.tilt) - into * Math.sin(view.tilt), depth = c * Math.sin(view.tilt) + into * Math.cos(view.tilt);
    return [width / 2 + scale * right, height / 2 - scale * up, depth];
  };

  function draw() {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    canvas.width = width * ratio; canvas.height = height * ratio;
    const context = canvas.getContext("2d"), scale = 0.46 * Math.min(width, height) / size * view.zoom;
    context.scale(ratio, ratio);
    context.fillStyle = "#05080c"; context.fillRect(0, 0, width, height);
    context.fillStyle = "#5b6775";
    for (const place of section.detector) {
      const [x, y] = project(place, scale, width, height);
      context.fillRect(x, y, 1, 1);
    }
    const item = section.items[view.item], largest = item.charge.reduce((a, b) => Math.max(a, b), 1), [first, last] = item.span, now = first + (last - first) * view.share;
    const pulses = item.sensor.map((sensor, i) => [project(section.detector[sensor], scale, width, height), item.time[i], item.charge[i], item.auxiliary[i]])
      .filter(pulse => pulse[1] <= now).sort((one, other) => other[0][2] - one[0][2]);
    for (const [[x, y], when, charge, auxiliary] of pulses) {
      const hue = 240 * Math.min(1, Math.max(0, (when - first) / (last - first || 1)));
      context.globalAlpha = auxiliary ? 0.25 : 0.85;
      context.fillStyle = `hsl(${hue} 95% 60%)`;
      context.beginPath(); context.arc(x, y, Math.max(1.3, Math.min(2.4 * Math.sqrt(charge), 15 * Math.sqrt(charge / largest)) * Math.sqrt(view.zoom)), 0, 7); context.fill();
    }
    context.globalAlpha = 1;
    arrow(context, item, item.true, "#ffffff", "true", scale, width, height);
    arrow(context, item, item.predicted, "#ffd34d", "predicted", scale, width, height);
    canvas.dataset.turn = view.turn.toFixed(3); canvas.dataset.points = pulses.length; canvas.dataset.now = now.toFixed(1);
    told.textContent = `${pulses.length.toLocaleString("en")} of ${item.sensor.length.toLocaleString("en")} points up to ${Math.round(now - first).toLocaleString("en")} ns, ${item.pulses.toLocaleString("en")} pulses in all. ${item.about}`;
  }

  // The neutrino came from there: the line goes through the centre of the charge.
  function arrow(context, item, direction, colour, name, scale, width, height) {
    if (!direction) return;
    const [from, to] = [0.9 * size, -0.9 * size].map(far => project(direction.map((part, axis) => item.centre[axis] + far * part), scale, width, height));
    context.strokeStyle = colour; context.fillStyle = colour; context.lineWidth = 1.5;
    context.beginPath(); context.moveTo(from[0], from[1]); context.lineTo(to[0], to[1]); context.stroke();
    const angle = Math.atan2(to[1] - from[1], to[0] - from[0]);
    context.beginPath(); context.moveTo(to[0], to[1]);
    for (const side of [2.7, -2.7]) context.lineTo(to[0] + 11 * Math.cos(angle + side), to[1] + 11 * Math.sin(angle + side));
    context.fill();
    context.font = "12px system-ui"; context.fillText(name, from[0] + 6, from[1] - 6);
  }

  let began = 0;
  function frame(moment) {
    if (!view.playing || !canvas.isConnected) return;
    began = began || moment;
    view.share = Math.min(1, (moment - began) / 6000);
    time.value = 1000 * view.share;
    draw();
    if (view.share >= 1) { view.playing = false; play.textContent = "play"; } else requestAnimationFrame(frame);
  }
  function start() {
    view.playing = !view.playing; play.textContent = view.playing ? "stop" : "play"; began = 0;
    if (view.playing) requestAnimationFrame(frame);
  }
  function show(place) {
    view.item = (place + section.items.length) % section.items.length;
    choose.value = view.item; view.share = 1; time.value = 1000; draw();
  }
  let held = null;
  canvas.addEventListener("pointerdown", event => { held = [event.clientX, event.clientY]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", event => {
    if (!held) return;
    view.turn += 0.008 * (event.clientX - held[0]); view.tilt = Math.max(-1.57, Math.min(1.57, view.tilt + 0.008 * (event.clientY - held[1])));
    held = [event.clientX, event.clientY]; draw();
  });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("wheel", event => { event.preventDefault(); view.zoom = Math.max(0.3, Math.min(12, view.zoom * Math.exp(-0.001 * event.deltaY))); draw(); }, { passive: false });
  canvas.addEventListener("keydown", event => {
    const action = { ArrowLeft: () => { view.turn -= 0.1; }, ArrowRight: () => { view.turn += 0.1; }, ArrowUp: () => { view.tilt -= 0.1; },
      ArrowDown: () => { view.tilt += 0.1; }, "+": () => { view.zoom *= 1.2; }, "-": () => { view.zoom /= 1.2; }, " ": start,
      n: () => show(view.item + 1), p: () => show(view.item - 1) }[event.key];
    if (!action) return;
    event.preventDefault(); action(); draw();
  });
  choose.addEventListener("change", () => show(+choose.value));
  time.addEventListener("input", () => { view.playing = false; play.textContent = "play"; view.share = time.value / 1000; draw(); });
  play.addEventListener("click", start);
  const watcher = new ResizeObserver(draw);
  watcher.observe(canvas);
  plots.push(() => watcher.disconnect());
  return make("div", { class: "panel" }, make("h3", { text: section.title }), make("div", { class: "controls" }, choose, play, time), canvas, told,
    make("p", { class: "note", text: "Drag or arrow keys turn it, the wheel or + and - zoom, space plays, n and p change the event. Red is early, blue late; the area of a disc grows with its charge; pulses without a coincidence are faint." }));
}
