// The grid of records: rows by key, sorted, with changed cells that flash, and lifetimes that count down.
// @ts-check
import { compare, fields } from "./json.js";
import { clock, follow } from "./live.js";
import { views } from "./views.js";

/** @typedef {import("./json.js").Cell} Cell */
/** @typedef {[string, string, number, number | null, string, string, string]} Wire */
/**
 * @typedef {{ key: string, payload: string, cells: Map<string, Cell>, published: number, expires: number | null, version: string,
 *   origin: string, sequence: string, element: HTMLTableRowElement | null, rank: number, stale: Set<string> }} Row
 */
/** @typedef {{ access: string, scanned: number }} Plan */

const META = ["@expire_time", "@publish_time", "@version", "@origin", "@sequence"];
const META_SHOWN = ["@expire_time", "@publish_time"];
const HEADINGS = /** @type {Record<string, string>} */ ({ "@key": "key", "@expire_time": "expires", "@publish_time": "published" });
const COLUMNS_SHOWN_MAX = 24;
const FLASH_MS = 900;
const SILENT = new Set(["@publish_time", "@version", "@sequence"]);
const OUT_OF_SIGHT_MS = 2_000;
const AROUND_ROWS = 10;
/** Fields that the grid knows, for its columns and the completion; a key's own page shows all of a record. */
const PATHS_MAX = 1_000;
/** Changes that are kept while the grid is held. Beyond them the page is asked for anew. */
const HELD_ROWS_MAX = 50_000;

const ask = /** @type {HTMLFormElement} */ (document.getElementById("ask"));
const filter = /** @type {HTMLInputElement} */ (document.getElementById("filter"));
const filterError = /** @type {HTMLElement} */ (document.getElementById("filter-error"));
const query = new URLSearchParams(location.search);
const topic = query.get("topic")?.trim() ?? "";
const rowsMax = Number(/** @type {HTMLInputElement} */ (ask.elements.namedItem("rows")).value);
const ordered = Boolean(query.get("order")?.trim());

/** @type {Map<string, Row>} */ let rows = new Map();
/** @type {Row[]} */ let shown = [];
/** @type {string[]} */ const paths = [];
/** @type {Set<string>} */ const known = new Set();
/** @type {{ column: string, falling: boolean } | null} */ let sort = null;
/** @type {Set<string> | null} */ let chosen = null;
let complete = false;
let missing = 0;
/** Why the order is only that of the answer; "": it is not. */
let unranked = "";
let read = 0, askedAt = 0;
/** All that matched; null: not counted. @type {number | null} */
let matched = null;
let held = false;
/** Server time minus the browser's, in microseconds. */
let ahead = 0;
let active = { row: 0, column: 0 };
let rank = 0;
const rates = /** @type {{ at: number, changes: number }[]} */ ([]);

/** @param {string} id @returns {HTMLElement} */
const byId = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/** @param {Wire} wire @returns {Row} */
function rowOf([key, payload, published, expires, version, origin, sequence]) {
  const cells = fields(payload) ?? new Map([["payload", /** @type {Cell} */ ({ kind: "text", text: payload })]]);
  return { key, payload, cells, published, expires, version, origin, sequence, element: null, rank: rank++, stale: new Set() };
}

function columns() {
  const all = ["@key", ...META, ...paths];
  const usual = ["@key", ...META_SHOWN, ...paths.slice(0, COLUMNS_SHOWN_MAX)];
  return all.filter((name) => (chosen ? name === "@key" || chosen.has(name) : usual.includes(name)));
}

/** @param {number} micros */
function lifetime(micros) {
  const seconds = micros / 1e6;
  if (seconds <= 0) return "due";
  if (seconds < 60) return `${seconds.toFixed(1)}s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes}m${String(Math.floor(seconds % 60)).padStart(2, "0")}s`;
  const hours = Math.floor(minutes / 60);
  return hours < 24 ? `${hours}h${String(minutes % 60).padStart(2, "0")}m` : `${Math.floor(hours / 24)}d${hours % 24}h`;
}

const serverNow = () => Date.now() * 1000 + ahead;

/** @param {Row} row @param {string} column @returns {Cell | undefined} */
function cell(row, column) {
  switch (column) {
    case "@key": return { kind: "text", text: row.key };
    case "@expire_time": return { kind: "number", text: row.expires === null ? "9223372036854775807" : String(row.expires) };
    case "@publish_time": return { kind: "number", text: String(row.published) };
    case "@version": return { kind: "number", text: row.version };
    case "@origin": return { kind: "text", text: row.origin };
    case "@sequence": return { kind: "number", text: row.sequence };
    default: return row.cells.get(column);
  }
}

/** @param {Row} row @param {string} column */
function text(row, column) {
  if (column === "@expire_time") return row.expires === null ? "never" : lifetime(row.expires - serverNow());
  if (column === "@publish_time") return clock(row.published);
  return cell(row, column)?.text ?? "";
}

/** @param {Row} row @param {string} column */
function title(row, column) {
  if (column === "@expire_time") return row.expires === null ? "never" : new Date(row.expires / 1000).toISOString();
  if (column === "@publish_time") return new Date(row.published / 1000).toISOString();
  return "";
}

function keyAddress(/** @type {string} */ key) {
  return `key?${new URLSearchParams({ topic, key })}`;
}

/** @param {Row} row @param {string} column @param {HTMLTableCellElement} element */
function fill(row, column, element) {
  const found = cell(row, column);
  element.className = found?.kind === "number" ? "n" : found?.kind === "other" ? "o" : "";
  const hint = title(row, column);
  if (hint) element.title = hint;
  if (column === "@key") {
    const link = document.createElement("a");
    link.href = keyAddress(row.key);
    link.textContent = row.key;
    link.tabIndex = -1;
    element.replaceChildren(link);
  } else element.textContent = text(row, column);
}

/** @param {Row} row @param {string[]} names */
function elementOf(row, names) {
  const element = document.createElement("tr");
  names.forEach((name) => {
    const made = document.createElement("td");
    made.setAttribute("role", "gridcell");
    made.tabIndex = -1;
    fill(row, name, made);
    element.append(made);
  });
  row.element = element;
  row.stale = new Set();
  return element;
}

// ---- rows in sight ----

/** The rows that a person sees, and some around them. */
function inSight() {
  const place = byId("scroll");
  const height = shown[0]?.element?.offsetHeight || 1;
  const first = Math.floor(place.scrollTop / height) - AROUND_ROWS;
  return shown.slice(Math.max(0, first), first + 2 * AROUND_ROWS + Math.ceil(place.clientHeight / height) + 1);
}

/** Fills the cells that have changed. @param {Row} row @param {string[]} names @param {Element[]} filled */
function refresh(row, names, filled) {
  if (!row.stale.size || !row.element) return;
  names.forEach((name, index) => {
    const element = /** @type {HTMLTableCellElement | undefined} */ (row.element?.children[index]);
    if (!element || !row.stale.has(name)) return;
    fill(row, name, element);
    if (!SILENT.has(name)) filled.push(element);
  });
  row.stale = new Set();
}

/** Fills the rows in sight, whose changed cells flash. Where thousands of rows change at a time, filling those out of sight
 * would cost the browser most of its time, so that is done in `tick`. */
function refreshInSight() {
  const names = columns();
  /** @type {Element[]} */ const filled = [];
  for (const row of inSight()) refresh(row, names, filled);
  const fresh = filled.filter((one) => !one.classList.contains("flash"));
  for (const one of fresh) one.classList.add("flash");
  if (fresh.length) setTimeout(() => { for (const one of fresh) one.classList.remove("flash"); }, FLASH_MS);
}

// ---- head and order ----

let headOf = "";
function head() {
  const names = columns();
  const numbers = names.map((name) => shown.some((row) => cell(row, name)?.kind === "number"));
  const wanted = JSON.stringify([names, sort, numbers]);
  if (wanted === headOf) return false;
  headOf = wanted;
  const line = document.createElement("tr");
  names.forEach((name, index) => {
    const column = document.createElement("th");
    column.scope = "col";
    column.className = numbers[index] ? "n" : "";
    column.setAttribute("aria-sort", sort?.column !== name ? "none" : sort.falling ? "descending" : "ascending");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = HEADINGS[name] ?? (name.startsWith("@") ? name.slice(1) : name);
    button.onclick = () => {
      sort = sort?.column !== name ? { column: name, falling: false } : sort.falling ? null : { column: name, falling: true };
      keep();
      draw(new Set());
      const again = [...document.querySelectorAll("#grid thead button")].find((one) => one.textContent === button.textContent);
      /** @type {HTMLElement | undefined} */ (again)?.focus();
    };
    column.append(button);
    line.append(column);
  });
  const body = /** @type {HTMLElement} */ (document.querySelector("#grid thead"));
  body.replaceChildren(line);
  choices();
  return true;
}

function choices() {
  const place = /** @type {HTMLElement} */ (document.querySelector("#columns .choices"));
  if (place.contains(document.activeElement) && place.childElementCount === META.length + paths.length) return;
  const now = new Set(columns());
  place.replaceChildren(...[...META, ...paths].map((name) => {
    const label = document.createElement("label");
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = now.has(name);
    box.onchange = () => {
      const picked = new Set(columns());
      if (box.checked) picked.add(name);
      else picked.delete(name);
      chosen = picked;
      localStorage.setItem(`sow-columns-${topic}`, JSON.stringify([...picked]));
      keep();
      draw(new Set());
    };
    label.append(box, HEADINGS[name] ?? name);
    return label;
  }));
}

/** Whether the row with the focus has just left. */
let orphaned = false;

/** Draws what differs. @param {Set<string>} changed keys of rows that are new or changed */
function draw(changed) {
  shown = [...rows.values()];
  const fresh = head();
  const names = columns();
  const by = sort;
  if (by) {
    shown.sort((a, b) => {
      const order = compare(cell(a, by.column), cell(b, by.column)) || a.rank - b.rank;
      return by.falling && cell(a, by.column) && cell(b, by.column) ? -order : order;
    });
  } else if (!ordered) shown.sort((a, b) => (a.key < b.key ? -1 : a.key > b.key ? 1 : 0));
  const body = /** @type {HTMLTableSectionElement} */ (document.querySelector("#grid tbody"));
  const line = document.activeElement?.closest("#grid tbody tr");
  const focused = line && shown.find((row) => row.element === line);
  const inGrid = Boolean(line) || orphaned;  // a row that is moved, made anew or removed loses the focus
  orphaned = false;
  shown.forEach((row, index) => {
    const element = row.element && !fresh ? row.element : elementOf(row, names);
    const there = body.children[index];
    if (there !== element) body.insertBefore(element, there ?? null);
  });
  while (body.children.length > shown.length) body.lastElementChild?.remove();
  for (const key of changed) rows.get(key)?.element?.classList.add("seen");
  if (focused) active.row = shown.indexOf(focused);
  byId("nothing").hidden = shown.length > 0;
  byId("grid").setAttribute("aria-rowcount", String(shown.length));
  activate(inGrid && !body.contains(document.activeElement));
  say();
}

function say() {
  const whole = complete ? `${shown.length.toLocaleString("en")} records, all that match` :
    matched === null ? `the first ${shown.length.toLocaleString("en")}, more match` :
    `${shown.length.toLocaleString("en")} of ${matched.toLocaleString("en")} that matched`;
  const left = missing ? ` · ${missing === 1 ? "1 has left" : `${missing} have left`} since; ` : "";
  const place = byId("read");
  place.textContent = `${whole} · ${read.toLocaleString("en")} read at ${clock(askedAt)}${left}`;
  if (!complete && matched === null) {
    const link = document.createElement("a");
    const counted = new URLSearchParams(location.search);
    counted.set("count", "1");
    link.href = `?${counted}`;
    link.textContent = "count them";
    place.append(" · ", link);
  }
  if (ordered && unranked) place.append(` · in the order of ${clock(askedAt)}: ${unranked}`);
  if (missing) {
    const again = document.createElement("a");
    again.href = location.href;
    again.textContent = "ask again";
    place.append(again);
  }
}

// ---- frames ----

/** @param {Row} row @param {string[]} names @param {boolean} isRanked it has its place in the list of the server */
function take(row, names, isRanked) {
  const old = rows.get(row.key);
  if (!old) {
    if (rows.size >= rowsMax && !isRanked) {  // it may stand behind the last row: only the server knows
      if (complete) {
        complete = false;
        matched = null;
        say();
      }
      return false;
    }
    rows.set(row.key, row);
    learn(row);
    return true;
  }
  row.element = old.element;
  row.rank = old.rank;
  row.stale = old.stale;
  rows.set(row.key, row);
  learn(row);
  for (const name of names) {
    const [before, after] = [cell(old, name), cell(row, name)];
    if (before?.text !== after?.text || before?.kind !== after?.kind) row.stale.add(name);
  }
  return true;
}

/** @param {Row} row */
function learn(row) {
  for (const path of row.cells.keys()) {
    if (paths.length >= PATHS_MAX) return;
    if (known.has(path)) continue;
    known.add(path);
    paths.push(path);
  }
}

/** A filter or an order with a mistyped name is no error. @param {string[]} paths */
function tellAbsent(paths) {
  const place = byId("absent");
  place.hidden = paths.length === 0;
  place.textContent = paths.map((path) => `no record that was read has a value in ${path}: is the name right?`).join("\n");
}

/** @param {Plan | null | undefined} plan @param {unknown} way */
function explain(plan, way) {
  if (plan === undefined) return;
  const place = byId("plan");
  place.textContent = plan === null ? "" : `plan: ${way}`;  // an older server tells none
  place.classList.toggle("warn", plan?.access === "scan" && plan.scanned > 10_000 && rows.size * 10 < plan.scanned);
}

/** @param {import("./live.js").Frame} frame */
function wrong(frame) {
  const isAbout = frame.error?.field === "filter" || frame.error?.field.startsWith("parameters");
  const found = isAbout ? frame.error : null;
  filterError.hidden = !found;
  filter.setAttribute("aria-invalid", String(Boolean(found)));
  byId("scroll").hidden = Boolean(found);
  if (found) {
    filterError.textContent = found.message;
    if (found.position !== null && document.activeElement !== filter) {
      filter.focus();
      filter.setSelectionRange(found.position, filter.value.length);
    }
    byId("read").textContent = "";
  }
  return Boolean(found);
}

/** @type {import("./live.js").Frame[]} */ let waiting = [];
/** More has come while the grid was held than is kept. */
let overheld = false;

/** @param {import("./live.js").Frame} frame */
const rowsOf = (frame) => /** @type {unknown[]} */ (frame["rows"] ?? []).length + /** @type {unknown[]} */ (frame["gone"] ?? []).length;

/** @param {import("./live.js").Frame} frame */
function apply(frame) {
  const come = /** @type {Wire[]} */ (frame["rows"] ?? []);
  const changed = new Set();
  const told = String(frame["unranked"] ?? "");
  if (told !== unranked) {
    unranked = told;
    if (!frame["reset"]) say();
  }
  if (frame["reset"]) {
    rows = new Map();
    rank = 0;
    missing = 0;
    read = Number(frame["read"]);
    matched = /** @type {number | null} */ (frame["matched"]);
    askedAt = Number(frame["asked_at"]);
    ahead = Number(frame["clock"]) - Number(frame["heard"]);
    complete = !frame["more"];
    tellAbsent(/** @type {string[]} */ (frame["absent"] ?? []));
    for (const wire of come) {
      const row = rowOf(wire);
      rows.set(row.key, row);
      learn(row);
    }
    explain(/** @type {Plan | null} */ (frame["plan"]), frame["way"]);
    draw(changed);
    return;
  }
  const names = columns();
  const order = /** @type {string[] | undefined} */ (frame["order"]);
  for (const wire of come) if (take(rowOf(wire), names, Boolean(order))) changed.add(wire[0]);
  const kept = new Set(order);
  const gone = order ? [...rows.keys()].filter((key) => !kept.has(key)) :
    /** @type {[string, string][]} */ (frame["gone"] ?? []).map(([key]) => key);
  for (const key of gone) {
    const row = rows.get(key);
    if (!row) continue;
    if (row.element?.contains(document.activeElement)) {
      orphaned = true;
      active.row = shown.indexOf(row);
    }
    row.element?.remove();
    rows.delete(key);
    changed.add(key);
    if (!complete && !order) missing += 1;
  }
  if (order) rank_(order, !frame["more"]);
  if (changed.size || order) draw(changed);
  refreshInSight();
}

/** The rows in the order of the server's list. @param {string[]} order @param {boolean} isComplete */
function rank_(order, isComplete) {
  if (complete && !isComplete) matched = null;
  complete = isComplete;
  rows = new Map(order.flatMap((key) => {
    const row = rows.get(key);
    return row ? [[key, row]] : [];
  }));
  rank = 0;
  for (const row of rows.values()) row.rank = rank++;
}

// ---- columns and order in the address ----

/** The address keeps the chosen columns and the order of the rows that are shown, so it can be sent to others. */
function keep() {
  history.replaceState(null, "", `?${address()}`);
  save();
}

function address() {
  const address = new URLSearchParams(location.search);
  address.delete("sort");
  address.delete("column");
  if (sort) address.set("sort", `${sort.falling ? "-" : ""}${sort.column}`);
  for (const name of chosen ?? []) if (name !== "@key") address.append("column", name);
  return address;
}

/** The files have the chosen columns; without a choice, all. */
function save() {
  for (const link of /** @type {NodeListOf<HTMLAnchorElement>} */ (document.querySelectorAll("a.save"))) {
    const [path = "", search] = (link.getAttribute("href") ?? "").split("?");
    const address = new URLSearchParams(search);
    address.delete("column");
    if (chosen) for (const name of new Set(["@key", ...chosen])) address.append("column", name);
    link.setAttribute("href", `${path}?${address}`);
  }
}

ask.addEventListener("submit", () => {
  const names = new URLSearchParams(location.search);
  if (/** @type {HTMLInputElement} */ (ask.elements.namedItem("topic")).value.trim() !== topic) return;
  for (const name of ["sort", "column"]) {
    for (const value of names.getAll(name)) {
      const kept = document.createElement("input");
      kept.type = "hidden";
      kept.name = name;
      kept.value = value;
      ask.append(kept);
    }
  }
});

views(topic ? address : null);
if (topic) {
  const kept = localStorage.getItem(`sow-columns-${topic}`);
  if (query.has("column")) chosen = new Set(query.getAll("column"));
  else if (kept) chosen = new Set(/** @type {string[]} */ (JSON.parse(kept)));
  const by = query.get("sort");
  if (by) sort = { column: by.replace(/^-/, ""), falling: by.startsWith("-") };
  save();
  follow((frame) => {
    const now = performance.now();
    rates.push({ at: now, changes: Number(frame["changes"] ?? 0) });
    while (rates[0] && rates[0].at < now - 5_000) rates.shift();
    const sum = rates.reduce((total, one) => total + one.changes, 0);
    byId("changes").textContent = `${(sum / 5).toLocaleString("en", { maximumFractionDigits: 1 })} changes/s${held ? ", held" : ""}`;
    if (held && !frame["reset"]) {
      if (frame["rows"]) waiting.push(frame);
      if (waiting.length > 500) waiting = [merged(waiting)];
      if (waiting.reduce((sum, one) => sum + rowsOf(one), 0) > HELD_ROWS_MAX) {
        waiting = [merged(waiting)];
        if (waiting.reduce((sum, one) => sum + rowsOf(one), 0) > HELD_ROWS_MAX) overheld = true;
      }
      if (overheld) waiting = [];
    } else {
      if (frame["reset"]) waiting = [];
      apply(frame);
    }
    return wrong(frame);
  });
  setInterval(tick, 100);
  byId("scroll").addEventListener("scroll", refreshInSight);
}

/** @param {import("./live.js").Frame[]} frames */
function merged(frames) {
  const newest = new Map();
  for (const frame of frames) {
    for (const wire of /** @type {Wire[]} */ (frame["rows"] ?? [])) newest.set(wire[0], wire);
    for (const one of /** @type {[string, string][]} */ (frame["gone"] ?? [])) newest.set(one[0], one);
  }
  const all = [...newest.values()];
  const order = frames.findLast((frame) => frame["order"]);
  return /** @type {import("./live.js").Frame} */ ({ ...frames.at(-1), order: order?.["order"], more: order?.["more"], rows: all.filter((one) => one.length > 2), gone: all.filter((one) => one.length === 2) });
}

let wholeAt = 0;
/** Counts lifetimes down; a record whose lifetime is over is marked at once, before the server tells of it. Rows out of sight
 * are brought up to date every OUT_OF_SIGHT_MS. */
function tick() {
  const names = columns();
  const index = names.indexOf("@expire_time");
  if (document.hidden || document.body.classList.contains("old")) return;
  const now = serverNow();
  const isWhole = performance.now() - wholeAt > OUT_OF_SIGHT_MS;
  if (isWhole) wholeAt = performance.now();
  for (const row of isWhole ? shown : inSight()) {
    refresh(row, names, []);
    if (row.expires === null || !row.element) continue;
    const element = index < 0 ? undefined : row.element.children[index];
    const left = row.expires - now;
    if (element) {
      const text = lifetime(left);
      if (element.textContent !== text) element.textContent = text;
      element.classList.toggle("soon", left < 10e6);
    }
    row.element.classList.toggle("over", left <= 0);
  }
}

// ---- keyboard and hold ----

/** @param {boolean} focus */
function activate(focus) {
  const body = /** @type {HTMLElement} */ (document.querySelector("#grid tbody"));
  active.row = Math.max(0, Math.min(active.row, shown.length - 1));
  active.column = Math.max(0, Math.min(active.column, columns().length - 1));
  const wanted = /** @type {HTMLElement | undefined} */ (body.children[active.row]?.children[active.column]);
  const inside = body.contains(document.activeElement);
  for (const one of body.querySelectorAll('[tabindex="0"]')) if (one !== wanted) one.setAttribute("tabindex", "-1");
  if (!wanted) return;
  if (focus || !inside) wanted.tabIndex = 0;
  if (focus) {
    wanted.focus();
    wanted.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

document.getElementById("grid")?.addEventListener("keydown", (event) => {
  const target = /** @type {HTMLElement} */ (event.target);
  const inBody = target.closest("tbody td");
  if (!inBody) return;
  const line = /** @type {HTMLTableRowElement} */ (inBody.parentElement);
  active = { row: [...(line.parentElement?.children ?? [])].indexOf(line), column: [...line.children].indexOf(inBody) };
  const page = 20;
  switch (event.key) {
    case "ArrowDown": active.row += 1; break;
    case "ArrowUp": active.row -= 1; break;
    case "ArrowRight": active.column += 1; break;
    case "ArrowLeft": active.column -= 1; break;
    case "PageDown": active.row += page; break;
    case "PageUp": active.row -= page; break;
    case "Home": if (event.ctrlKey) active.row = 0; active.column = 0; break;
    case "End": if (event.ctrlKey) active.row = shown.length; active.column = columns().length; break;
    case "Enter": {
      const row = shown[active.row];
      if (row) location.href = keyAddress(row.key);
      break;
    }
    default: return;
  }
  event.preventDefault();
  activate(true);
});

const pause = document.getElementById("pause");
pause?.addEventListener("click", () => {
  held = !held;
  pause.setAttribute("aria-pressed", String(held));
  if (held) return;
  if (overheld) location.reload();
  const frames = waiting;
  waiting = [];
  frames.forEach(apply);
});
addEventListener("keydown", (event) => {
  if (event.key === "p" && !document.querySelector("dialog[open]") && !(/** @type {HTMLElement} */ (event.target)).matches("input, select")) pause?.click();
});

// ---- completion of the filter ----

const list = byId("paths");
let picked = -1;
const WORDS = ["@key", "@expire_time", "@publish_time", "@version"];

function word() {
  const before = filter.value.slice(0, filter.selectionStart ?? 0);
  return /[/@][^\s()'"<>=!,]*$/.exec(before)?.[0] ?? "";
}

function offer() {
  const begun = word();
  const found = begun ? [...paths, ...WORDS].filter((path) => path.startsWith(begun) && path !== begun).slice(0, 8) : [];
  picked = -1;
  filter.removeAttribute("aria-activedescendant");
  filter.setAttribute("aria-expanded", String(found.length > 0));
  list.hidden = !found.length;
  list.replaceChildren(...found.map((path, index) => {
    const option = document.createElement("li");
    option.role = "option";
    option.id = `path-${index}`;
    option.textContent = path;
    option.setAttribute("aria-selected", "false");
    option.onmousedown = (event) => { event.preventDefault(); complete_(path); };
    return option;
  }));
}

/** @param {string} path */
function complete_(path) {
  const at = filter.selectionStart ?? 0;
  const begin = at - word().length;
  filter.setRangeText(path, begin, at, "end");
  offer();
}

filter.addEventListener("input", offer);
filter.addEventListener("blur", () => { list.hidden = true; filter.setAttribute("aria-expanded", "false"); });
filter.addEventListener("keydown", (event) => {
  const options = /** @type {HTMLElement[]} */ ([...list.children]);
  if (list.hidden || !options.length) return;
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    picked = (picked + (event.key === "ArrowDown" ? 1 : -1) + options.length) % options.length;
    options.forEach((one, index) => one.setAttribute("aria-selected", String(index === picked)));
    filter.setAttribute("aria-activedescendant", options[picked]?.id ?? "");
    event.preventDefault();
  } else if (event.key === "Escape") {
    list.hidden = true;
    filter.setAttribute("aria-expanded", "false");
  } else if ((event.key === "Enter" || event.key === "Tab") && picked >= 0) {
    complete_(options[picked]?.textContent ?? "");
    event.preventDefault();
  }
});
