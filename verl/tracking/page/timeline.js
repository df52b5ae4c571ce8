// Who did what in the last steps: a lane for the controller and each worker; gaps are waiting.

function lane(name, note, rows, children, total) {
  const root = svg("svg", { viewBox: `0 0 ${total} ${rows}`, preserveAspectRatio: "none", height: 16 * rows + 2, role: "img", "aria-label": `${name}: ${note}` });
  root.append(...children);
  return el("div", { class: "lane" }, el("span", { class: "who" }, name), root, el("span", { class: "muted" }, note));
}

function block(kind, text, row, from, to) {
  const rect = svg("rect", { class: `stage ${kind}`, x: from, y: row + 0.06, width: Math.max(0, to - from), height: 0.88 });
  rect.append(svg("title", {}, text));
  return rect;
}

function showTimeline(found) {
  if (!found.lanes) return;
  const total = found.seconds, names = found.steps.map(([step]) => step), stages = new Set();
  const several = names.length > 1 ? `The last ${names.length} steps, ${names[0]} to ${names[names.length - 1]}` : `Step ${names[0]}`;
  byId("timeline-note").textContent = `${several}: ${seconds(total)}. Each lane is a process; where it is empty, the process waits. verl profile writes the whole run for ui.perfetto.dev.`;
  const lanes = byId("lanes");
  lanes.append(lane("steps", "", 1, found.steps.map(([step, from, to], i) => block(i % 2 ? "step odd" : "step", `step ${step}: ${seconds(to - from)}`, 0, from, to)), total));
  for (const { name, rows, busy, spans } of found.lanes) {
    const blocks = spans.map(([stage, what, row, from, to]) => {
      stages.add(stage);
      return block(stage, `${what}: ${seconds(to - from)}`, row, from, to);
    });
    lanes.append(lane(name, busy === null ? "" : `${Math.round(100 * busy)}% busy`, rows, blocks, total));
  }
  byId("timeline-legend").append(...[...stages].sort().map((stage) => el("span", { class: `stage ${stage}` }, stage)));
}
