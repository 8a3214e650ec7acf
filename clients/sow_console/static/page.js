// A page that the console makes anew: its new content is put into the old one node by node, so that focus, selection and
// opened details stay.
// @ts-check
import { follow } from "./live.js";

const KEPT = new Set(["open"]);

/** @param {Element} old @param {Element} fresh */
function attributes(old, fresh) {
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !KEPT.has(name)) old.removeAttribute(name);
}

/** @param {Node} old @param {Node} fresh */
export function morph(old, fresh) {
  const [before, after] = [[...old.childNodes], [...fresh.childNodes]];
  after.forEach((node, index) => {
    const there = before[index];
    if (!there) old.appendChild(node);
    else if (there.nodeName !== node.nodeName) old.replaceChild(node, there);
    else if (there instanceof Element && node instanceof Element) {
      if (there.matches("form.ask") || there.isEqualNode(node)) return;  // somebody may be typing there
      if (there.matches(".copy")) return;
      if (there.matches(".chart")) {  // its content is drawn by another module, which sees the attribute
        attributes(there, node);
        return;
      }
      attributes(there, node);
      morph(there, node);
    } else if (there.nodeValue !== node.nodeValue) there.nodeValue = node.nodeValue;
  });
  before.slice(after.length).forEach((node) => { old.removeChild(node); });
}

const live = /** @type {HTMLElement} */ (document.getElementById("live"));

follow((frame) => {
  if (typeof frame["html"] !== "string") return;
  const fresh = document.createElement("template");
  fresh.innerHTML = frame["html"];
  morph(live, fresh.content);
});
