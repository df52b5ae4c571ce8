// Several runs on one page: their figures side by side, their curves over each other, where their configurations differ.

const MAIN = [
  ["critic/score/mean", "Reward"], ["train/loss", "Loss"], ["val/loss", "Held-out loss"], ["response_length/mean", "Response length"],
  ["actor/kl_loss", "KL to reference (loss)"], ["actor/reward_kl_penalty", "KL to reference (reward)"], ["actor/ppo_kl", "KL to old policy"],
  ["actor/entropy", "Entropy"], ["actor/grad_norm", "Gradient norm"], ["actor/pg_clipfrac", "Clip fraction"],
  ["response_length/clip_ratio", "Cut responses"], ["training/frac_reward_zero_std", "Groups without spread"],
  ["perf/throughput", "Throughput"], ["timing_s/step", "Seconds a step"],
];

function showOverlays(data) {
  const { steps, metrics } = data.curves, holder = byId("charts"), form = byId("curve-switches").elements;
  const held = Object.keys(metrics).filter((name) => name.endsWith("(best figure)")).map((name) => [name, `Validation, ${name.slice(9, -14)}`]);
  const shown = [...MAIN.slice(0, 3), ...held, ...MAIN.slice(3)].filter(([name]) => metrics[name]);
  redraw.disconnect();
  holder.replaceChildren();
  const add = (name, title, height) => chart(holder, {
    title, about: data.about[name] || "", steps, kind: "line", height, legend: true,
    // The same colour for a run in every chart: a run without the metric keeps its place.
    series: data.runs.map(({ label }, k) => {
      const values = metrics[name][label];
      if (!values) return null;
      return form.smooth.checked && present(values) >= 16 ? { name: label, values: smooth(values), raw: values, k } : { name: label, values, k };
    }),
  });
  for (const [name, title] of shown) add(name, title);
  for (const name of picked) if (metrics[name]) add(name, name, 150);
  if (!holder.children.length) holder.append(el("p", { class: "muted wide" }, "No step has been logged yet, so there is nothing to draw."));
  const used = new Set(shown.map(([name]) => name));
  return Object.keys(metrics).filter((name) => !used.has(name));
}

function showFigures(data) {
  const rows = [
    ["status", (run) => run.status], ["model", (run) => run.facts.model], ["algorithm", (run) => run.facts.algorithm],
    ["steps", ({ summary: s, facts: f }) => `${s.steps}${f.planned_steps ? ` of ${f.planned_steps}` : ""}`],
    ["reward, first to last", ({ summary: s }) => s.reward_first !== null && `${figure(round3(s.reward_first))} → ${figure(round3(s.reward_last))}`],
    ["validation, first to last", ({ summary: s }) => s.val_first !== null && `${figure(round3(s.val_first))} → ${figure(round3(s.val_last))}`],
    ["loss, first to last", ({ summary: s }) => s.loss_first !== null && `${figure(round3(s.loss_first))} → ${figure(round3(s.loss_last))}`],
    ["duration", ({ summary: s }) => s.seconds !== null && seconds(s.seconds)],
    ["tokens a second", ({ facts: f }) => f.tokens_per_second !== null && Math.round(f.tokens_per_second).toLocaleString("en")],
    ["warnings", (run) => run.warnings.length && run.warnings.join(" · ")],
  ];
  const head = el("tr", {}, el("th", { scope: "col" }, ""), ...data.runs.map(({ label }) => el("th", { scope: "col" }, label)));
  const body = rows.map(([name, value]) => [name, data.runs.map((run) => value(run) || "–")]).filter(([, cells]) => cells.some((cell) => cell !== "–"));
  byId("facts").className = "";
  byId("facts").append(el("table", { class: "compared" }, el("thead", {}, head),
    el("tbody", {}, ...body.map(([name, cells]) => el("tr", {}, el("th", { scope: "row" }, name), ...cells.map((cell) => el("td", {}, cell)))))));
}

function showDifferences(data) {
  byId("config-filter").hidden = true;
  byId("config-count").textContent = data.differences.length ? `${plural(data.differences.length, "setting")} of ${data.runs.length} runs differ.` : "The runs have the same configuration.";
  const table = byId("config-table");
  table.hidden = !data.differences.length;
  table.className = "compared";
  table.tHead.rows[0].replaceChildren(el("th", { scope: "col" }, "Key"), ...data.runs.map(({ label }) => el("th", { scope: "col" }, label)));
  for (const { key, meaning, values } of data.differences) {
    const cells = values.map((value) => el("td", {}, el("code", {}, valueText(value))));
    byId("config-rows").append(el("tr", {}, el("th", { scope: "row" }, el("code", {}, key), el("p", {}, meaning)), ...cells));
  }
}

function showComparison(data) {
  document.title = `${visible(data.title)} · VeRL runs`;
  byId("title").textContent = visible(data.title);
  byId("subtitle").textContent = plural(data.runs.length, "run") + " compared";
  byId("footer").textContent = `Written ${data.written} by VeRL from the folders of the runs.`;
  for (const id of ["timeline", "samples", "events", "marks"]) byId(id).remove();
  for (const link of document.querySelectorAll("nav a")) if (!byId(link.hash.slice(1))) link.remove();
  byId("curve-switches").elements.bands.parentElement.hidden = true;
  byId("notes").append(...data.runs.flatMap(({ label, notes }) => notes.map((text) => el("li", {}, `${label}: ${text}`))));
  showFigures(data);
  pickCurves(data, showOverlays);
  showDifferences(data);
}
