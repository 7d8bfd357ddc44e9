// The page of a job's log: follows new lines while the tab is visible. Search and paging work without this script.
// @ts-check
const table = /** @type {HTMLElement | null} */ (document.querySelector("#log"));
const button = /** @type {HTMLButtonElement | null} */ (document.querySelector("[data-do=follow-log]"));
const MOST_ROWS = 2000;

for (const name of ["since", "until"]) {
  const field = /** @type {HTMLInputElement | null} */ (document.querySelector(`.log-search [name=${name}]`));
  const last = /** @type {HTMLSelectElement | null} */ (document.querySelector(".log-search [name=last]"));
  if (field && last) field.addEventListener("input", () => { last.value = "own"; });
}

if (table && button) {
  const rows = /** @type {HTMLElement} */ (document.querySelector("#log-rows"));
  const state = /** @type {HTMLElement} */ (document.querySelector("#log-state"));
  const notes = /** @type {HTMLElement} */ (document.querySelector("#log-notes"));
  const isNewestFirst = table.dataset.order === "newest";
  let place = table.dataset.place || "", isWanted = false, restful = 0, count = 0;
  /** @type {EventSource | null} */
  let source = null;

  const parsed = (/** @type {string} */ html) => { const held = document.createElement("template"); held.innerHTML = html; return held.content; };
  const show = (/** @type {string} */ text) => {
    state.textContent = text;
    button.textContent = isWanted ? "Pause" : "Follow";
    button.setAttribute("aria-pressed", String(isWanted));
  };
  /** Keep the address up to date, so that it can be shared. */
  function note() {
    const address = new URL(location.href);
    if (isWanted) address.searchParams.set("live", "1"); else address.searchParams.delete("live");
    history.replaceState(history.state, "", address);
  }
  function trim() {
    let taken = 0;
    while (rows.children.length > MOST_ROWS) { /** @type {Element} */ (isNewestFirst ? rows.lastElementChild : rows.firstElementChild).remove(); taken += 1; }
    const more = document.querySelector("#log-more");
    if (taken && more) more.textContent = `This page has the last ${MOST_ROWS} lines. Search for older ones.`;
  }
  function add(/** @type {{html: string, notes: string, count: number}} */ told) {
    const isAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 80;
    const fresh = [...parsed(`<table><tbody>${told.html}</tbody></table>`).querySelectorAll("tr")];
    for (const row of fresh) { row.classList.add("fresh"); if (isNewestFirst) rows.prepend(row); else rows.append(row); }
    if (told.notes) notes.append(parsed(told.notes));
    while (notes.children.length > 20) /** @type {Element} */ (notes.firstElementChild).remove();
    trim();
    if (fresh.length && !isNewestFirst && isAtEnd) fresh[fresh.length - 1].scrollIntoView({ block: "end" });
    count += told.count;
    show(`following: ${count} new ${count === 1 ? "line" : "lines"}`);
  }
  const mute = () => { if (source) source.close(); source = null; };
  function stop(/** @type {string} */ why) { mute(); isWanted = false; note(); show(why); }
  function follow() {
    if (source || document.hidden) return;
    const opened = source = new EventSource(`${document.body.dataset.base || ""}/console/log?${table?.dataset.view}&after=${encodeURIComponent(place)}`);
    const on = (/** @type {string} */ kind, /** @type {(data: any) => void} */ act) => opened.addEventListener(kind, (event) => {
      const told = /** @type {MessageEvent} */ (event);
      place = told.lastEventId || place;
      act(JSON.parse(told.data));
    });
    opened.onopen = () => show(count ? `following: ${count} new lines` : "following");
    opened.onerror = () => {
      if (opened.readyState !== EventSource.CLOSED) return show("reconnecting");
      if (source === opened) stop("The server ended the stream. Press Follow again, or reload the page to sign in.");
    };
    on("lines", add);
    on("note", (told) => notes.append(parsed(told.html)));
    on("over", (told) => { if (source === opened) stop(told.why); });
  }
  button.addEventListener("click", () => {
    if (isWanted) return stop("paused");
    isWanted = true; note(); show("connecting"); follow();
  });
  addEventListener("pagehide", mute);
  document.addEventListener("visibilitychange", () => {
    clearTimeout(restful);
    if (document.hidden) restful = setTimeout(() => { mute(); if (isWanted) show("paused while the tab is hidden"); }, 5000);
    else if (isWanted) follow();
  });
  show("");
  if (table.dataset.follows !== undefined) button.click();
}
