/** JSON without loss: json [1] and [2]. */

import assert from "node:assert/strict";
import test from "node:test";
import { InvalidArgument } from "../../src/errors.js";
import { parse, stringify } from "../../src/json.js";

test("integers keep all their digits, at any length and depth (json [1])", () => {
  const text = '{"id":9223372036854775807,"at":{"micros":[1769860800000001,-9007199254740993]},"n":12345678901234567890123}';
  const data = parse(text) as { id: bigint; at: { micros: unknown[] }; n: bigint };
  assert.equal(data.id, 9223372036854775807n);
  assert.deepEqual(data.at.micros, [1769860800000001, -9007199254740993n], "those that fit a number are numbers");
  assert.equal(data.n, 12345678901234567890123n);
  assert.equal(stringify(data), text);
});

test("the long way reads everything as JSON.parse does", () => {
  const long = ',"n":9007199254740993';
  for (const text of [
    '{"a":"\\u00e9\\n\\"x\\\\","b":[],"c":{},"d":[[1],[2,{"e":null}]]',
    '{ "t" : true ,\n"f":false, "x": -1.5e-3, "y": 1E2, "z": 0.1234567890123456789',
    '{"__proto__":{"a":1},"}{":"][,:","":"1234567890123456789"',
    '{"a":1,"a":2',
  ]) {
    const short = JSON.parse(`${text}}`) as Record<string, unknown>;
    const data = parse(`${text}${long}}`) as Record<string, unknown>;
    assert.equal(data["n"], 9007199254740993n);
    delete data["n"];
    assert.deepEqual(data, short);
    assert.equal(JSON.stringify(data), JSON.stringify(short), "in the same order");
  }
  assert.deepEqual(parse("[9007199254740993]"), [9007199254740993n]);
});

test("a text that is no JSON is refused", () => {
  for (const text of ["", "{", '{"a":01}', "[1234567890123456789,]", "nope"]) {
    assert.throws(() => parse(text), SyntaxError);
  }
});

test("a value without a form in JSON is refused with its path, and never becomes null (json [2])", () => {
  const circle: { self?: unknown } = {};
  circle.self = circle;
  for (const [value, path] of [
    [{ a: { b: [1, NaN] } }, "/a/b[1] is NaN or infinite"],
    [{ a: -Infinity }, "/a is NaN or infinite"],
    [{ a: [undefined] }, "/a[0] is undefined"],
    [{ a: () => 1 }, "/a is a function"],
    [{ a: new Map([[1, 2]]) }, "/a is a Map"],
    [undefined, "/ is a undefined"],
    [circle, "deeper than 256 levels"],
  ] as const) {
    assert.throws(
      () => stringify(value),
      (error) => error instanceof InvalidArgument && error.reason === "PAYLOAD_MALFORMED" && error.message.includes(path),
      path,
    );
  }
});

test("values are written as JSON.stringify does, and bigints as integers", () => {
  const date = new Date(Date.UTC(2026, 0, 31));
  assert.equal(
    stringify({ a: "é\u0000", b: 1.5, c: [true, null], gone: undefined, date, big: 2n ** 64n, bytes: new Uint8Array([1, 2]) }),
    '{"a":"é\\u0000","b":1.5,"c":[true,null],"date":"2026-01-31T00:00:00.000Z","big":18446744073709551616,"bytes":"AQI="}',
  );
});
