// Views that a person saves by name, in this browser: a question as the address has it, and nothing of an answer.
// @ts-check

const PLACE = "sow-views";
/** The parts of an address that are a view. */
const KEPT = ["topic", "filter", "parameters", "order", "rows", "sort", "column"];
const VIEWS_MAX = 100;

/** @returns {Map<string, string>} addresses by name; anything else that was put there is passed over */
function saved() {
  try {
    const found = /** @type {unknown} */ (JSON.parse(localStorage.getItem(PLACE) ?? "[]"));
    const pairs = Array.isArray(found) ? found.filter((one) => Array.isArray(one) && one.length === 2 && one.every((part) => typeof part === "string")) : [];
    return new Map(pairs);
  } catch {
    return new Map();
  }
}

/** @param {string} search */
function view(search) {
  return new URLSearchParams([...new URLSearchParams(search)].filter(([name, value]) => KEPT.includes(name) && value.trim()));
}

/** Shows the views, and saves the one of the page. @param {(() => URLSearchParams) | null} address that of the page; null: it asks nothing yet */
export function views(address) {
  const place = /** @type {HTMLElement} */ (document.getElementById("views"));
  const list = /** @type {HTMLElement} */ (place.querySelector("ul"));
  const told = /** @type {HTMLElement} */ (place.querySelector("output"));
  const form = /** @type {HTMLFormElement} */ (place.querySelector("form"));
  form.hidden = !address;

  /** @param {Map<string, string>} kept @param {string} words */
  function keep(kept, words) {
    try {
      localStorage.setItem(PLACE, JSON.stringify([...kept]));
      told.textContent = words;
    } catch {
      told.textContent = "not saved: this browser keeps no more for the console";
    }
    show();
  }

  function show() {
    const kept = [...saved()].sort(([one], [other]) => one.localeCompare(other));
    if (!kept.length && !told.textContent) told.textContent = "No view is saved in this browser.";
    list.replaceChildren(...kept.map(([name, search]) => {
      const line = document.createElement("li"), link = document.createElement("a"), button = document.createElement("button");
      const asked = view(search);
      link.href = `records?${asked}`;
      link.title = [asked.get("topic"), asked.get("filter")].filter(Boolean).join(": ");
      link.textContent = name;
      button.type = "button";
      button.className = "quiet";
      button.textContent = "delete";
      button.setAttribute("aria-label", `delete ${name}`);
      button.onclick = () => {
        const left = saved();
        left.delete(name);
        keep(left, `deleted: ${name}`);
        place.querySelector("summary")?.focus();
      };
      line.append(link, button);
      return line;
    }));
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const field = /** @type {HTMLInputElement} */ (form.elements.namedItem("name")), name = field.value.trim(), kept = saved();
    if (!name || !address) return;
    if (!kept.has(name) && kept.size >= VIEWS_MAX) {
      told.textContent = `not saved: there are ${VIEWS_MAX} already; delete one first`;
      return;
    }
    kept.set(name, String(view(String(address()))));
    field.value = "";
    keep(kept, `saved: ${name}`);
  });
  addEventListener("storage", show);  // of another tab
  show();
}
