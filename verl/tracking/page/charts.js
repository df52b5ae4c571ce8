"use strict";
// Small charts in SVG. chart(parent, spec): spec = {title, about?, steps, series: [{name, values, raw?}], kind: "line" | "bars",
// dots?, zero?, wide?, height?}; values are aligned with steps, null where a step has none.

const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function figure(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value === 0 || (Number.isInteger(value) && size < 1e6)) return String(value);
  if (size < 0.001 || size >= 1e6) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function seconds(value) {
  if (value < 59.95) return value.toFixed(1) + " s";
  const whole = Math.round(value), two = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

// Round values that cover [low, high] in about `count` steps.
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  const found = [];
  for (let i = Math.ceil(low / unit - 1e-9); i * unit <= high + unit * 1e-9; i++) found.push(Number((i * unit).toPrecision(12)));
  return found;
}

function range(spec) {
  let values;
  if (spec.kind === "bars") values = spec.steps.map((_, i) => spec.series.reduce((sum, s) => sum + (s.values[i] || 0), 0));
  else values = spec.series.flatMap((s) => s.values.concat(s.raw || [])).filter((v) => v !== null);
  let low = Math.min(...values), high = Math.max(...values);
  if (spec.kind === "bars" || (spec.zero && low > 0)) low = Math.min(0, low);
  if (low === high) { const room = Math.abs(low) * 0.1 || 1; low = spec.kind === "bars" || (low === 0) ? low : low - room; high += room; }
  const room = (high - low) * 0.05;
  return [low === 0 ? 0 : low - room, high + room];
}

function path(values, x, y) {
  let d = "", pen = "M";
  values.forEach((value, i) => {
    if (value === null) return;
    d += `${pen}${x(i).toFixed(1)},${y(value).toFixed(1)}`;
    pen = "L";
  });
  return d;
}

function draw(box, spec) {
  const width = Math.max(180, box.clientWidth), height = spec.height || 170;
  const [low, high] = range(spec);
  const marks = ticks(low, high, 4);
  const left = 10 + 6.6 * Math.max(...marks.map((mark) => figure(mark).length)), right = 8, top = 8, bottom = 20;
  const count = spec.steps.length, first = spec.steps[0], last = spec.steps[count - 1];
  const slot = (width - left - right) / count;
  const x = spec.kind === "bars" ? (i) => left + slot * (i + 0.5)
    : (i) => (first === last ? (left + width - right) / 2 : left + ((spec.steps[i] - first) / (last - first)) * (width - left - right));
  const y = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": describe(spec) });
  for (const mark of marks) {
    root.append(svg("line", { class: "gridline", x1: left, x2: width - right, y1: y(mark), y2: y(mark) }));
    root.append(svg("text", { x: left - 5, y: y(mark) + 4, "text-anchor": "end" }, figure(mark)));
  }
  root.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  stepLabels(root, spec, x, width, height);
  if (spec.kind === "bars") drawBars(root, spec, x, y, slot);
  else drawLines(root, spec, x, y);
  const hover = svg("g", {});
  root.append(hover);
  box.replaceChildren(root);
  follow(box, root, hover, spec, { x, y, left, top, bottom, width, height });
}

// Round step numbers that are there; the first and the last where there is room.
function stepLabels(root, spec, x, width, height) {
  const { steps } = spec, first = steps[0], last = steps[steps.length - 1], whole = (value) => Math.max(1, Math.round(value));
  const round = first === last ? [] : ticks(first, last, Math.max(1, Math.floor(width / 90))).map(whole);
  const at = (step) => {
    const i = steps.findIndex((s) => s >= step);
    if (spec.kind === "bars" || i === 0 || steps[i] === step) return x(i);
    return x(i - 1) + ((step - steps[i - 1]) / (steps[i] - steps[i - 1])) * (x(i) - x(i - 1));
  };
  const taken = [];
  for (const step of [first, last, ...round]) {
    const place = at(step);
    if (taken.some((other) => Math.abs(other - place) < 34)) continue;
    taken.push(place);
    root.append(svg("text", { x: place, y: height - 5, "text-anchor": place > width - 20 ? "end" : "middle" }, step));
  }
}

function drawLines(root, spec, x, y) {
  spec.series.forEach((series, k) => {
    if (series.raw) root.append(svg("path", { class: `path raw k${k % 6}`, d: path(series.raw, x, y) }));
    root.append(svg("path", { class: `path k${k % 6}`, d: path(series.values, x, y) }));
    const present = series.values.filter((v) => v !== null).length;
    if (!(present === 1 || (spec.dots && present < 60))) return;
    series.values.forEach((v, i) => { if (v !== null) root.append(svg("circle", { class: `dot k${k % 6}`, cx: x(i), cy: y(v), r: 3 })); });
  });
}

function drawBars(root, spec, x, y, slot) {
  const wide = Math.min(46, Math.max(0.5, slot - (slot > 6 ? 2 : slot > 3 ? 1 : 0)));
  spec.steps.forEach((_, i) => {
    let base = 0;
    spec.series.forEach((series, k) => {
      const value = series.values[i];
      if (!value || value <= 0) return;
      root.append(svg("rect", { class: `bar k${k % 6}`, x: x(i) - wide / 2, width: wide, y: y(base + value), height: Math.max(0, y(base) - y(base + value)) }));
      base += value;
    });
  });
}

// The values at the step nearest to the pointer.
function follow(box, root, hover, spec, at) {
  let tip = null;
  const leave = () => { hover.replaceChildren(); if (tip) tip.remove(); tip = null; };
  const move = (event) => {
    const frame = root.getBoundingClientRect(), px = ((event.clientX - frame.left) / frame.width) * at.width;
    let best = 0;
    spec.steps.forEach((_, i) => { if (Math.abs(at.x(i) - px) < Math.abs(at.x(best) - px)) best = i; });
    leave();
    hover.append(svg("line", { class: "cursor", x1: at.x(best), x2: at.x(best), y1: at.top, y2: at.height - at.bottom }));
    const list = el("ul");
    let total = 0;
    spec.series.forEach((series, k) => {
      const value = (series.raw || series.values)[best];
      if (value === null) return;
      total += value;
      if (spec.kind !== "bars") hover.append(svg("circle", { class: `dot hot k${k % 6}`, cx: at.x(best), cy: at.y(value), r: 4 }));
      const shown = spec.kind === "bars" ? seconds(value) : figure(value);
      const mean = series.raw ? ` (mean ${figure(series.values[best])})` : "";
      list.append(el("li", { class: `k${k % 6}` }, (spec.series.length > 1 ? series.name + " " : "") + shown + mean));
    });
    if (!list.children.length) list.append("no value");
    const head = `step ${spec.steps[best]}` + (spec.kind === "bars" && list.children.length > 1 ? ` · ${seconds(total)}` : "");
    tip = el("div", { class: "tip" }, el("b", {}, head), list);
    box.append(tip);
    const where = (at.x(best) / at.width) * frame.width, room = box.clientWidth - tip.offsetWidth;
    tip.style.left = Math.max(0, Math.min(room, where > box.clientWidth / 2 ? where - tip.offsetWidth - 10 : where + 10)) + "px";
    tip.style.top = "4px";
  };
  root.addEventListener("pointermove", move);
  root.addEventListener("pointerdown", move);
  root.addEventListener("pointerleave", leave);
}

function describe(spec) {
  const parts = spec.series.map((series) => {
    const values = (series.raw || series.values).filter((v) => v !== null);
    return `${series.name}: from ${figure(values[0])} to ${figure(values[values.length - 1])}`;
  });
  return `${spec.title} over steps ${spec.steps[0]} to ${spec.steps[spec.steps.length - 1]}. ${parts.join("; ")}`;
}

// Mean over neighbouring steps: what a noisy curve does.
function smooth(values) {
  const reach = Math.min(20, Math.max(2, Math.round(values.length / 25)));
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, i - reach), i + reach + 1).filter((v) => v !== null);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
}

// Bars need room: means over neighbouring steps where there are too many.
function merged(spec, most) {
  const size = Math.ceil(spec.steps.length / most);
  if (spec.kind !== "bars" || size < 2) return spec;
  const groups = (values) => Array.from({ length: Math.ceil(values.length / size) }, (_, g) => values.slice(g * size, (g + 1) * size));
  const mean = (values) => values.reduce((a, b) => a + (b || 0), 0) / values.length;
  return {
    ...spec, about: `means over ${size} steps`, steps: groups(spec.steps).map((group) => group[group.length - 1]),
    series: spec.series.map((s) => ({ ...s, values: groups(s.values).map(mean) })),
  };
}

// Steps without any value at the ends (a step 0 that only validates) are left out.
function trimmed(spec) {
  const keep = spec.steps.map((_, i) => spec.series.some((s) => s.values[i] !== null));
  const pick = (values) => values && values.filter((_, i) => keep[i]);
  return { ...spec, steps: pick(spec.steps), series: spec.series.map((s) => ({ ...s, values: pick(s.values), raw: pick(s.raw) })) };
}

const redraw = typeof ResizeObserver === "undefined" ? null : new ResizeObserver((entries) => {
  for (const entry of entries) if (entry.target.clientWidth) draw(entry.target, entry.target.spec);
});

function chart(parent, given) {
  const spec = merged(trimmed({ ...given, series: given.series.filter((s) => s && s.values.some((v) => v !== null)) }), 120);
  if (!spec.series.length) return;
  const box = el("div", { class: "plot" });
  box.spec = spec;
  const card = el("figure", { class: "chart" + (spec.wide ? " wide" : "") }, el("h3", {}, spec.title));
  if (spec.about) card.append(el("p", { class: "about" }, spec.about));
  card.append(box);
  if (spec.series.length > 1 || spec.kind === "bars") {
    card.append(el("ul", { class: "legend" }, ...spec.series.map((s, k) => el("li", { class: `k${k % 6}` }, s.name))));
  }
  parent.append(card);
  draw(box, spec);
  if (redraw) redraw.observe(box);
}
