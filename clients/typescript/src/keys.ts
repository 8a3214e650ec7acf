/** Keys: what the program gives into the text of a record key (rules K3, K4). No I/O. */

import { kindOf, list, shown, wellFormed } from "./arguments.js";
import { invalid } from "./errors.js";

/** The value of one key field. */
export type KeyField = string | number | bigint | boolean;

/**
 * The key of a record. A text is the record key as it stands. A number, bigint or boolean is the value of the only key
 * field. An array has the values of all key fields, and of a text that contains `|` or `\` (rule K4).
 */
export type Key = KeyField | readonly KeyField[];

/** The record key for a key of the program: the canonical text of the key fields (rule K4). */
export function recordKey(key: Key, field = "key"): string {
  if (!Array.isArray(key)) {
    return fieldText(key as KeyField, field);
  }
  if (key.length === 0) {
    throw invalid(field, "is an empty array; it needs a value for each key field");
  }
  return key.map((part) => fieldText(part, field).replace(/[\\|]/g, "\\$&")).join("|");
}

/** As `recordKey`, for a list. */
export function recordKeys(keys: Iterable<Key>, field = "keys"): string[] {
  return list(keys, field, "keys").map((key, index) => recordKey(key, `${field}[${index}]`));
}

function fieldText(value: KeyField, field: string): string {
  switch (typeof value) {
    case "string":
      return wellFormed(value, field);
    case "bigint":
    case "boolean":
      return String(value);
    case "number":
      return numberText(value, field);
    default:
      throw invalid(
        field,
        `${shown(value)} is of type ${kindOf(value)}; a key is a text, a number, a bigint, a boolean, or an array of ` +
          "these for several key fields",
      );
  }
}

function numberText(value: number, field: string): string {
  if (Number.isSafeInteger(value)) {
    return value === 0 ? "0" : String(value);
  }
  if (!Number.isFinite(value)) {
    throw invalid(field, `${value} is no key: NaN and infinities have no form in JSON`);
  }
  if (Number.isInteger(value)) {
    // It may have been rounded before it came here. A double that is meant has the form of a bigint.
    throw invalid(field, `${value} is beyond 2^53, where numbers are rounded; give a bigint`);
  }
  // Below 1e-4 the server writes an exponent of at least two digits.
  const [digits = "", exponent = ""] = value.toExponential().split("e");
  return Number(exponent) < -4 ? `${digits}e-${exponent.slice(1).padStart(2, "0")}` : String(value);
}
