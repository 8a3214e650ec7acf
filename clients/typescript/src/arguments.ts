/**
 * Errors that name the argument: a value that no field of a message holds is refused as InvalidArgument, in the words of
 * the Python clients. No I/O.
 *
 *   [1]  Every request is looked through before it is sent. Encoders would put another character in place of half a
 *        surrogate pair, write a number as a text, and throw errors without a name for numbers out of range.
 *   [2]  The fields of a schema are looked up once. Bytes are not looked at.
 */

import { inspect } from "node:util";
import { type DescField, type DescMessage, type DescOneof, type MessageShape, ScalarType } from "@bufbuild/protobuf";
import { invalid } from "./errors.js";

/** Ten years. Longer waits have no bound; every timer and clock takes this one. */
const MILLISECONDS_MAX = 315_360_000_000;

const INT32_MAX = 2 ** 31 - 1;
const UINT32_MAX = 2 ** 32 - 1;
const INT64_MAX = 2n ** 63n - 1n;
const UINT64_MAX = 2n ** 64n - 1n;
const HALF = /\p{Surrogate}/u;

/** A value as an error shows it: short. */
export function shown(value: unknown): string {
  return inspect(value, { depth: 1, maxArrayLength: 6, maxStringLength: 30, breakLength: Infinity });
}

/** The kind of a value, for errors. */
export function kindOf(value: unknown): string {
  if (value === null) {
    return "null";
  }
  const kind = typeof value;
  return kind === "object" ? ((value as object).constructor?.name ?? "object") : kind;
}

/** The text itself. Throws InvalidArgument for one without a form in UTF-8. */
export function wellFormed(text: string, field: string, reason?: string): string {
  if (!text.isWellFormed()) {
    throw invalid(field, `${shown(text)} ${halfSurrogate(text)}`, reason);
  }
  return text;
}

/** What is wrong with a text that is not well-formed. */
export function halfSurrogate(text: string): string {
  const at = [...text.slice(0, text.search(HALF))].length;
  return `has half a surrogate pair at character ${at + 1}`;
}

/** The error of a value of another type than the argument takes. */
export function ofOtherType(field: string, value: unknown): Error {
  return invalid(field, `${shown(value)} is of type ${kindOf(value)}, which it does not take`);
}

/** A time to wait, as every timer takes it. `Infinity` has no bound. */
export function milliseconds(value: number, field: string): number {
  if (typeof value !== "number") {
    throw invalid(field, `${shown(value)} is no number of milliseconds`);
  }
  if (Number.isNaN(value)) {
    throw invalid(field, "is not a number");
  }
  if (value < 0) {
    throw invalid(field, `${value} is negative`);
  }
  return Math.min(value, MILLISECONDS_MAX);
}

/** The list of an argument. Throws InvalidArgument for one value where a list is wanted. */
export function list<Value>(values: Iterable<Value>, field: string, of: string): Value[] {
  const isOne = typeof values !== "object" || values === null || ArrayBuffer.isView(values) || values instanceof Map;
  if (isOne || !(Symbol.iterator in values)) {
    throw invalid(field, `must be a list of ${of}; write [${shown(values)}]`); // a text is a list of texts, too
  }
  return Array.from(values);
}

/** One of some names, or undefined. */
export function oneOf<Name extends string>(value: Name | undefined, names: readonly Name[], field: string): Name | undefined {
  if (value !== undefined && !names.includes(value)) {
    throw invalid(field, `${shown(value)} is not one of ${names.join(", ")}`);
  }
  return value;
}

// ---- whole messages ----

/** Throws InvalidArgument that names the argument whose value a field of the message does not hold ([1]). */
export function checkMessage<Desc extends DescMessage>(schema: Desc, message: MessageShape<Desc>): void {
  planOf(schema)(message as unknown as Fields, "", "");
}

type Fields = Readonly<Record<string, unknown>>;
type Look<Value> = (value: Value, path: string, index: string) => void;

/** The arguments of the client's methods whose fields have other names. */
const ARGUMENTS: Readonly<Record<string, string>> = {
  "records.key": "key",
  "records.payload": "data",
  "records.condition.onlyIfVersion": "onlyIfVersion",
  "condition.onlyIfVersion": "onlyIfVersion",
  "byKeys.keys": "keys",
  "byKeys.versions": "onlyIfVersions",
  byFilter: "filter",
  bookmark: "start",
  topicPattern: "topics",
  unsetPaths: "unset",
  "select.include": "select",
  "select.exclude": "exclude",
  "publisher.publisherId": "publisherId",
};

const plans = new Map<string, Look<Fields>>();

function planOf(schema: DescMessage): Look<Fields> {
  const known = plans.get(schema.typeName);
  if (known !== undefined) {
    return known;
  }
  const looks: Look<Fields>[] = [];
  const plan: Look<Fields> = (message, path) => {
    for (const look of looks) {
      look(message, path, "");
    }
  };
  plans.set(schema.typeName, plan); // before its fields: a message may have messages of its own kind
  for (const member of schema.members) {
    const look = member.kind === "oneof" ? ofOneof(member) : ofField(member);
    if (look !== undefined) {
      looks.push(look);
    }
  }
  return plan;
}

function ofOneof(oneof: DescOneof): Look<Fields> {
  const looks = new Map(oneof.fields.map((field) => [field.localName, ofValue(field)]));
  return (message, path) => {
    const { case: name, value } = message[oneof.localName] as { case: string | undefined; value?: unknown };
    if (name !== undefined) {
      looks.get(name)?.(value, below(path, name), "");
    }
  };
}

function ofField(field: DescField): Look<Fields> | undefined {
  const { localName } = field;
  const look = ofValue(field);
  if (look === undefined) {
    return undefined;
  }
  if (field.fieldKind === "list") {
    return (message, path) => {
      const values = message[localName] as readonly unknown[];
      for (let index = 0; index < values.length; index++) {
        look(values[index], below(path, localName), `[${index}]`);
      }
    };
  }
  if (field.fieldKind === "map") {
    return (message, path) => {
      for (const [name, value] of Object.entries(message[localName] as object)) {
        wellFormed(name, nameOf(below(path, localName), ""));
        look(value, `${below(path, localName)}.${name}`, "");
      }
    };
  }
  return (message, path) => {
    const value = message[localName];
    if (value !== undefined) {
      look(value, below(path, localName), "");
    }
  };
}

/** Looks at one value of a field; undefined: it can be no other. */
function ofValue(field: DescField): Look<unknown> | undefined {
  if (field.message !== undefined) {
    const plan = planOf(field.message);
    return (value, path) => plan(value as Fields, path, "");
  }
  if (field.enum !== undefined) {
    return ofNumber(-(2 ** 31), INT32_MAX);
  }
  switch (field.scalar) {
    case ScalarType.STRING:
      return (value, path, index) => {
        if (typeof value !== "string") {
          throw ofOtherType(nameOf(path, index), value);
        }
        if (!value.isWellFormed()) {
          wellFormed(value, nameOf(path, index));
        }
      };
    case ScalarType.INT32:
    case ScalarType.SINT32:
    case ScalarType.SFIXED32:
      return ofNumber(-(2 ** 31), INT32_MAX);
    case ScalarType.UINT32:
    case ScalarType.FIXED32:
      return ofNumber(0, UINT32_MAX);
    case ScalarType.INT64:
    case ScalarType.SINT64:
    case ScalarType.SFIXED64:
      return ofBigint(-INT64_MAX - 1n, INT64_MAX);
    case ScalarType.UINT64:
    case ScalarType.FIXED64:
      return ofBigint(0n, UINT64_MAX);
    case ScalarType.BOOL:
      return ofType("boolean");
    case ScalarType.DOUBLE:
    case ScalarType.FLOAT:
      return ofType("number");
    default:
      return (value, path, index) => {
        if (!(value instanceof Uint8Array)) {
          throw ofOtherType(nameOf(path, index), value);
        }
      };
  }
}

function ofType(type: string): Look<unknown> {
  return (value, path, index) => {
    if (typeof value !== type) {
      throw ofOtherType(nameOf(path, index), value);
    }
  };
}

function ofNumber(least: number, most: number): Look<unknown> {
  return (value, path, index) => {
    if (typeof value !== "number") {
      throw ofOtherType(nameOf(path, index), value);
    }
    if (!(Number.isInteger(value) && value >= least && value <= most)) {
      throw outOfRange(nameOf(path, index), value);
    }
  };
}

function ofBigint(least: bigint, most: bigint): Look<unknown> {
  return (value, path, index) => {
    if (typeof value !== "bigint") {
      throw ofOtherType(nameOf(path, index), value);
    }
    if (value < least || value > most) {
      throw outOfRange(nameOf(path, index), value);
    }
  };
}

function outOfRange(field: string, value: number | bigint): Error {
  return invalid(field, `${value} is out of its range`);
}

function below(path: string, name: string): string {
  return path === "" ? name : `${path}.${name}`;
}

function nameOf(path: string, index: string): string {
  return (ARGUMENTS[path] ?? path) + index;
}
