// The socket of a page, and the line that says as of when the page is, or since when it is disconnected.
// @ts-check

/** @typedef {{ message: string, reason: string, field: string, position: number | null }} Problem */
/**
 * @typedef {{ frame: number, as_of: number | null, away_since: number | null, error: Problem | null, [name: string]: unknown }} Frame
 */

const SILENT_MS = 10_000;
const RETRY_MS = 1_000;
const RETRY_MS_MAX = 10_000;
const ENDED = 4401;

const state = /** @type {HTMLElement} */ (document.getElementById("state"));
const problem = /** @type {HTMLElement} */ (document.getElementById("problem"));
const words = /** @type {HTMLElement} */ (state.querySelector("span"));

/** @type {number | null} */ let asOf = Number(state.dataset["asOf"]) || null;
/** @type {number | null} */ let awaySince = null;
/** @type {number | null} */ let unheardSince = null;
let stopped = "";
/** The server has refused to go on, so the page is as old as it says. */
let refused = false;
let heardAt = performance.now();

const TIME = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const DAY = new Intl.DateTimeFormat("sv");

/** @param {number} micros */
export function clock(micros) {
  const moment = new Date(micros / 1000), time = TIME.format(moment);
  return moment.toDateString() === new Date().toDateString() ? time : `${DAY.format(moment)} ${time}`;
}

function show() {
  const now = performance.now();
  if (unheardSince === null && !document.hidden && now - heardAt > SILENT_MS) unheardSince = Date.now() * 1000;
  const since = unheardSince ?? awaySince;
  const age = asOf === null ? "nothing yet" : `as of ${clock(asOf)}`;
  const name = stopped || refused ? "stopped" : since !== null ? "away" : "live";
  const text = stopped ? `${age} · ${stopped}` : since !== null ? `${age} · disconnected since ${clock(since)}` :
    refused ? `${age} · not live` : age;
  if (state.dataset["state"] !== name) {
    state.dataset["state"] = name;
    state.setAttribute("aria-live", name === "live" ? "off" : "polite");  // nobody wants to hear each second
  }
  if (words.textContent !== text) words.textContent = text;
  document.body.classList.toggle("old", name !== "live");
}

/** @param {Problem | null} found @param {boolean} isAway */
function tell(found, isAway) {
  const text = found ? `${isAway ? "The server does not answer" : found.reason}: ${found.message}` : "";
  problem.hidden = !text;
  if (problem.textContent !== text) problem.textContent = text;
}

/**
 * Draws frames as they come, for as long as the page is open. `draw` draws one; it returns whether it has told about
 * `error` itself.
 * @param {(frame: Frame) => boolean | void} draw
 */
export function follow(draw) {
  let wait = RETRY_MS;
  const open = () => {
    const address = `${location.protocol === "https:" ? "wss:" : "ws:"}//${location.host}${location.pathname}/live${location.search}`;
    const socket = new WebSocket(address);
    socket.binaryType = "arraybuffer";
    const decoder = new TextDecoder();
    socket.onmessage = (message) => {
      const frame = /** @type {Frame} */ (JSON.parse(decoder.decode(/** @type {ArrayBuffer} */ (message.data))));
      heardAt = performance.now();
      frame["heard"] = Date.now() * 1000;  // a tab in the background draws it much later
      wait = RETRY_MS;
      unheardSince = null;
      // A hidden page draws nothing, so no frame is asked for, and none waits: the next one is new.
      requestAnimationFrame(() => {
        asOf = frame.as_of ?? asOf;
        awaySince = frame.away_since;
        const told = draw(frame);
        refused = !told && frame.error !== null && awaySince === null;
        tell(told ? null : frame.error, awaySince !== null);
        show();
        heardAt = performance.now();
        if (socket.readyState === WebSocket.OPEN) socket.send(String(frame.frame));
      });
    };
    socket.onclose = (closing) => {
      if (closing.code === ENDED) {
        stopped = "logged out";
        problem.hidden = false;
        problem.textContent = "Your session has ended. ";
        const link = document.createElement("a");
        link.href = `/login?next=${encodeURIComponent(location.pathname + location.search)}`;
        link.textContent = "Log in again.";
        problem.append(link);
        show();
        return;
      }
      unheardSince ??= Date.now() * 1000;
      show();
      setTimeout(open, wait);
      wait = Math.min(wait * 2, RETRY_MS_MAX);
    };
  };
  open();
  setInterval(show, 1_000);
  show();
}

addEventListener("visibilitychange", () => { heardAt = performance.now(); });

// ---- keys and buttons of every page ----

const help = /** @type {HTMLDialogElement} */ (document.getElementById("help"));
document.getElementById("keys")?.addEventListener("click", () => help.showModal());
help.querySelector(".close")?.addEventListener("click", () => help.close());

addEventListener("keydown", (event) => {
  const target = /** @type {HTMLElement} */ (event.target);
  if (event.ctrlKey || event.metaKey || event.altKey || target.matches("input, select, textarea")) return;
  if (event.key === "?") help.showModal();
  if (help.open) return;
  if (event.key === "t") document.getElementById("theme")?.click();
  if (event.key === "/") {
    const field = /** @type {HTMLInputElement | null} */ (document.querySelector("main form.ask input"));
    if (field) {
      event.preventDefault();
      field.focus();
      field.select();
    }
  }
  const link = /** @type {HTMLAnchorElement | null} */ (document.querySelector(`.menu [data-key="${CSS.escape(event.key)}"]`));
  link?.click();
});

addEventListener("click", async (event) => {
  const button = /** @type {HTMLElement} */ (event.target);
  if (!(button instanceof HTMLElement) || !button.matches(".copy")) return;
  await navigator.clipboard.writeText(button.dataset["copy"] ?? "");
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy"; }, 1_500);
});
