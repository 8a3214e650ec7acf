/**
 * MessagePack without loss: what was published is what is read (rule K2). `@msgpack/msgpack` reads and writes the bytes.
 *
 *   [1]  An integer beyond 2^53 is read as a bigint with all its digits. A bigint, and a whole number within 2^53, is
 *        written as an integer. An integer beyond 64 bits is refused: MessagePack has none.
 *   [2]  A time is read as a Date if it has whole milliseconds, else as the extension that it is. Another extension is an
 *        ExtData. Both are written as they were read.
 *   [3]  A map in the payload may have other names than texts, which are read as their texts. Of names with one text the
 *        pairs are kept: the map is read as a list of pairs.
 *   [4]  A text keeps a byte order mark at its begin, which the library cuts off from long ones.
 */

import {
  Decoder,
  decodeTimestampToTimeSpec,
  Encoder,
  encodeTimestampExtension,
  ExtData,
  ExtensionCodec,
} from "@msgpack/msgpack";
import { DEPTH_MAX, unfit, wellFormedIn } from "./json.js";

const TIME = -1;
const DATE_MS_MAX = 8.64e15; // the range of Date, before and after 1970
const INT64_MIN = -(2n ** 63n);
const UINT64_MAX = 2n ** 64n - 1n;

const extensions = new ExtensionCodec();
extensions.register({ type: TIME, encode: encodeTimestampExtension, decode: timeOf });
const encoder = new Encoder({ useBigInt64: true, extensionCodec: extensions, maxDepth: 2 * DEPTH_MAX });

const TEXT = "t";
const OTHER = "o";
/** While a payload is read, each name has a mark in front: texts are told from other names with the same text ([3]), and
 * `__proto__`, which the decoder refuses, is a name like others. */
const decoder = new Decoder({
  useBigInt64: true,
  extensionCodec: extensions,
  keyDecoder: {
    canBeCached: () => true,
    decode: (bytes, start, length) => TEXT + textIn(bytes, start, length),
  },
  mapKeyConverter: (name) => (typeof name === "string" ? name : OTHER + textOf(name)),
});

/** The parts of the decoder that [4] needs. They are private, so the version of the library is fixed in package.json. */
interface Inside {
  readonly bytes: Uint8Array;
  readonly pos: number;
  stateIsMapKey(): boolean;
  decodeUtf8String(length: number, header: number): string;
}

const inside = decoder as unknown as Inside;
const decodeText = inside.decodeUtf8String.bind(decoder);
inside.decodeUtf8String = (length, header) => {
  const isName = inside.stateIsMapKey();
  const text = decodeText(length, header);
  const start = inside.pos - length;
  return isName || inside.bytes[start] !== 0xef ? text : textIn(inside.bytes, start, length);
};

function textIn(bytes: Uint8Array, start: number, length: number): string {
  return Buffer.from(bytes.buffer, bytes.byteOffset + start, length).toString();
}

/** The bytes of a value. Throws InvalidArgument (PAYLOAD_MALFORMED) with the path of a field that has no form. */
export function pack(value: unknown): Uint8Array {
  return encoder.encode(written(value, "", 0));
}

/** The value of a payload. Throws an error where it is no MessagePack. */
export function unpack(payload: Uint8Array): unknown {
  return read(decoder.decode(payload));
}

// ---- writing ----

/** The value as the encoder writes it right: it makes floats of numbers beyond 32 bits, and cuts bigints to 64. */
function written(value: unknown, path: string, depth: number): unknown {
  switch (typeof value) {
    case "number":
      return Number.isSafeInteger(value) && (value > 0xffff_ffff || value < -0x8000_0000) ? BigInt(value) : value;
    case "bigint":
      if (value < INT64_MIN || value > UINT64_MAX) {
        throw refused(path, `${value}, beyond 64 bits`);
      }
      return value >= -0x8000_0000n && value <= 0xffff_ffffn ? Number(value) : value;
    case "string":
      return wellFormedIn(value, path);
    case "boolean":
    case "undefined": // a field that is not there
      return value;
    case "object":
      return value === null ? null : ofObject(value, path, depth);
    default:
      throw refused(path, `a ${typeof value}`);
  }
}

function ofObject(value: object, path: string, depth: number): unknown {
  if (depth === DEPTH_MAX) {
    throw refused(path, `deeper than ${DEPTH_MAX} levels, or part of itself`);
  }
  if (value instanceof Date) {
    if (Number.isNaN(value.getTime())) {
      throw refused(path, "no date");
    }
    return value;
  }
  if (value instanceof Uint8Array || value instanceof ExtData) {
    return value;
  }
  if ("toJSON" in value && typeof value.toJSON === "function") {
    return written(value.toJSON(), path, depth + 1);
  }
  if (Array.isArray(value)) {
    return Array.from(value, (item, index) => {
      if (item === undefined) {
        throw refused(`${path}[${index}]`, "undefined");
      }
      return written(item, `${path}[${index}]`, depth + 1);
    });
  }
  if (value instanceof Map || value instanceof Set || value instanceof RegExp || ArrayBuffer.isView(value)) {
    throw refused(path, `a ${value.constructor.name}`);
  }
  const fields: [string, unknown][] = [];
  for (const [name, member] of Object.entries(value)) {
    const made = written(member, `${path}/${wellFormedIn(name, path)}`, depth + 1);
    if (made !== undefined) {
      fields.push([name, made]);
    }
  }
  return Object.fromEntries(fields);
}

function refused(path: string, found: string): Error {
  return unfit(path, `is ${found}, which MessagePack cannot express`);
}

// ---- reading ----

/** A Date, if it holds the time exactly; else the extension ([2]). */
function timeOf(data: Uint8Array): Date | ExtData {
  if ([4, 8, 12].includes(data.length)) {
    const { sec, nsec } = decodeTimestampToTimeSpec(data);
    const millis = sec * 1_000 + nsec / 1_000_000;
    if (Math.abs(millis) <= DATE_MS_MAX && nsec % 1_000_000 === 0 && nsec < 1_000_000_000) {
      return new Date(millis);
    }
  }
  return new ExtData(TIME, data);
}

function textOf(name: unknown): string {
  if (name instanceof Uint8Array) {
    return Buffer.from(name).toString("base64");
  }
  if (name instanceof Date) {
    return name.toISOString();
  }
  return typeof name === "object" && name !== null ? JSON.stringify(read(name), asText) : String(name);
}

function asText(_: string, value: unknown): unknown {
  return typeof value === "bigint" ? String(value) : value;
}

/** The value as the program gets it: integers within 2^53 are numbers, whatever their width in the payload. */
function read(value: unknown): unknown {
  if (typeof value === "bigint") {
    const number = Number(value);
    return Number.isSafeInteger(number) ? number : value;
  }
  if (typeof value !== "object" || value === null || value instanceof Date) {
    return value;
  }
  if (value instanceof Uint8Array) {
    return new Uint8Array(value); // a copy: else a change of it would change the record's payload
  }
  if (value instanceof ExtData) {
    return new ExtData(value.type, new Uint8Array(value.data as Uint8Array));
  }
  if (Array.isArray(value)) {
    return value.map(read);
  }
  const pairs = Object.entries(value).map(([name, member]): [string, unknown] => [name.slice(1), read(member)]);
  return new Set(pairs.map(([name]) => name)).size === pairs.length ? Object.fromEntries(pairs) : pairs;
}
