// Puts the page together from its data blocks.

function change(before, after, neutral) {
  const style = neutral || before === after ? "" : after > before ? "up" : "down";
  return [round3(before), el("span", { class: "arrow" }, "→"), el("span", { class: style }, figure(round3(after)))];
}

// Means of the first and the last few values, as the reward's.
function ends(values, window) {
  const known = (values || []).filter((v) => v !== null);
  return known.length > 1 ? [mean(known.slice(0, window)), mean(known.slice(-window))] : null;
}

function tiles({ summary: s, facts, status, curves }) {
  const result = [], about = s.window > 1 ? `mean of the first and last ${s.window} steps` : "first and last step";
  const none = (name, text) => result.push([name, ["–"], text]);
  if (s.loss_first !== null) result.push(["Loss", change(s.loss_first, s.loss_last, true), about]);
  else if (s.reward_first === null) none("Reward", "no training step yet");
  else if (s.trained_steps === 1) result.push(["Reward", [figure(round3(s.reward_last))], "of the only step"]);
  else result.push(["Reward", change(s.reward_first, s.reward_last), about]);
  if (s.val_first === null) none("Validation", "not validated");
  else if (s.val_first_step === s.val_last_step) result.push(["Validation", [figure(round3(s.val_first))], `at step ${s.val_first_step}`]);
  else result.push(["Validation", change(s.val_first, s.val_last), `step ${s.val_first_step} and step ${s.val_last_step}`]);
  result.push(["Steps", [`${s.steps}${facts.planned_steps ? ` of ${facts.planned_steps}` : ""}`], status]);
  if (s.seconds !== null) result.push(["Duration", [seconds(s.seconds)], s.trained_steps > 1 ? `${seconds(s.seconds / s.trained_steps)} a step` : ""]);
  if (facts.tokens_per_second !== null) result.push(["Throughput", [Math.round(facts.tokens_per_second).toLocaleString("en")], "tokens a second, prompts and responses"]);
  const lengths = ends(curves.metrics["response_length/mean"], s.window);
  if (lengths) result.push(["Response length", change(...lengths, true), "tokens, " + about]);
  return result;
}

function showHead(data) {
  const { facts, summary, status } = data;
  document.title = `${visible(data.title)} · VeRL run`;
  byId("title").textContent = visible(data.title);
  const words = [facts.algorithm, facts.model, summary.steps ? plural(summary.steps, "step") : "no step yet", status];
  byId("subtitle").textContent = visible(words.filter(Boolean).join(" · "));
  byId("footer").textContent = `Written ${data.written} by VeRL from metrics.jsonl, samples/, config.yaml and events.log.`;
  for (const [name, value, about] of tiles(data)) {
    byId("facts").append(el("div", { class: "fact" }, el("h3", {}, name), el("div", { class: "value" }, ...value), el("p", {}, about || "")));
  }
  const unfinished = status === "unfinished" ? ["The run had not finished when this page was written; it is written again at every validation and at the end."] : [];
  byId("warnings").hidden = !data.warnings.length;
  byId("warning-list").append(...data.warnings.map((text) => el("li", {}, text)));
  byId("notes").append(...[...unfinished, ...data.notes].map((text) => el("li", {}, text)));
}

function switchTheme() {
  const select = byId("theme"), store = (action) => { try { return action(); } catch { return null; } }; // a file may have no storage
  const apply = () => {
    if (select.value) document.documentElement.dataset.theme = select.value;
    else delete document.documentElement.dataset.theme;
  };
  select.value = store(() => localStorage.getItem("verl-theme")) || "";
  select.addEventListener("change", () => { apply(); store(() => localStorage.setItem("verl-theme", select.value)); });
  apply();
}

function showPage() {
  const data = JSON.parse(byId("data").textContent);
  switchTheme();
  if (data.runs) {
    showComparison(data);
    return;
  }
  showHead(data);
  pickCurves(data);
  showTimeline(data.timeline);
  browseSamples(JSON.parse(byId("sample-data").textContent), data.samples);
  showEvents(data);
  showConfig(data);
  const wanted = location.hash && byId(location.hash.slice(1));
  if (wanted) wanted.scrollIntoView({ behavior: "instant" }); // the page has grown since the browser went there
}

showPage();
