/** Documents and keys: what the program gives into bytes and texts. */

import { invalid } from "./errors.js";
import { isWellFormed, stringify } from "./json.js";

/**
 * A document to publish: an object is encoded as JSON, a text as UTF-8, and bytes are sent as they are.
 *
 * In an object a bigint is an integer of any length, a Uint8Array is base64, and a field that is undefined is left out.
 */
export type Document = object | string | Uint8Array;

/** The value of one key field. */
export type KeyField = string | number | bigint | boolean;

/**
 * The key of a record. A text is the record key as it stands. A number, bigint or boolean is the value of the only key
 * field. An array has the values of all key fields, and of a text that contains `|` or `\` (rule K4).
 */
export type Key = KeyField | readonly KeyField[];

/** The bytes of a document. */
export function encode(document: Document): Uint8Array {
  if (document instanceof Uint8Array) {
    return document;
  }
  if (typeof document === "string") {
    if (!isWellFormed(document)) {
      throw invalid("data", "is not well-formed Unicode", "PAYLOAD_MALFORMED");
    }
    return Buffer.from(document);
  }
  if (typeof document !== "object" || document === null) {
    throw invalid("data", `a ${typeof document} is no document`, "PAYLOAD_MALFORMED");
  }
  return Buffer.from(stringify(document));
}

/** The record key for a key of the program: the canonical text of the key fields (rule K4). */
export function recordKey(key: Key, field = "key"): string {
  const text = Array.isArray(key)
    ? key.map((part) => fieldText(part, field).replace(/[\\|]/g, "\\$&")).join("|")
    : fieldText(key as KeyField, field);
  if (!isWellFormed(text)) {
    throw invalid(field, "is not well-formed Unicode", "KEY_NOT_UTF8");
  }
  return text;
}

/** As `recordKey`, for a list. */
export function recordKeys(keys: Iterable<Key>, field = "keys"): string[] {
  if (typeof keys === "string") {
    throw invalid(field, `must be a list; write [${JSON.stringify(keys)}]`); // a text is a list of texts, too
  }
  return Array.from(keys, (key, index) => recordKey(key, `${field}[${index}]`));
}

function fieldText(value: KeyField, field: string): string {
  switch (typeof value) {
    case "string":
      return value;
    case "bigint":
    case "boolean":
      return String(value);
    case "number":
      return numberText(value, field);
    default:
      throw invalid(field, `a ${value === null ? "null" : typeof value} is no value of a key field`);
  }
}

function numberText(value: number, field: string): string {
  if (Number.isSafeInteger(value)) {
    return value === 0 ? "0" : String(value);
  }
  if (!Number.isFinite(value)) {
    throw invalid(field, `${value} is no value of a key field`);
  }
  if (Number.isInteger(value)) {
    // It may have been rounded before it came here. A double that is meant has the form of a bigint.
    throw invalid(field, `${value} is beyond 2^53, where numbers are rounded; give a bigint`);
  }
  // Below 1e-4 the server writes an exponent of at least two digits.
  const [digits = "", exponent = ""] = value.toExponential().split("e");
  return Number(exponent) < -4 ? `${digits}e-${exponent.slice(1).padStart(2, "0")}` : String(value);
}
