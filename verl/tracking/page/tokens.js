// A response token by token, coloured by a figure of each: advantage, log-prob, its change, or the policy that sampled it.

const FIGURES = {
  advantage: ["advantage", "green: better than expected, red: worse"],
  change: ["log-prob change", "green: likelier than before, red: less likely"],
  log_prob: ["log-prob", "the redder, the less likely the token was"],
  version: ["policy version", "the redder, the older the policy that sampled it"],
};

// The shade of each value, -4 to 4; null where it has none.
function shades(values, kind) {
  const known = values.filter((v) => v !== null && v !== undefined);
  const most = kind === "version" ? Math.max(...known) : 0, apart = known.map((v) => Math.abs(v - most));
  const scale = Math.max(...apart, kind === "log_prob" ? 1 : 1e-9);
  return values.map((v) => (v === null || v === undefined ? null : Math.round((4 * (v - most)) / scale)));
}

function tokenBox(tokens, kind, total) {
  const texts = tokens.text, given = tokens[kind];
  const values = Array.isArray(given) ? given : texts.map(() => given);
  const box = el("div", { class: "text tokens", dir: "auto" }), shade = shades(values, kind);
  if (texts.length > 100) box.tabIndex = 0;
  texts.forEach((text, i) => {
    const name = shade[i] === null || shade[i] === 0 ? "t" : shade[i] > 0 ? `t up${shade[i]}` : `t down${-shade[i]}`;
    box.append(el("span", { class: name, title: `${FIGURES[kind][0]} ${figure(values[i])}` }, text));
  });
  const from = kind === "change" && tokens.change_from ? `, from ${tokens.change_from}` : "";
  const cut = total > texts.length ? `; the first ${texts.length} of ${total} tokens` : "";
  return el("div", {}, box, el("p", { class: "muted legend-line" }, `${FIGURES[kind][0]}${from}: ${FIGURES[kind][1]}${cut}`));
}

// What the response is shown as: its tokens in colours where they were kept and asked for, else its text.
function responseBox(row, needle) {
  const kind = byId("filters").elements.colour.value, tokens = row.tokens;
  const has = kind && tokens && Array.isArray(tokens.text) && tokens[kind] !== undefined;
  return has ? tokenBox(tokens, kind, row.response_length) : textBox(row.response, "", needle);
}
