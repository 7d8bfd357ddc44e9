// The console's script: live updates, keys, dialogs and the palette. Pages work without it.
// @ts-check
const $ = (/** @type {string} */ what, /** @type {ParentNode} */ from = document) => /** @type {any} */ (from.querySelector(what));
const $$ = (/** @type {string} */ what, /** @type {ParentNode} */ from = document) => /** @type {any[]} */ ([...from.querySelectorAll(what)]);
const body = document.body;
const base = body.dataset.base || "";
const here = () => location.pathname + location.search;
/** Announce a text to screen readers. */
const say = (/** @type {string} */ text) => { const said = $("#said"); if (said) said.textContent = text; };

// On a narrow screen the row of pages is scrolled: show the present one.
const tab = $(".top nav [aria-current]");
if (tab) tab.parentElement.scrollLeft = tab.offsetLeft - (tab.parentElement.clientWidth - tab.offsetWidth) / 2;

// -- ages ---------------------------------------------------------------------------------------------------------
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
function age(/** @type {number} */ seconds) {
  for (const [size, unit] of UNITS) {
    if (Math.abs(seconds) >= size * (unit === "h" || unit === "min" ? 2 : 1) || size === 1) {
      const amount = `${Math.floor(Math.abs(seconds) / Number(size))} ${unit}`;
      return seconds <= -1 ? `in ${amount}` : amount;
    }
  }
  return "";
}
function ages() {
  for (const time of $$("time[data-age]")) {
    const text = age((Date.now() - Date.parse(time.dateTime)) / 1000);
    if (time.textContent !== text) time.textContent = text;
  }
}
setInterval(ages, 5000);

// -- changing a page in place -------------------------------------------------------------------------------------
/** Update `old` to `fresh`, and keep equal elements, so that focus and scroll stay. */
function become(/** @type {any} */ old, /** @type {any} */ fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old.id !== fresh.id) return old.replaceWith(fresh);
  if (old.nodeType !== 1) { if (old.data !== fresh.data) old.data = fresh.data; return; }
  if (old.isEqualNode(fresh)) return;
  if (old.contains(document.activeElement) && /^(INPUT|SELECT|TEXTAREA)$/.test(old.nodeName)) return;
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  for (const { name, value } of [...fresh.attributes]) if (old.getAttribute(name) !== value && !(name === "open" && old.nodeName === "DETAILS")) old.setAttribute(name, value);
  const byId = new Map([...old.children].filter((each) => each.id).map((each) => [each.id, each]));
  let at = old.firstChild;
  for (const next of [...fresh.childNodes]) {
    const same = next.id ? byId.get(next.id) : at && !at.id && at.nodeName === next.nodeName ? at : null;
    if (!same) { old.insertBefore(next, at); continue; }
    if (same === at) at = at.nextSibling; else old.insertBefore(same, at);
    become(same, next);
  }
  while (at) { const after = at.nextSibling; at.remove(); at = after; }
}
const parsed = (/** @type {string} */ html) => { const held = document.createElement("template"); held.innerHTML = html; return held.content; };
function put(/** @type {string} */ id, /** @type {string} */ html) {
  const old = document.getElementById(id);
  if (!old) return;
  const fresh = old.cloneNode(false);
  /** @type {any} */ (fresh).append(parsed(html));
  become(old, fresh);
  mark();
}
/** Load the page again, with all events that this one knows. `gently`: for a list of runs, only check the sign-in. */
async function look(gently = false) {
  const answer = await fetch(body.dataset.look || here(), { headers: { Accept: "text/html", "Last-Event-ID": newest || "0" } });
  if (answer.redirected && new URL(answer.url).pathname === `${base}/login`) return location.reload();
  if (!answer.ok || (gently && body.dataset.live === "runs")) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const id of body.dataset.live ? ["head", "now", "list", "story"] : ["head"]) {
    const fresh = page.getElementById(id), old = document.getElementById(id);
    if (fresh && old) become(old, document.importNode(fresh, true));
  }
  waiting.clear();
  mark(); showLive();
}

/** Some seconds later, and not when all other pages do it. */
const later = (/** @type {() => void} */ act) => setTimeout(act, 3000 + 4000 * Math.random());
/** Load a page that was made in an outage again, once the server can make it. */
async function recover() {
  try {
    if (!document.hidden && (await fetch(here(), { headers: { Accept: "text/html" } })).status < 500) return location.reload();
  } catch { /* the server does not answer yet */ }
  later(recover);
}
if ($("[data-again]")) later(recover);

// -- live -----------------------------------------------------------------------------------------------------------
/** @type {Map<string, string>} */
const waiting = new Map();
let isLive = false;
/** When the server was last heard, in milliseconds, and the time of day since which it is not; "" if it is. */
let heardAt = 0, lostSince = "";
function showLive() {
  const dot = $("[data-live-dot]");
  if (!dot) return;
  dot.classList.toggle("is-live", isLive);
  dot.classList.toggle("is-lost", !isLive && !!lostSince);
  $(".live-word", dot).textContent = isLive ? "live" : lostSince ? `not live since ${lostSince}` : "not live";
}
function heard() { heardAt = Date.now(); lostSince = ""; isLive = true; showLive(); }
function lost() {
  lostSince = lostSince || new Date(heardAt || Date.now()).toISOString().slice(11, 19);
  isLive = false; showLive();
}
/** Return whether a row matches the list's filters, as far as known here. */
function belongs(/** @type {any} */ row) {
  const asked = new URLSearchParams(location.search);
  return ["alertname", "playbook", "status", "decision", "node", "job", "target"].every((name) => {
    const value = asked.get(name);
    const has = (/** @type {string | undefined} */ of) => !!value && value.split(",").includes(of || "");
    return !value || has(row.dataset[name]) || (name === "alertname" && has(row.dataset.original));
  });
}
function rows(/** @type {Record<string, string>} */ pieces) {
  for (const [id, html] of Object.entries(pieces)) {
    const fresh = parsed(`<table><tbody>${html}</tbody></table>`).querySelector("tr");
    const old = document.getElementById(id);
    if (!fresh) continue;
    if (old) { if (old.className) fresh.className = old.className; become(old, fresh); }
    else if (belongs(fresh)) waiting.set(id, html);
  }
  const bar = $(".newbar");
  if (bar && waiting.size) {
    bar.hidden = false;
    bar.textContent = `${waiting.size} new · press . to show`;
    say(`${waiting.size} new runs`);
  }
}
function take() {
  if (!waiting.size) return;
  // So many are an alert storm: the server folds equal ones into one row.
  if (waiting.size > 20) return look();
  const into = $("#rows");
  const none = $(".none", into);
  if (none) none.remove();
  for (const [, html] of [...waiting].sort()) into.prepend($("tr", /** @type {any} */ (parsed(`<table><tbody>${html}</tbody></table>`))));
  waiting.clear();
  const bar = $(".newbar");
  if (bar) bar.hidden = true;
  mark();
}
/** @type {EventSource | null} */
let source = null;
let newest = body.dataset.seq, restful = 0;
const mute = () => { if (source) source.close(); source = null; isLive = false; showLive(); };
function listen() {
  if (!newest || source) return;
  const topics = ["head", body.dataset.live].filter(Boolean).join(",");
  const opened = source = new EventSource(`${base}/console/live?topics=${encodeURIComponent(topics)}&after=${newest}`);
  const on = (/** @type {string} */ kind, /** @type {(data: any) => void} */ act) => opened.addEventListener(kind, (event) => {
    const told = /** @type {MessageEvent} */ (event);
    newest = told.lastEventId || newest;
    heard();
    act(JSON.parse(told.data));
  });
  opened.onopen = heard;
  opened.onerror = () => {
    lost();
    // Browsers reconnect after a cut connection, but not after an answer such as a proxy's 502.
    if (opened.readyState === EventSource.CLOSED && source === opened) { mute(); later(again); }
  };
  on("head", (pieces) => { put("head", pieces.head); showLive(); });
  on("runs", rows);
  on("now", (pieces) => { if ($("#now")) put("now", pieces.now); else look(); });
  on("run", (pieces) => put("story", pieces.story));
  on("reload", () => look());
  on("here", () => {});
}
/** The server speaks every 15 s; a hung one, or a network that drops packets, closes no connection. */
setInterval(() => {
  if (source && isLive && Date.now() - heardAt > 45000) { lost(); mute(); later(again); }
}, 5000);
/** Check that the page may still be seen, and listen again after the last received event. */
async function again() {
  if (document.hidden) return;
  try { await look(true); } catch { /* the server does not answer yet */ }
  listen();
}
addEventListener("pagehide", mute);
addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
// Browsers open six connections per server, so hidden tabs release theirs.
document.addEventListener("visibilitychange", () => {
  clearTimeout(restful);
  if (document.hidden) restful = setTimeout(mute, 5000); else if (!source) again();
});

// -- rows and keys --------------------------------------------------------------------------------------------------
let chosen = "";
const shown = () => $$("main .list tbody tr[id], main .ask[id]").filter((row) => row.offsetParent !== null);
const row = () => chosen && document.getElementById(chosen);
function mark() {
  for (const each of $$(".at")) if (each.id !== chosen) each.classList.remove("at");
  const at = row();
  if (at) at.classList.add("at");
}
function move(/** @type {number} */ by) {
  const all = shown();
  const next = all[Math.min(all.length - 1, Math.max(0, all.findIndex((each) => each.id === chosen) + by))];
  if (!next) return;
  chosen = next.id;
  mark();
  next.scrollIntoView({ block: "nearest" });
  const link = $("a.open", next);
  if (link) link.focus({ preventScroll: true });
}
/** Return the ticked boxes, to be answered together. */
const picked = () => $$("main input[type=checkbox][name=run]:checked");
function pick(/** @type {boolean} */ all) {
  const boxes = $$("main input[type=checkbox][name=run]"), at = row(), own = at && $("input[name=run]", at);
  if (body.classList.contains("viewer") || !boxes.length) return;
  if (all) { const every = boxes.every((box) => box.checked); for (const box of boxes) box.checked = !every; }
  else if (own) own.checked = !own.checked;
  else return;
  say(`${picked().length} chosen`);
}
/** Return the form of an action: of the ticked rows, the chosen row, or else the only one on the page. */
function act(/** @type {string} */ key) {
  const together = $(`[data-many-act="${key}"]`);
  if (together && picked().length && !body.classList.contains("viewer")) return ask(together.form, together);
  const within = row() || (shown().length ? null : document);
  const button = (within && $(`[data-act="${key}"]`, within)) || ($$(`[data-act="${key}"]`).length === 1 && $(`[data-act="${key}"]`));
  if (button && !body.classList.contains("viewer")) ask(button.form);
}
function ask(/** @type {HTMLFormElement} */ form, /** @type {any} */ by = null) {
  const dialog = $("#ask"), inner = $("form", dialog), many = form.dataset.many && picked();
  if (many && !many.length) return say(`No ${form.dataset.many} are chosen`);
  inner.action = form.action;
  $("h2", dialog).textContent = many ? `${by.value === "approve" ? "Approve" : "Reject"} ${many.length === 1 ? "the question that is" : `the ${many.length} ${form.dataset.many} that are`} chosen?` : form.dataset.ask;
  $(".ask-what", dialog).textContent = many ? many.map((box) => box.dataset.named).join(", ") : form.dataset.what || "";
  for (const old of $$("[data-kept]", inner)) old.remove();
  const own = /** @type {HTMLInputElement | null} */ (form.elements.namedItem("note"));
  inner.elements.note.value = own ? own.value : "";
  const fields = [.../** @type {any} */ (form.elements)].filter((each) => each.nodeName !== "BUTTON" && (each.type !== "checkbox" || each.checked));
  for (const field of [...fields, ...(by && by.name ? [by] : [])]) {
    if (field.name === "note") continue;
    if (field.name === "next") inner.elements.next.value = field.value || here();
    else { const kept = document.createElement("input"); kept.type = "hidden"; kept.name = field.name; kept.value = field.value; kept.dataset.kept = ""; inner.append(kept); }
  }
  inner.elements.note.required = form.dataset.needsNote !== undefined;
  dialog.showModal();
  inner.elements.note.focus();
}
async function copy(/** @type {string} */ text, /** @type {string} */ what) {
  try { await navigator.clipboard.writeText(text); say(`${what} copied`); }
  catch { prompt("Copy it:", text); }
}
let goes = 0;
const KEYS = {
  "/": () => { const field = $(".filter-text"); if (field) { field.focus(); field.select(); return true; } },
  j: () => move(1), k: () => move(-1),
  s: () => pick(false), S: () => pick(true), a: () => act("a"), x: () => act("x"), u: () => act("u"), c: () => act("c"),
  ".": () => { if (waiting.size) take(); else look(); },
  "[": () => { const link = $("[data-before]"); if (link) link.click(); },
  "]": () => { const link = $("[data-after]"); if (link) link.click(); },
  y: () => copy(location.href, "The link is"),
  Y: () => { const button = $("[data-cli]") || $("[data-copy]"); if (button) copy(button.dataset.copy, "The command is"); },
  "?": () => $("#keys").showModal(),
};
addEventListener("keydown", (event) => {
  const target = /** @type {HTMLElement} */ (event.target);
  if ((event.ctrlKey || event.metaKey) && event.key === "k") { event.preventDefault(); palette(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || $("dialog[open]")) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(target.nodeName)) { if (event.key === "Escape") target.blur(); return; }
  if (goes > Date.now()) {
    goes = 0;
    const link = $(`nav a[data-key="${CSS.escape(event.key)}"]`);
    if (link) { event.preventDefault(); link.click(); }
    return;
  }
  if (event.key === "g") { goes = Date.now() + 1500; return; }
  const does = KEYS[/** @type {keyof typeof KEYS} */ (event.key)];
  if (does) { event.preventDefault(); does(); }
});

// -- palette --------------------------------------------------------------------------------------------------------
/** @type {{name: string, kind: string, href: string}[] | null} */
let places = null;
async function known() {
  const list = async (/** @type {string} */ path) => {
    try { const answer = await fetch(base + path, { headers: { Accept: "application/json" } }); return answer.ok ? (await answer.json()).items : []; }
    catch { return []; }
  };
  const [runs, jobs, nodes, books] = await Promise.all(["/history?limit=200", "/jobs", "/agents", "/playbooks"].map(list));
  const place = (/** @type {string} */ kind, /** @type {string} */ at) => (/** @type {any} */ each) => ({ kind, name: each.name, href: base + at + encodeURIComponent(each.name) });
  return [
    ...$$("nav a[data-key]").map((link) => ({ kind: "page", name: link.textContent, href: link.getAttribute("href") })),
    ...jobs.map(place("job", "/jobs/")), ...nodes.map(place("node", "/nodes/")), ...books.map(place("playbook", "/playbooks/")),
    ...runs.map((/** @type {any} */ run) => ({ kind: "run", name: `${run.playbook} ${run.target || ""} ${run.run_id}`, href: `${base}/runs/${run.run_id}` })),
  ];
}
async function palette() {
  const dialog = $("#palette"), field = $("input", dialog);
  if (!dialog || dialog.open) return;
  field.value = "";
  dialog.showModal();
  field.focus();
  places = places || await known();
  fill();
}
function fill() {
  const list = $("#palette ul"), words = $("#palette-text").value.toLowerCase().split(/\s+/);
  const fits = (places || []).filter((place) => words.every((/** @type {string} */ word) => `${place.kind} ${place.name}`.toLowerCase().includes(word)));
  list.replaceChildren(...fits.slice(0, 40).map((place, index) => {
    const line = document.createElement("li"), kind = document.createElement("span"), name = document.createElement("a");
    line.setAttribute("role", "option"); line.setAttribute("aria-selected", String(index === 0));
    kind.className = "dim"; kind.textContent = place.kind; name.textContent = place.name; name.href = place.href; name.tabIndex = -1;
    line.append(kind, name);
    line.onclick = () => { location.href = place.href; };
    return line;
  }));
}
const finder = $("#palette-text");
if (finder) {
  finder.addEventListener("input", fill);
  finder.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const all = $$("#palette li"), at = all.findIndex((each) => each.getAttribute("aria-selected") === "true");
    if (event.key === "Enter" && all[at]) { event.preventDefault(); all[at].click(); }
    const by = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (by && all[at + by]) {
      event.preventDefault();
      all[at].setAttribute("aria-selected", "false"); all[at + by].setAttribute("aria-selected", "true");
      all[at + by].scrollIntoView({ block: "nearest" });
    }
  });
}

// -- clicks and forms -------------------------------------------------------------------------------------------------
addEventListener("click", (event) => {
  const button = /** @type {HTMLElement} */ (event.target).closest("[data-do], [data-copy]");
  if (!(button instanceof HTMLElement)) return;
  if (button.dataset.copy) return copy(button.dataset.copy, "It is");
  switch (button.dataset.do) {
    case "palette": return palette();
    case "help": return $("#keys").showModal();
    case "close": return /** @type {any} */ (button.closest("dialog")).close();
    case "take": return take();
  }
});
addEventListener("submit", (event) => {
  const form = /** @type {HTMLFormElement} */ (event.target);
  if (form.dataset.ask !== undefined) { event.preventDefault(); ask(form, event.submitter); }
});
addEventListener("htmx:afterSwap", (event) => {
  waiting.clear(); ages(); mark();
  // Announce a form's result to screen readers. htmx keeps the focus by IDs.
  const into = document.getElementById(/** @type {any} */ (event).detail.target.id);
  const outcome = into && $("[role=alert], [role=status] h3, [role=status] p, [role=status] b", into);
  if (outcome) say(outcome.textContent);
});
ages();
listen();
