// The samples browser: responses one by one, or all responses to a prompt side by side.

const PAGE = { rows: 20, groups: 8, prompts: 3 };

function badge(score) {
  if (score === undefined || score === null) return el("span", { class: "badge" }, "not scored");
  return el("span", { class: `badge ${score > 0 ? "good" : "bad"}` }, `reward ${figure(score)}`);
}

// Text that scrolls where it is long; what was searched for is marked.
function textBox(text, style, needle) {
  if (text === "") return el("span", { class: "empty" }, "empty");
  const box = el("div", { class: `text ${style}`, dir: "auto" }), shown = visible(text), low = shown.toLowerCase();
  if (text.length > 500) box.tabIndex = 0;
  let from = 0;
  for (let at = needle ? low.indexOf(needle) : -1; at >= 0; at = low.indexOf(needle, from)) {
    box.append(shown.slice(from, at), el("mark", {}, shown.slice(at, at + needle.length)));
    from = at + needle.length;
  }
  box.append(shown.slice(from));
  return box;
}

function rowFacts(row) {
  const versions = row.versions && (row.versions[0] === row.versions[1] ? `policy ${row.versions[0]}` : `policies ${row.versions[0]}–${row.versions[1]}`);
  return [
    typeof row.shaped === "number" && `shaped ${figure(row.shaped)}`,
    typeof row.reward === "number" && `after KL ${figure(row.reward)}`,
    row.reason,
    row.advantage !== undefined && row.advantage !== null && `advantage ${figure(row.advantage)}`,
    row.response_length !== undefined && row.response_length !== null && plural(row.response_length, "token"),
    row.finish_reason && `ended by ${row.finish_reason}`,
    versions,
  ].filter(Boolean);
}

function parts(row) {
  const entries = Object.entries(row.extras || {});
  if (!entries.length) return null;
  return el("ul", { class: "parts", "aria-label": "reward parts" }, ...entries.map(([name, value]) => el("li", {}, el("b", {}, name), " ", typeof value === "number" ? figure(value) : String(value))));
}

function entries(...pairs) {
  const list = el("dl");
  for (const [name, node] of pairs) if (node) list.append(el("dt", {}, name), el("dd", {}, node));
  return list;
}

function truthBox(group, needle) {
  return group.ground_truth === undefined ? null : textBox(group.ground_truth, "", needle);
}

function spans(facts) {
  return facts.filter(Boolean).map((fact) => el("span", {}, fact));
}

function sampleCard(row, needle) {
  const { group } = row;
  const card = el("article", { class: "sample" },
    el("header", {}, badge(row.score), ...spans([`step ${group.step} · ${group.split}`, ...rowFacts(row), group.data_source, `${group.uid} #${row.index}`])),
    entries(["prompt", textBox(group.prompt, "soft", needle)], ["response", responseBox(row, needle)], ["truth", truthBox(group, needle)], ["parts", parts(row)]));
  if (group.rows.length > 1) {
    const button = el("button", { type: "button", class: "link" }, `all ${group.rows.length} responses to this prompt`);
    button.addEventListener("click", () => {
      const wide = groupCard(group, needle, row), back = el("button", { type: "button", class: "link" }, "only this response");
      back.addEventListener("click", () => { wide.replaceWith(card); button.focus(); });
      wide.querySelector("header").append(back);
      card.replaceWith(wide);
      back.focus();
    });
    card.querySelector("header").append(button);
  }
  return card;
}

function groupCard(group, needle, chosen) {
  const scores = scored(group.rows), count = group.of > group.rows.length ? `${group.rows.length} of ${group.of} responses` : plural(group.rows.length, "response");
  const head = [`step ${group.step} · ${group.split}`, count, scores.length && `mean reward ${figure(mean(scores))}`, group.data_source, group.uid];
  const responses = group.rows.map((row) => el("section", { class: "response" + (row === chosen ? " chosen" : ""), "aria-label": `response ${row.index}` },
    el("header", {}, badge(row.score), ...spans([`#${row.index}`, ...rowFacts(row)])), responseBox(row, needle), parts(row) || ""));
  return el("article", { class: "sample group" }, el("header", {}, ...spans(head)),
    entries(["prompt", textBox(group.prompt, "soft", needle)], ["truth", truthBox(group, needle)]), el("div", { class: "responses" }, ...responses));
}

// All that became of one prompt, step by step: the mean of each step, and its responses.
function promptCard(prompt, needle) {
  const first = prompt.groups[0], means = prompt.groups.map((group) => scored(group.rows)).filter((scores) => scores.length).map(mean);
  const rise = means.length > 1 ? `mean reward ${figure(means[0])} → ${figure(means[means.length - 1])}` : "";
  const steps = prompt.groups.map((group) => {
    const scores = scored(group.rows), about = scores.length ? `mean reward ${figure(mean(scores))} of ${group.of}` : plural(group.of, "response");
    const shown = group.rows.slice(0, 2).map((row) => el("div", {}, el("header", {}, badge(row.score), ...spans(rowFacts(row))), responseBox(row, needle)));
    return el("section", { class: "response" }, el("header", {}, el("b", {}, `step ${group.step}`), ...spans([group.split, about])), ...shown);
  });
  return el("article", { class: "sample group" }, el("header", {}, ...spans([plural(prompt.groups.length, "step"), rise, first.data_source])),
    entries(["prompt", textBox(first.prompt, "soft", needle)], ["truth", truthBox(first, needle)]), el("div", { class: "responses" }, ...steps));
}

// Groups by prompt, in the order of steps; the prompt that most steps have first.
function byPrompt(groups) {
  const found = new Map();
  for (const group of groups) found.set(group.prompt, [...(found.get(group.prompt) || []), group]);
  const prompts = [...found.values()].map((list) => ({ groups: [...list].sort((a, b) => a.step - b.step), rows: list.flatMap((group) => group.rows) }));
  return prompts.sort((a, b) => b.groups.length - a.groups.length);
}

function scored(rows) {
  return rows.map((row) => row.score).filter((score) => score !== undefined && score !== null);
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

// Order of rows, or of groups by the mean of what their rows have; what has no figure comes last.
const ORDERS = {
  high: [(row) => row.score, -1], low: [(row) => row.score, 1], adv: [(row) => row.advantage, -1],
  long: [(row) => row.response_length, -1], short: [(row) => row.response_length, 1],
};

function sorted(list, order) {
  if (!ORDERS[order]) return list;
  const [value, sign] = ORDERS[order];
  const key = (item) => {
    const values = (item.rows || [item]).map(value).filter((v) => v !== undefined && v !== null);
    return values.length ? sign * mean(values) : Infinity;
  };
  return list.map((item) => [key(item), item]).sort((a, b) => (a[0] === b[0] ? 0 : a[0] - b[0])).map(([, item]) => item);
}

function browseSamples(groups, about) {
  const form = byId("filters"), fields = form.elements, holder = byId("rows"), note = byId("sample-note");
  form.hidden = byId("pages").hidden = !groups.length;
  if (!groups.length) {
    note.textContent = "This run has left no samples.";
    return;
  }
  const rows = groups.flatMap((group) => group.rows.map((row) => Object.assign(row, { group })));
  const steps = [...new Set(groups.map((group) => group.step))], splits = [...new Set(groups.map((group) => group.split))];
  const all = about.rows === about.of_rows, every = about.steps === about.of_steps, number = (n) => n.toLocaleString("en");
  const some = all ? `All ${number(about.rows)}` : `${number(about.rows)} of the ${number(about.of_rows)}`;
  const where = every ? plural(about.steps, "step") : `${about.steps} of the ${number(about.of_steps)} steps`;
  note.textContent = `${some} samples that ${where} left in samples/${all && every ? "" : ", evenly chosen; the rest is only there"}.`;
  fields.step.append(option("", "all"), ...steps.map((step) => option(step)));
  fields.split.append(option("", "all"), ...splits.map((split) => option(split)));
  fields.step.value = steps[steps.length - 1];
  const kept = new Set(rows.flatMap((row) => Object.keys(row.tokens || {})));
  fields.colour.append(option("", "nothing"), ...Object.keys(FIGURES).filter((kind) => kept.has(kind)).map((kind) => option(kind, FIGURES[kind][0])));
  fields.colour.parentElement.hidden = fields.colour.length < 2;
  let found = [], page = 0, needle = "";

  const showPage = () => {
    const size = PAGE[fields.view.value], pages = Math.max(1, Math.ceil(found.length / size));
    page = Math.max(0, Math.min(pages - 1, page));
    const part = found.slice(page * size, (page + 1) * size);
    holder.replaceChildren(...part.map((item) => (item.groups ? promptCard(item, needle) : item.rows ? groupCard(item, needle) : sampleCard(item, needle))));
    byId("page").textContent = found.length ? `${page * size + 1} to ${page * size + part.length} of ${found.length}` : "";
    byId("earlier").disabled = page === 0;
    byId("later").disabled = page >= pages - 1;
    byId("pages").hidden = pages < 2;
  };
  const apply = () => {
    needle = fields.text.value.toLowerCase();
    const bound = (field, none) => (field.value === "" || Number.isNaN(field.valueAsNumber) ? none : field.valueAsNumber);
    const low = bound(fields.low, -Infinity), high = bound(fields.high, Infinity), bounded = low !== -Infinity || high !== Infinity;
    const has = (text) => text !== undefined && text.toLowerCase().includes(needle);
    const across = fields.view.value === "prompts"; // steps are what it shows
    fields.step.disabled = across;
    const match = rows.filter((row) => (across || fields.step.value === "" || row.group.step === Number(fields.step.value))
      && (!fields.colour.value || (row.tokens && row.tokens[fields.colour.value] !== undefined))
      && (fields.split.value === "" || row.group.split === fields.split.value)
      && (!bounded || (typeof row.score === "number" && row.score >= low && row.score <= high))
      && (!needle || has(row.response) || has(row.group.prompt) || has(row.group.ground_truth)));
    const chosen = fields.view.value === "rows" ? match : [...new Set(match.map((row) => row.group))];
    found = sorted(across ? byPrompt(chosen) : chosen, fields.order.value);
    const scores = scored(match), prompts = fields.view.value !== "rows" ? ` in ${plural(found.length, "prompt")}` : "";
    byId("count").textContent = match.length ? `${plural(match.length, "sample")} found${prompts}` + (scores.length ? `, mean reward ${figure(mean(scores))}` : "") : "No sample is like that.";
    page = 0;
    showPage();
  };
  const turn = (by) => { page += by; showPage(); form.scrollIntoView({ block: "start" }); };
  form.addEventListener("input", apply);
  form.addEventListener("reset", () => setTimeout(apply));
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("earlier").addEventListener("click", () => turn(-1));
  byId("later").addEventListener("click", () => turn(1));
  apply();
}
