// A served page loads itself anew when its run has gone on. What was chosen in its forms, and which metrics, stays chosen.
const KEPT = "verl-chosen";

function chosen() {
  return [...document.forms].map((form) => [...form.elements].map((field) => (field.type === "checkbox" ? field.checked : field.value)));
}

function choose({ forms, names }) {
  [...document.forms].forEach((form, i) => [...form.elements].forEach((field, k) => {
    const value = ((forms || [])[i] || [])[k];
    if (value !== null && value !== undefined) field[field.type === "checkbox" ? "checked" : "value"] = value;
  }));
  for (const name of names || []) picked.add(name);
  for (const field of [...[...document.forms].map((form) => form.elements[0]), byId("metric-search")]) field.dispatchEvent(new Event("input", { bubbles: true }));
}

function keepUp({ state, seconds: pause }) {
  const first = chosen(), lost = el("b", { hidden: "" }, " · verl serve does not answer any more");
  byId("subtitle").after(lost);
  try {
    const kept = JSON.parse(sessionStorage.getItem(KEPT));
    sessionStorage.removeItem(KEPT);
    if (kept && kept.title === document.title) choose(kept);
  } catch { /* no storage, or another page's */ }
  // What differs from how the page began: the newest step stays the newest.
  const keep = () => {
    const forms = chosen().map((fields, i) => fields.map((value, k) => (value === first[i][k] ? null : value)));
    try { sessionStorage.setItem(KEPT, JSON.stringify({ title: document.title, forms, names: [...picked] })); } catch { /* no storage */ }
  };
  const busy = () => document.activeElement && document.activeElement.matches("input, select, #pages *, #rows *");
  setInterval(async () => {
    const answer = await fetch("state").catch(() => null), now = answer && answer.ok ? await answer.text() : state;
    lost.hidden = Boolean(answer && answer.ok);
    if (now === state || busy() || document.hidden) return;
    keep();
    location.reload();
  }, pause * 1000);
}

keepUp(JSON.parse(byId("data").textContent).live);
