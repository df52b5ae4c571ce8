// Which curves a run shows, the switches over them, and the list of all other metrics.

function showCurves(data) {
  const { steps, metrics, validation, stages } = data.curves, holder = byId("charts"), form = byId("curve-switches").elements;
  const used = new Set();
  const line = (name, values) => {
    const smoothed = form.smooth.checked && present(values) >= 16;
    return smoothed ? { name, values: smooth(values), raw: values } : { name, values };
  };
  const one = (metric, name, series = line) => {
    used.add(metric);
    return metrics[metric] ? series(name, metrics[metric]) : null;
  };
  const plain = (name, values) => ({ name, values });
  const spread = (series, low, high) => {
    used.add(low).add(high);
    return series && form.bands.checked && metrics[low] && metrics[high] ? { ...series, low: metrics[low], high: metrics[high] } : series;
  };
  const add = (title, about, series, more) => chart(holder, { title, about, steps, series, kind: "line", marks: data.marks, ...more });
  const score = metrics["critic/score/mean"], reward = metrics["critic/rewards/mean"];
  used.add("critic/rewards/mean");

  redraw.disconnect();
  holder.replaceChildren();
  add("Reward", "mean of the step's responses" + (form.bands.checked && metrics["critic/score/max"] ? "; shaded: least to greatest" : ""), [
    spread(one("critic/score/mean", "reward"), "critic/score/min", "critic/score/max"),
    reward && String(score) !== String(reward) ? line("after KL penalty", reward) : null,
  ], { zero: true });
  add("Loss", "of supervised training", [one("train/loss", "trained"), one("val/loss", "held-out", plain)], { zero: true });
  add("Accuracy", "share of pairs whose better answer scores higher", [one("train/accuracy", "trained"), one("val/accuracy", "held-out", plain)]);
  add("Scores", "mean", [one("train/score_chosen", "of better answers"), one("train/score_rejected", "of worse answers")]);
  const held = Object.entries(validation).map(([name, values]) => plain(name, values));
  add("Validation", held.length === 1 ? `held-out prompts of ${held[0].name}` : "held-out prompts, by data source", held, { zero: true });
  add("Response length", "tokens, mean" + (form.bands.checked && metrics["response_length/max"] ? "; shaded: shortest to longest" : ""),
    [spread(one("response_length/mean", "mean"), "response_length/min", "response_length/max"), one("response_length/cap", "cap", plain)]);
  add("KL divergence", "nats a token", [one("actor/kl_loss", "to reference (loss)"), one("actor/reward_kl_penalty", "to reference (reward)"), one("actor/ppo_kl", "to old policy")]);
  add("Entropy", "nats a token", [one("actor/entropy", "entropy")]);
  add("Gradient norm", "before clipping", [one("actor/grad_norm", "actor"), one("critic/grad_norm", "critic"), one("train/grad_norm", "model")], { zero: true });
  add("Clip fraction", "share of tokens held by the clip", [one("actor/pg_clipfrac", "upper and lower"), one("actor/pg_clipfrac_lower", "dual clip"), one("critic/vf_clipfrac", "values")], { zero: true });
  add("Learning rate", "", [one("actor/lr", "actor", plain), one("critic/lr", "critic", plain), one("train/lr", "model", plain)], { zero: true });
  add("Cut responses", "share that reached the longest length", [one("response_length/clip_ratio", "cut")], { zero: true });
  add("Groups without spread", "share whose responses all got the same reward", [one("training/frac_reward_zero_std", "share")], { zero: true });
  add("Value loss", "critic", [one("critic/vf_loss", "value loss")], { zero: true });
  add("Explained variance", "critic; 1 is perfect, below 0 worse than none", [one("critic/vf_explained_var", "explained variance")]);
  add("Throughput", "tokens a second, prompts and responses", [one("perf/throughput", "tokens a second")], { zero: true });
  const family = (prefix) => Object.keys(metrics).filter((name) => name.startsWith(prefix)).map((name) => one(name, name.slice(prefix.length)));
  add("Idle share", "of each process with models: the part of a step without anything to compute", family("perf/idle/"), { zero: true });
  add("Memory", "GiB that each process holds", family("perf/memory_gb/"), { zero: true });
  const bars = Object.entries(stages).map(([name, values]) => plain(name, values));
  add("Time by stage", "seconds a step", bars, { kind: "bars", wide: true, height: 210 });

  for (const metric of picked) if (metrics[metric]) add(metric, data.about[metric] || "", [line(metric, metrics[metric])], { height: 150 });
  for (const kind of byId("marks").children) kind.hidden = !data.marks.some((mark) => mark.kind === kind.className);
  if (!holder.children.length) holder.append(el("p", { class: "muted wide" }, "No step has been logged yet, so there is nothing to draw."));
  else if (!held.length && !metrics["val/loss"]) holder.append(el("p", { class: "muted wide" }, "This run has not been validated: no validation curve."));
  return Object.keys(metrics).filter((name) => !used.has(name));
}

const picked = new Set(); // metrics chosen from the list

// `show` draws the charts and returns the metrics that no chart has.
function pickCurves(data, show = showCurves) {
  const others = show(data), search = byId("metric-search"), list = byId("metric-list"), both = [byId("metric-all"), byId("metric-none")];
  const matching = () => others.filter((name) => search.value.toLowerCase().split(/\s+/).every((word) => name.toLowerCase().includes(word)));
  const apply = () => {
    const found = matching();
    list.replaceChildren(...found.map((name) => el("button", { type: "button", class: "chip", "aria-pressed": picked.has(name), "data-name": name }, name)));
    if (!found.length) list.append(el("p", { class: "muted" }, "No metric has such a name."));
    both[0].textContent = `Show ${found.length === others.length ? "all" : "these"} ${found.length}`;
    both[0].disabled = found.every((name) => picked.has(name));
    both[1].disabled = !picked.size;
  };
  const change = (action) => { action(); show(data); apply(); };
  list.addEventListener("click", (event) => {
    const button = event.target.closest("button"), name = button && button.dataset.name;
    if (!name) return;
    change(() => (picked.has(name) ? picked.delete(name) : picked.add(name)));
    [...list.children].find((other) => other.dataset.name === name).focus({ preventScroll: true });
  });
  both[0].addEventListener("click", () => change(() => matching().forEach((name) => picked.add(name))));
  both[1].addEventListener("click", () => change(() => picked.clear()));
  search.addEventListener("input", apply);
  byId("curve-switches").addEventListener("input", () => show(data));
  byId("metrics").hidden = !others.length;
  byId("curve-switches").hidden = !data.curves.steps.length;
  apply();
}
