/** The fields of fix and nvfix payloads, read and written as by the server and the Python clients (rule K2). No I/O. */

import { isUtf8 } from "node:buffer";
import { kindOf, shown } from "./arguments.js";
import { unfit, wellFormedIn } from "./json.js";

// The tag of a data field, by the tag of its length: FIX 4.0 to 5.0SP2, as `sow.flat_fields` has them.
const DATA_OF: ReadonlyMap<string, string> = new Map(
  [
    [90, 91], [93, 89], [95, 96], [212, 213], [348, 349], [350, 351], [352, 353], [354, 355], [356, 357], [358, 359],
    [360, 361], [362, 363], [364, 365], [445, 446], [618, 619], [621, 622], [1184, 1185], [1277, 1278], [1280, 1281],
    [1282, 1283], [1397, 1398], [1401, 1402], [1403, 1404], [1468, 1469],
  ].map(([length, data]) => [String(length), String(data)]),
);
const LENGTH_OF: ReadonlyMap<string, string> = new Map([...DATA_OF].map(([length, data]) => [data, length]));
const EQUALS = 0x3d;
const LENGTH = /^[0-9]{1,9}$/;

/**
 * The fields by their names. Of a repeated name the first one counts. With `tags`, the payload is fix: a data field may
 * hold the separator, if the field right before it is its length, and 055 is tag 55.
 */
export function fieldsOf(payload: Uint8Array, separator: string, tags: boolean): { [name: string]: string } {
  const between = separator.charCodeAt(0);
  const bytes = Buffer.from(payload.buffer, payload.byteOffset, payload.byteLength);
  const found = new Map<string, string>();
  let due = { tag: "", size: -1 };
  for (let at = 0; at < bytes.length; ) {
    const next = bytes.indexOf(between, at);
    let end = next < 0 ? bytes.length : next;
    const equals = bytes.subarray(at, end).indexOf(EQUALS);
    const start = at + equals + 1;
    let name = equals > 0 ? bytes.toString("utf8", at, start - 1) : "";
    if (tags && name !== "") {
      name = plainTag(name);
      const close = start + due.size;
      if (name === due.tag && due.size >= 0 && (close === bytes.length || bytes[close] === between)) {
        end = close;
      }
    }
    due = { tag: "", size: -1 };
    if (name !== "") {
      const value = textOf(bytes.subarray(start, end));
      const data = tags ? DATA_OF.get(name) : undefined;
      if (data !== undefined && LENGTH.test(value)) {
        due = { tag: data, size: Number(value) };
      }
      if (!found.has(name)) {
        found.set(name, value);
      }
    }
    at = end + 1;
  }
  return Object.fromEntries(found);
}

/**
 * The payload with a field for each entry of an object, in their order: a text, bytes, or a number. A data field of fix
 * that holds the separator gets its length in front. Throws InvalidArgument (PAYLOAD_MALFORMED).
 */
export function fieldsPayload(document: object, separator: string, tags: boolean): Uint8Array {
  if (Array.isArray(document)) {
    throw unfit("", "is no object of names and values");
  }
  const between = separator.charCodeAt(0);
  const fields = new Map<string, Buffer>();
  for (const [given, value] of Object.entries(document)) {
    if (value === undefined) {
      continue; // a field that is not there
    }
    const name = tags ? plainTag(given) : given;
    const isTag = !tags || /^[0-9]+$/.test(name);
    if (name === "" || !isTag || name.includes("=") || name.includes(separator) || fields.has(name)) {
      const fault = fields.has(name) ? "is there twice" : tags ? "is no tag" : "is no name of a field";
      throw unfit(`/${given}`, fault);
    }
    fields.set(wellFormedIn(name, ""), fieldBytes(value, `/${given}`));
  }
  const parts: (string | Buffer)[] = [];
  for (const [name, bytes] of fields) {
    const length = tags ? LENGTH_OF.get(name) : undefined;
    if (bytes.includes(between)) {
      if (length === undefined) {
        throw unfit(`/${name}`, "holds the separator of the fields");
      }
      if (!fields.has(length)) {
        parts.push(`${length}=${bytes.length}${separator}`);
      }
    }
    parts.push(`${name}=`, bytes, separator);
  }
  const payload = Buffer.concat(parts.map((part) => (typeof part === "string" ? Buffer.from(part) : part)));
  const read = fieldsOf(payload, separator, tags);
  for (const [name, bytes] of fields) {
    if (bytes.includes(between) && read[name] !== textOf(bytes)) {
      throw unfit(`/${name}`, "holds the separator of the fields"); // its length is not true, or not in front of it
    }
  }
  return payload;
}

function fieldBytes(value: unknown, path: string): Buffer {
  if (typeof value === "string") {
    return Buffer.from(wellFormedIn(value, path));
  }
  if (value instanceof Uint8Array) {
    return Buffer.from(value);
  }
  if (typeof value === "bigint" || (typeof value === "number" && Number.isFinite(value))) {
    return Buffer.from(String(value));
  }
  throw unfit(path, `is ${shown(value)}, of type ${kindOf(value)}; give text, bytes or a number`);
}

/** A tag without zeros in front: 055 is 55. */
function plainTag(name: string): string {
  return name.replace(/^0+(?=.)/, "");
}

/** The text of a value; bytes that are not UTF-8 are shown as \\xff. */
function textOf(bytes: Buffer): string {
  if (isUtf8(bytes)) {
    return bytes.toString();
  }
  let text = "";
  for (let at = 0; at < bytes.length; ) {
    const size = [1, 2, 3, 4].find((each) => isUtf8(bytes.subarray(at, at + each)) && at + each <= bytes.length);
    text += size === undefined ? `\\x${bytes[at]!.toString(16).padStart(2, "0")}` : bytes.toString("utf8", at, at + size);
    at += size ?? 1;
  }
  return text;
}
