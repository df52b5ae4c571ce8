// Puts the page together from the data block.

function rowsOfFacts(data) {
  const { summary: s, facts } = data, result = [];
  const change = (before, after) => {
    if (s.trained_steps === 1 && before === after) return [figure(round3(after))];
    const style = after > before ? "up" : after < before ? "down" : "";
    return [figure(round3(before)), el("span", { class: "arrow" }, "→"), el("span", { class: style }, figure(round3(after)))];
  };
  if (s.reward_first !== null) {
    let about = s.trained_steps > 1 ? "first and last step" : "of the only step";
    if (s.window > 1) about = `mean of the first and last ${s.window} steps`;
    result.push(["Reward", change(s.reward_first, s.reward_last), about]);
  }
  if (s.val_first !== null) {
    if (s.val_first_step === s.val_last_step) result.push(["Validation", [figure(round3(s.val_first))], `at step ${s.val_first_step}`]);
    else result.push(["Validation", change(s.val_first, s.val_last), `step ${s.val_first_step} and step ${s.val_last_step}`]);
  }
  result.push(["Steps", [String(s.steps) + (facts.planned_steps ? ` of ${facts.planned_steps}` : "")], s.trained_steps ? "" : "no training step yet"]);
  if (s.seconds !== null) result.push(["Duration", [seconds(s.seconds)], s.trained_steps > 1 ? `${seconds(s.seconds / s.trained_steps)} a step` : ""]);
  if (facts.algorithm) result.push(["Algorithm", [facts.algorithm], ""]);
  if (facts.model) result.push(["Model", [String(facts.model)], "", "text"]);
  return result;
}

function round3(value) {
  return Number(value.toPrecision(3));
}

function showFacts(data) {
  const holder = document.getElementById("facts");
  for (const [name, value, about, style] of rowsOfFacts(data)) {
    const card = el("div", { class: "fact" }, el("h3", {}, name), el("div", { class: `value ${style || ""}` }, ...value));
    if (about) card.append(el("p", {}, about));
    holder.append(card);
  }
}

function showCurves(data) {
  const { steps, metrics, validation, stages } = data.curves, used = new Set();
  const one = (metric, name) => {
    used.add(metric);
    const values = metrics[metric];
    if (!values) return null;
    return values.length >= 16 ? { name, values: smooth(values), raw: values } : { name, values };
  };
  const holder = document.getElementById("charts");
  const add = (title, about, series, more) => chart(holder, { title, about, steps, series, kind: "line", ...more });
  add("Reward", "mean score of the step's responses", [one("critic/score/mean", "reward")], { zero: true });
  add("Validation", "held-out prompts", Object.entries(validation).map(([name, values]) => ({ name, values })), { dots: true, zero: true });
  add("Response length", "mean tokens", [one("response_length/mean", "mean")]);
  add("KL divergence", "nats a token", [one("actor/kl_loss", "to reference (loss)"), one("actor/reward_kl_penalty", "to reference (reward)"), one("actor/ppo_kl", "to old policy")]);
  add("Entropy", "nats a token", [one("actor/entropy", "entropy")]);
  add("Gradient norm", "before clipping", [one("actor/grad_norm", "actor"), one("critic/grad_norm", "critic")], { zero: true });
  add("Clip fraction", "share of tokens held by the clip", [one("actor/pg_clipfrac", "upper and lower"), one("actor/pg_clipfrac_lower", "dual clip")], { zero: true });
  add("Cut responses", "share that reached the longest length", [one("response_length/clip_ratio", "cut")], { zero: true });
  add("Groups without spread", "share whose responses all got the same reward", [one("training/frac_reward_zero_std", "share")], { zero: true });
  add("Value loss", "critic", [one("critic/vf_loss", "value loss")], { zero: true });
  add("Explained variance", "critic; 1 is perfect", [one("critic/vf_explained_var", "explained variance")]);
  const bars = Object.entries(stages).map(([name, values]) => ({ name, values }));
  chart(holder, { title: "Seconds by stage", steps, series: bars, kind: "bars", wide: true, height: 200 });
  if (!holder.children.length) holder.append(el("p", { class: "muted" }, "No step has been logged yet."));
  showMoreCurves(steps, metrics, Object.keys(metrics).filter((name) => !used.has(name)));
}

function showMoreCurves(steps, metrics, rest) {
  const details = document.getElementById("more"), holder = details.querySelector("div");
  details.hidden = !rest.length;
  details.querySelector("summary").textContent = `All other metrics (${rest.length})`;
  details.addEventListener("toggle", () => {
    if (!details.open || holder.children.length) return;
    for (const name of rest) chart(holder, { title: name, steps, series: [{ name, values: metrics[name] }], kind: "line", height: 110 });
  });
}

function showEvents(data) {
  document.getElementById("notes").append(...data.notes.map((note) => el("li", {}, note)));
  const holder = document.getElementById("event-table");
  if (!data.events.length) {
    holder.append(el("p", { class: "muted" }, "Nothing unusual happened."));
    return;
  }
  const body = el("tbody");
  for (const event of data.events) {
    const detail = typeof event.detail === "string" ? event.detail : JSON.stringify(event.detail);
    const when = new Date(event.time * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" });
    const cells = [when, event.step === null ? "" : String(event.step), event.kind.replaceAll("_", " "), event.subject, detail];
    body.append(el("tr", {}, ...cells.map((cell) => el("td", {}, cell))));
  }
  const head = el("tr", {}, ...["Time", "Step", "What", "Whom", "Detail"].map((name) => el("th", { scope: "col" }, name)));
  holder.append(el("table", {}, el("thead", {}, head), body));
}

function showPage() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const parts = [data.facts.algorithm, data.facts.model, data.summary.steps ? `${data.summary.steps} ${data.summary.steps === 1 ? "step" : "steps"}` : null];
  document.getElementById("subtitle").textContent = parts.filter(Boolean).join(" · ");
  document.getElementById("footer").textContent = `Written ${data.written} by VeRL from metrics.jsonl, samples/, config.yaml and events.log.`;
  showFacts(data);
  showCurves(data);
  browseSamples(data.samples);
  showEvents(data);
  const config = document.getElementById("config-text");
  config.textContent = data.config || "This run has no config.yaml.";
  const wanted = location.hash && document.getElementById(location.hash.slice(1));
  if (wanted) wanted.scrollIntoView({ behavior: "instant" }); // the page has grown since the browser went there
}

showPage();
