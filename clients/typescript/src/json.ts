/**
 * JSON without loss: what was published is what is read (rules K2, K4).
 *
 *   [1]  An integer beyond 2^53 is read as a bigint with all its digits, and a bigint is written as an integer.
 *   [2]  NaN, infinities, functions and the like are refused with the path of the field. They never become null: a null
 *        in a delta leaves the old value, so the new one would be lost silently.
 */

import { halfSurrogate, shown } from "./arguments.js";
import { invalid } from "./errors.js";

/** A value of JSON as this module reads it. */
export type JsonValue = string | number | bigint | boolean | null | JsonValue[] | { [name: string]: JsonValue };

/** The levels that the server accepts (rule K2). */
export const DEPTH_MAX = 256;

/** The text of a value. Throws InvalidArgument (PAYLOAD_MALFORMED) with the path of a field that has no form in JSON. */
export function stringify(value: unknown): string {
  const text = written(value, "", 0);
  if (text === undefined) {
    throw refused("", `a ${typeof value}`);
  }
  return text;
}

/** The value of a text. Throws SyntaxError. */
export function parse(text: string): JsonValue {
  const value = JSON.parse(text) as JsonValue;
  // Only long numbers can lose digits. Texts with as many digits take the long way, too.
  return /[0-9]{16}/.test(text) ? new Reader(text).value() : value;
}

function written(value: unknown, path: string, depth: number): string | undefined {
  switch (typeof value) {
    case "string":
      return JSON.stringify(wellFormedIn(value, path));
    case "number":
      if (!Number.isFinite(value)) {
        throw refused(path, "NaN or infinite");
      }
      return Object.is(value, -0) ? "-0.0" : JSON.stringify(value);
    case "bigint":
      return value.toString();
    case "boolean":
      return String(value);
    case "undefined":
      return undefined; // a field that is not there
    case "object":
      return value === null ? "null" : ofObject(value, path, depth);
    default:
      throw refused(path, `a ${typeof value}`);
  }
}

function ofObject(value: object, path: string, depth: number): string | undefined {
  if (depth === DEPTH_MAX) {
    throw refused(path, `deeper than ${DEPTH_MAX} levels, or part of itself`);
  }
  if (value instanceof Uint8Array) {
    return JSON.stringify(Buffer.from(value.buffer, value.byteOffset, value.byteLength).toString("base64"));
  }
  if (value instanceof Date && Number.isNaN(value.getTime())) {
    throw refused(path, "no date"); // JSON.stringify would write null
  }
  if ("toJSON" in value && typeof value.toJSON === "function") {
    return written(value.toJSON(), path, depth + 1);
  }
  if (Array.isArray(value)) {
    const items: string[] = [];
    for (let index = 0; index < value.length; index++) {
      const item = written(value[index], `${path}[${index}]`, depth + 1);
      if (item === undefined) {
        throw refused(`${path}[${index}]`, "undefined");
      }
      items.push(item);
    }
    return `[${items.join(",")}]`;
  }
  if (value instanceof Map || value instanceof Set || value instanceof RegExp) {
    throw refused(path, `a ${value.constructor.name}`); // JSON.stringify would write {}
  }
  const fields: string[] = [];
  for (const [name, member] of Object.entries(value)) {
    const text = written(member, `${path}/${name}`, depth + 1);
    if (text !== undefined) {
      fields.push(`${JSON.stringify(wellFormedIn(name, path))}:${text}`);
    }
  }
  return `{${fields.join(",")}}`;
}

function refused(path: string, found: string): Error {
  return unfit(path, `is ${found}, which JSON cannot express`);
}

/** The error of a value in a document that the topic's message type cannot express. */
export function unfit(path: string, fault: string): Error {
  return invalid("data", `${path || "/"} ${fault}`, "PAYLOAD_MALFORMED");
}

/** A text of a document. Throws InvalidArgument (PAYLOAD_MALFORMED) for one without a form in UTF-8. */
export function wellFormedIn(text: string, path: string): string {
  if (!text.isWellFormed()) {
    throw unfit(path, `is ${shown(text)}, which ${halfSurrogate(text)}`);
  }
  return text;
}

/** Reads a text that is known to be JSON. */
class Reader {
  readonly #tokens: Iterator<RegExpMatchArray>;

  constructor(text: string) {
    this.#tokens = text.matchAll(/"[^"\\]*(?:\\.[^"\\]*)*"|[-+0-9.eE]+|true|false|null|[[\]{}:,]/g);
  }

  value(): JsonValue {
    return this.#from(this.#next());
  }

  #from(token: string): JsonValue {
    switch (token[0]) {
      case "{":
        return this.#object();
      case "[":
        return this.#array();
      case '"':
        return JSON.parse(token) as string;
      case "t":
        return true;
      case "f":
        return false;
      case "n":
        return null;
      default:
        return number(token);
    }
  }

  #object(): JsonValue {
    const result: { [name: string]: JsonValue } = {};
    let token = this.#next();
    while (token !== "}") {
      const name = JSON.parse(token === "," ? this.#next() : token) as string;
      this.#next(); // the colon
      // As JSON.parse does: `__proto__` is a field like others.
      Object.defineProperty(result, name, {
        value: this.value(),
        configurable: true,
        enumerable: true,
        writable: true,
      });
      token = this.#next();
    }
    return result;
  }

  #array(): JsonValue {
    const result: JsonValue[] = [];
    let token = this.#next();
    while (token !== "]") {
      result.push(this.#from(token === "," ? this.#next() : token));
      token = this.#next();
    }
    return result;
  }

  #next(): string {
    return (this.#tokens.next().value as RegExpMatchArray)[0];
  }
}

function number(token: string): number | bigint {
  const value = Number(token);
  return Number.isSafeInteger(value) || !/^-?[0-9]+$/.test(token) ? value : BigInt(token);
}
