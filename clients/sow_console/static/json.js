// Reads JSON without turning numbers into floats: each field keeps the text that was published. Pure.
// @ts-check

/** @typedef {{ kind: "number" | "text" | "other", text: string }} Cell */

const NUMBER = /-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/y;
const STRING = /"(?:[^"\\]|\\.)*"/y;
const SPACE = /[ \t\r\n]*/y;
const WORD = /true|false|null/y;
const DEPTH_MAX = 32;

class Malformed extends Error {}

class Reader {
  /** @param {string} text */
  constructor(text) {
    this.text = text;
    this.at = 0;
  }

  /** @param {RegExp} pattern @returns {string} */
  take(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (!found) throw new Malformed();
    this.at = pattern.lastIndex;
    return found[0];
  }

  /** @returns {string} the next character that is no space */
  peek() {
    this.take(SPACE);
    return this.text.charAt(this.at);
  }

  /** @param {string} character */
  expect(character) {
    if (this.peek() !== character) throw new Malformed();
    this.at += 1;
  }

  /** Skips a value. @param {number} depth */
  skip(depth) {
    if (depth > 200) throw new Malformed();
    const begins = this.peek();
    if (begins === '"') this.take(STRING);
    else if (begins === "{" || begins === "[") {
      const ends = begins === "{" ? "}" : "]";
      this.at += 1;
      for (let first = true; this.peek() !== ends; first = false) {
        if (!first) this.expect(",");
        if (begins === "{") {
          this.peek();
          this.take(STRING);
          this.expect(":");
        }
        this.skip(depth + 1);
      }
      this.at += 1;
    } else if (begins === "-" || (begins >= "0" && begins <= "9")) this.take(NUMBER);
    else this.take(WORD);
  }

  /** @param {string} path @param {number} depth @param {Map<string, Cell>} cells */
  fields(path, depth, cells) {
    this.expect("{");
    for (let first = true; this.peek() !== "}"; first = false) {
      if (!first) this.expect(",");
      this.peek();
      const name = /** @type {string} */ (JSON.parse(this.take(STRING)));
      this.expect(":");
      const inner = `${path}/${name.replaceAll("~", "~0").replaceAll("/", "~1")}`;
      const begins = this.peek();
      const start = this.at;
      if (begins === "{" && depth < DEPTH_MAX && !/^\{[ \t\r\n]*\}/.test(this.text.slice(start, start + 64))) {
        this.fields(inner, depth + 1, cells);
        continue;
      }
      this.skip(depth);
      const source = this.text.slice(start, this.at);
      if (begins === '"') cells.set(inner, { kind: "text", text: /** @type {string} */ (JSON.parse(source)) });
      else if (begins === "-" || (begins >= "0" && begins <= "9")) cells.set(inner, { kind: "number", text: source });
      else cells.set(inner, { kind: "other", text: source });
    }
    this.at += 1;
  }
}

/**
 * The fields of a JSON object by their paths; null: it is none.
 * @param {string} text @returns {Map<string, Cell> | null}
 */
export function fields(text) {
  const reader = new Reader(text);
  /** @type {Map<string, Cell>} */
  const cells = new Map();
  try {
    reader.fields("", 0, cells);
    if (reader.peek() !== "") return null;
    return cells;
  } catch (error) {
    if (error instanceof Malformed || error instanceof SyntaxError) return null;
    throw error;
  }
}

/**
 * Orders two cells: numbers by their value (exactly, where both are integers), before texts; missing ones last.
 * @param {Cell | undefined} a @param {Cell | undefined} b @returns {number}
 */
export function compare(a, b) {
  if (!a || !b) return a ? -1 : b ? 1 : 0;
  if (a.kind !== b.kind) return a.kind === "number" ? -1 : b.kind === "number" ? 1 : a.kind < b.kind ? 1 : -1;
  if (a.kind === "number") {
    if (/^-?\d+$/.test(a.text) && /^-?\d+$/.test(b.text)) {
      const left = BigInt(a.text), right = BigInt(b.text);
      return left < right ? -1 : left > right ? 1 : 0;
    }
    return Number(a.text) - Number(b.text);
  }
  return a.text < b.text ? -1 : a.text > b.text ? 1 : 0;
}
