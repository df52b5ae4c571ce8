// Small charts in SVG. chart(parent, spec): spec = {title, about?, steps, series: [{name, values, raw?, low?, high?, k?}], kind: "line" |
// "bars", marks?: [{step, kind, text}], zero?, wide?, height?}; lists are aligned with steps, null where a step has none.

const FEW = 25; // points up to which each one gets a dot

// Round values that cover [low, high] in about `count` steps.
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const unit = ([1, 2, 5].find((factor) => factor * power >= rough * 0.999) || 10) * power, found = [];
  for (let i = Math.ceil(low / unit - 1e-9); i * unit <= high + unit * 1e-9 && found.length < 20; i++) found.push(Number((i * unit).toPrecision(12)));
  return found;
}

function range(spec) {
  let values;
  if (spec.kind === "bars") values = spec.steps.map((_, i) => spec.series.reduce((sum, s) => sum + (s.values[i] || 0), 0));
  else values = spec.series.flatMap((s) => [...s.values, ...(s.raw || []), ...(s.low || []), ...(s.high || [])]).filter((v) => v !== null);
  let low = Math.min(...values), high = Math.max(...values);
  if (spec.kind === "bars" || (spec.zero && low > 0)) low = Math.min(0, low);
  // A constant: some room around it, so that the line is not an edge.
  if (high - low <= Math.abs(high) * 1e-9) { const room = Math.abs(high) * 0.5 || 1; low = low === 0 ? 0 : low - room; high += room; }
  const room = (high - low) * 0.05;
  return [low === 0 ? 0 : low - room, high + room];
}

function present(values) {
  return values.filter((v) => v !== null).length;
}

// Line through the values. Where most steps have none (validation) it joins those that do; else a missing one leaves a gap.
function path(values, x, y) {
  const sparse = present(values) < values.length / 2;
  let d = "", pen = "M";
  values.forEach((value, i) => {
    if (value === null) { if (!sparse) pen = "M"; return; }
    d += `${pen}${x(i).toFixed(1)},${y(value).toFixed(1)}`;
    pen = "L";
  });
  return d;
}

function band(series, x, y) {
  const both = series.low.map((low, i) => (low === null || series.high[i] === null ? null : i)).filter((i) => i !== null);
  if (both.length < 2) return "";
  const edge = (values, order) => order.map((i) => `${x(i).toFixed(1)},${y(values[i]).toFixed(1)}`).join("L");
  return `M${edge(series.high, both)}L${edge(series.low, [...both].reverse())}Z`;
}

function draw(box, spec) {
  const width = Math.max(180, box.clientWidth), height = spec.height || 180;
  const [low, high] = range(spec), marks = ticks(low, high, 4);
  const left = 10 + 6.6 * Math.max(...marks.map((mark) => figure(mark).length)), right = 10, top = 10, bottom = 20;
  const count = spec.steps.length, first = spec.steps[0], last = spec.steps[count - 1];
  const slot = (width - left - right) / count, bars = spec.kind === "bars";
  const x = bars ? (i) => left + slot * (i + 0.5)
    : (i) => (first === last ? (left + width - right) / 2 : left + ((spec.steps[i] - first) / (last - first)) * (width - left - right));
  const y = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);
  const at = { x, y, left, right, top, bottom, width, height, slot };
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": describe(spec) });
  for (const mark of marks) {
    root.append(svg("line", { class: "gridline", x1: left, x2: width - right, y1: y(mark), y2: y(mark) }));
    root.append(svg("text", { x: left - 5, y: y(mark) + 4, "text-anchor": "end" }, figure(mark)));
  }
  root.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  stepLabels(root, spec, at);
  if (bars) drawBars(root, spec, at);
  else drawLines(root, spec, at);
  drawMarks(root, spec, at);
  const hover = svg("g", {});
  root.append(hover);
  box.replaceChildren(root);
  follow(box, root, hover, spec, at);
}

// Where a step lies, also one between those logged.
function place(step, spec, { x }) {
  const { steps } = spec, i = steps.findIndex((s) => s >= step);
  if (i < 0) return x(steps.length - 1);
  if (i === 0 || steps[i] === step) return x(i);
  return x(i - 1) + ((step - steps[i - 1]) / (steps[i] - steps[i - 1])) * (x(i) - x(i - 1));
}

// Round step numbers that are there; the first and the last where there is room.
function stepLabels(root, spec, at) {
  const { steps } = spec, first = steps[0], last = steps[steps.length - 1], whole = (value) => Math.max(1, Math.round(value));
  const round = first === last ? [] : ticks(first, last, Math.max(1, Math.floor(at.width / 90))).map(whole);
  const taken = [];
  for (const step of [first, last, ...round]) {
    const where = place(step, spec, at);
    if (taken.some((other) => Math.abs(other - where) < 34)) continue;
    taken.push(where);
    root.append(svg("text", { x: where, y: at.height - 5, "text-anchor": where > at.width - 20 ? "end" : "middle" }, step));
  }
}

// A series has the colour of its place, unless it brings its own.
function colour(series, place) {
  return series.k === undefined ? place : series.k;
}

function drawLines(root, spec, { x, y }) {
  spec.series.forEach((series, i, all, k = colour(series, i)) => { if (series.low) root.append(svg("path", { class: `band k${k % 6}`, d: band(series, x, y) })); });
  spec.series.forEach((series, place) => {
    const k = colour(series, place);
    if (series.raw) root.append(svg("path", { class: `path raw k${k % 6}`, d: path(series.raw, x, y) }));
    root.append(svg("path", { class: `path k${k % 6}`, d: path(series.values, x, y) }));
    const all = present(series.values) <= FEW;
    series.values.forEach((v, i) => {
      const alone = v !== null && (series.values[i - 1] ?? null) === null && (series.values[i + 1] ?? null) === null;
      if (v !== null && (all || alone)) root.append(svg("circle", { class: `dot k${k % 6}`, cx: x(i), cy: y(v), r: all && !alone && spec.steps.length > 12 ? 2.2 : 3 }));
    });
  });
}

function drawBars(root, spec, { x, y, slot }) {
  const wide = Math.min(46, Math.max(0.5, slot - (slot > 6 ? 2 : slot > 3 ? 1 : 0)));
  spec.steps.forEach((_, i) => {
    let base = 0;
    spec.series.forEach((series, k) => {
      const value = series.values[i];
      if (!value || value <= 0) return;
      root.append(svg("rect", { class: `bar-part k${k % 6}`, x: x(i) - wide / 2, width: wide, y: y(base + value), height: Math.max(0, y(base) - y(base + value)) }));
      base += value;
    });
  });
}

function drawMarks(root, spec, at) {
  const first = spec.steps[0], last = spec.steps[spec.steps.length - 1];
  for (const mark of spec.marks || []) {
    if (mark.step < first || mark.step > last) continue;
    const where = place(mark.step, spec, at).toFixed(1);
    root.append(svg("line", { class: `mark ${mark.kind}`, x1: where, x2: where, y1: at.top, y2: at.height - at.bottom }));
    root.append(svg("path", { class: `flag ${mark.kind}`, d: mark.kind === "resumed" ? `M${where},3l7,4l-7,4z` : `M${where},2l4.5,8h-9z` }));
  }
}

// The values at the step nearest to the pointer, or chosen with the arrow keys.
function follow(box, root, hover, spec, at) {
  let tip = null, current = null;
  const leave = () => { hover.replaceChildren(); if (tip) tip.remove(); tip = null; current = null; };
  const show = (i) => {
    leave();
    current = i;
    hover.append(svg("line", { class: "cursor", x1: at.x(i), x2: at.x(i), y1: at.top, y2: at.height - at.bottom }));
    const list = el("ul"), bars = spec.kind === "bars";
    let total = 0;
    spec.series.forEach((series, place) => {
      const k = colour(series, place), value = (series.raw || series.values)[i];
      if (value === null) return;
      total += value;
      if (!bars) hover.append(svg("circle", { class: `dot hot k${k % 6}`, cx: at.x(i), cy: at.y(value), r: 4 }));
      const smooth = series.raw ? ` (smoothed ${figure(series.values[i])})` : "";
      const spread = series.low && series.low[i] !== null ? ` [${figure(series.low[i])} to ${figure(series.high[i])}]` : "";
      list.append(el("li", { class: `k${k % 6}` }, (spec.series.length > 1 || bars ? `${series.name} ` : "") + (bars ? seconds(value) : figure(value)) + spread + smooth));
    });
    if (!list.children.length) list.append("no value");
    const before = i ? spec.steps[i - 1] : -1;
    for (const mark of spec.marks || []) {
      if (mark.step > before && mark.step <= spec.steps[i]) list.append(el("li", { class: `marked ${mark.kind}` }, mark.text));
    }
    const head = `step ${spec.steps[i]}` + (bars && spec.series.length > 1 ? ` · ${seconds(total)}` : "");
    tip = el("div", { class: "tip", role: "status" }, el("b", {}, head), list);
    box.append(tip);
    const scale = root.getBoundingClientRect().width / at.width, where = at.x(i) * scale, room = box.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room, where > box.clientWidth / 2 ? where - tip.offsetWidth - 10 : where + 10))}px`;
  };
  const move = (event) => {
    const frame = root.getBoundingClientRect(), px = ((event.clientX - frame.left) / frame.width) * at.width;
    let best = 0;
    spec.steps.forEach((_, i) => { if (Math.abs(at.x(i) - px) < Math.abs(at.x(best) - px)) best = i; });
    if (best !== current) show(best);
  };
  const key = (event) => {
    const last = spec.steps.length - 1, from = current === null ? last : current;
    const target = { ArrowLeft: current === null ? last : Math.max(0, from - 1), ArrowRight: Math.min(last, from + 1), Home: 0, End: last }[event.key];
    if (event.key === "Escape") leave();
    if (target === undefined) return;
    event.preventDefault();
    show(target);
  };
  root.addEventListener("pointermove", move);
  root.addEventListener("pointerdown", move);
  root.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") leave(); }); // a tap stays until the next
  root.addEventListener("keydown", key);
  root.addEventListener("blur", leave);
}

function describe(spec) {
  const parts = spec.series.map((series) => {
    const values = (series.raw || series.values).filter((v) => v !== null);
    return `${series.name}: from ${figure(values[0])} to ${figure(values[values.length - 1])}`;
  });
  return visible(`${spec.title} over steps ${spec.steps[0]} to ${spec.steps[spec.steps.length - 1]}. ${parts.join("; ")}. Arrow keys read values.`);
}

// Mean over neighbouring steps; a missing value stays missing.
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
    ...spec, about: `${spec.about}; means over ${size} steps`, steps: groups(spec.steps).map((group) => group[group.length - 1]),
    series: spec.series.map((s) => ({ ...s, values: groups(s.values).map(mean) })),
  };
}

// Steps without any value at the ends (a step 0 that only validates) are left out.
function trimmed(spec) {
  const some = (i) => spec.series.some((s) => s.values[i] !== null), all = spec.steps.map((_, i) => i).filter(some);
  const pick = (values) => values && values.slice(all[0], all[all.length - 1] + 1);
  const series = spec.series.map((s) => ({ ...s, values: pick(s.values), raw: pick(s.raw), low: pick(s.low), high: pick(s.high) }));
  return { ...spec, steps: pick(spec.steps), series };
}

const redraw = new ResizeObserver((entries) => {
  for (const { target } of entries) if (target.clientWidth) draw(target, target.spec);
});

// Series with the same values as one, so that none hides another.
function distinct(series) {
  const found = new Map();
  for (const s of series) {
    const key = JSON.stringify(s.values), other = found.get(key);
    found.set(key, other ? { ...other, name: `${other.name}, ${s.name}` } : s);
  }
  return [...found.values()];
}

// The chart's element, or null where no series has a value.
function chart(parent, given) {
  const having = given.series.filter((s) => s && present(s.values)), series = distinct(having);
  if (!series.length) return null;
  const spec = merged(trimmed({ ...given, series }), 120), box = el("div", { class: "plot" });
  box.spec = spec;
  const card = el("figure", { class: "chart" + (spec.wide ? " wide" : "") }, el("h3", {}, spec.title));
  if (spec.about) card.append(el("p", { class: "about" }, spec.about));
  card.append(box);
  if (having.length > 1 || spec.kind === "bars" || spec.legend) {
    card.append(el("ul", { class: "legend" }, ...spec.series.map((s, k) => el("li", { class: `k${colour(s, k) % 6}` }, s.name))));
  }
  parent.append(card);
  draw(box, spec);
  redraw.observe(box);
  return card;
}
