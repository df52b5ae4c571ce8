// The configuration beside its defaults, and the list of events.

function valueText(value) {
  if (typeof value === "number" && value !== 0 && Math.abs(value) < 0.001) return value.toExponential();
  return typeof value === "string" ? value || '""' : JSON.stringify(value);
}

function showConfig(data) {
  const form = byId("config-filter"), body = byId("config-rows"), count = byId("config-count"), table = byId("config-table");
  form.hidden = table.hidden = !data.settings.length;
  if (!data.settings.length) {
    count.textContent = data.config_text ? "config.yaml cannot be read as a configuration; this is its text:" : "This run has no config.yaml.";
    if (data.config_text) count.after(el("pre", {}, data.config_text));
    return;
  }
  const rows = data.settings.map((entry) => {
    const standard = entry.unknown ? "unknown to this version" : "default" in entry ? valueText(entry.default) : "none";
    const cells = [
      el("th", { scope: "row" }, el("code", {}, entry.key), el("p", {}, entry.meaning)),
      el("td", { "data-label": "set" }, el("code", {}, valueText(entry.value))),
      el("td", { "data-label": "default" }, el("code", {}, standard)),
    ];
    const row = el("tr", { class: entry.set ? "set" : "" }, ...cells);
    body.append(row);
    return { row, set: entry.set, text: `${entry.key} ${valueText(entry.value)} ${entry.meaning}`.toLowerCase() };
  });
  const differ = rows.filter((row) => row.set).length;
  const apply = () => {
    const words = form.elements.text.value.toLowerCase().split(/\s+/);
    let shown = 0;
    for (const { row, set, text } of rows) {
      const fits = (set || !form.elements.differ.checked) && words.every((word) => text.includes(word));
      row.classList.toggle("out", !fits); // print shows all
      shown += fits;
    }
    const some = el("span", { class: "screen" }, `; ${shown} shown`);
    count.replaceChildren(`${differ} of ${rows.length} settings differ from their defaults`, some, ".");
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  apply();
}

function showEvents(data) {
  const body = byId("event-rows");
  byId("event-table").hidden = !data.events.length;
  byId("event-none").hidden = data.events.length > 0;
  for (const event of data.events) {
    const detail = typeof event.detail === "string" ? event.detail : JSON.stringify(event.detail), when = new Date(event.time * 1000);
    const time = Number.isNaN(when.getTime()) ? "" : when.toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" });
    const cells = [["time", time], ["step", event.step === null ? "" : String(event.step)], ["what", event.kind.replaceAll("_", " ")], ["whom", event.subject], ["detail", detail]];
    body.append(el("tr", {}, ...cells.map(([name, text]) => el("td", { "data-label": name }, text))));
  }
}
