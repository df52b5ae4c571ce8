// The samples browser. Everything a model or a dataset wrote goes through text nodes only.

const PAGE = 20;

function option(value, text) {
  return el("option", { value }, text === undefined ? value : text);
}

function badge(score) {
  if (score === undefined) return el("span", { class: "badge" }, "not scored");
  return el("span", { class: `badge ${score > 0 ? "good" : "bad"}` }, `reward ${figure(score)}`);
}

function sampleCard(row) {
  const versions = row.versions && (row.versions[0] === row.versions[1] ? `policy ${row.versions[0]}` : `policies ${row.versions[0]}–${row.versions[1]}`);
  const facts = [
    `step ${row.step} · ${row.split}`,
    row.advantage !== undefined && `advantage ${figure(row.advantage)}`,
    row.response_length !== undefined && `${row.response_length} tokens`,
    row.finish_reason && `ended by ${row.finish_reason}`,
    row.data_source, versions, `${row.uid} #${row.index}`,
  ].filter(Boolean);
  const list = el("dl");
  const entry = (name, text, style) => {
    if (text === undefined) return;
    const body = text === "" ? el("span", { class: "empty" }, "empty") : el("div", { class: `text clip ${style}`, tabindex: text.length > 600 ? 0 : -1 }, text);
    list.append(el("dt", {}, name), el("dd", {}, body));
  };
  entry("prompt", row.prompt, "prompt");
  entry("response", row.response, "");
  entry("truth", row.ground_truth, "");
  const extras = Object.entries(row.extras || {});
  if (extras.length) entry("extras", extras.map(([name, value]) => `${name}: ${typeof value === "number" ? figure(value) : value}`).join("  "), "prompt");
  return el("article", { class: "sample" }, el("header", {}, badge(row.score), ...facts.map((fact) => el("span", {}, fact))), list);
}

function browseSamples(rows) {
  const byId = (id) => document.getElementById(id);
  const form = byId("filters"), holder = byId("rows"), more = byId("older"), count = byId("count");
  if (!rows.length) {
    form.hidden = true;
    count.textContent = "This run has left no samples.";
    return;
  }
  const fields = form.elements, steps = [...new Set(rows.map((row) => row.step))];
  const splits = [...new Set(rows.map((row) => row.split))];
  fields.step.append(option("", "all"), ...steps.map((step) => option(step)));
  fields.split.append(option("", "all"), ...splits.map((split) => option(split)));
  fields.step.value = steps[steps.length - 1];
  let found = [], shown = 0;

  const showMore = () => {
    holder.append(...found.slice(shown, shown + PAGE).map(sampleCard));
    shown = Math.min(found.length, shown + PAGE);
    more.hidden = shown >= found.length;
  };
  const apply = () => {
    const text = fields.text.value.toLowerCase();
    const bound = (field, none) => (field.value === "" || Number.isNaN(field.valueAsNumber) ? none : field.valueAsNumber);
    const low = bound(fields.low, -Infinity), high = bound(fields.high, Infinity), bounded = low !== -Infinity || high !== Infinity;
    found = rows.filter((row) => (fields.step.value === "" || row.step === Number(fields.step.value))
      && (fields.split.value === "" || row.split === fields.split.value)
      && (!bounded || (row.score !== undefined && row.score >= low && row.score <= high))
      && (!text || [row.prompt, row.response, row.ground_truth].some((part) => part && part.toLowerCase().includes(text))));
    const score = (row) => (row.score === undefined ? -Infinity : row.score);
    const orders = { high: (a, b) => score(b) - score(a) || 0, low: (a, b) => score(a) - score(b) || 0, long: (a, b) => (b.response_length || 0) - (a.response_length || 0) };
    if (orders[fields.order.value]) found.sort(orders[fields.order.value]);
    const scored = found.filter((row) => row.score !== undefined);
    const mean = scored.reduce((sum, row) => sum + row.score, 0) / scored.length;
    count.textContent = `${found.length} of ${rows.length} samples` + (scored.length ? `, mean reward ${figure(mean)}` : "");
    holder.replaceChildren();
    shown = 0;
    showMore();
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", showMore);
  apply();
}
