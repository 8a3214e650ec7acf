/** MessagePack: msgpack [1] to [3]. What msgspec, of the Python clients, writes and reads is in test/live/payloads.test.ts. */

import assert from "node:assert/strict";
import test from "node:test";
import { ExtData } from "@msgpack/msgpack";
import { InvalidArgument } from "../../src/errors.js";
import { pack, unpack } from "../../src/msgpack.js";

const bytes = (hex: string) => new Uint8Array(Buffer.from(hex.replaceAll(" ", ""), "hex"));
const hex = (value: unknown) => Buffer.from(pack(value)).toString("hex");

test("integers are exact in both directions, and as short as they can be ([1])", () => {
  for (const [value, written] of [
    [5, "05"],
    [5n, "05"],
    [-1n, "ff"],
    [2 ** 32 - 1, "ceffffffff"],
    [2 ** 32, "cf0000000100000000"], // the library alone makes a float of it
    [-(2 ** 31), "d280000000"],
    [-(2 ** 31) - 1, "d3ffffffff7fffffff"],
    [Number.MAX_SAFE_INTEGER, "cf001fffffffffffff"],
    [2n ** 53n, "cf0020000000000000"],
    [9007199254740993n, "cf0020000000000001"],
    [2n ** 64n - 1n, "cfffffffffffffffff"],
    [-(2n ** 63n), "d38000000000000000"],
    [1.5, "cb3ff8000000000000"],
    [NaN, "cb7ff8000000000000"],
    [-Infinity, "cbfff0000000000000"],
  ] as const) {
    assert.equal(hex(value), written, String(value));
    const back = typeof value === "bigint" && Number.isSafeInteger(Number(value)) ? Number(value) : value;
    assert.deepEqual(unpack(bytes(written)), back);
  }
  assert.equal(unpack(bytes("cf0000000000000005")), 5, "a width that another writer has chosen is no other number");
  assert.equal(unpack(bytes("d3ffffffffffffffff")), -1);
});

test("a value that MessagePack lacks is refused with its path", () => {
  const self: Record<string, unknown> = {};
  self["a"] = self;
  for (const [document, path] of [
    [{ n: 2n ** 64n }, "/n is 18446744073709551616, beyond 64 bits, which MessagePack cannot express"],
    [{ a: [-(2n ** 63n) - 1n] }, "/a[0] is -9223372036854775809, beyond 64 bits"],
    [{ a: { b: new Map() } }, "/a/b is a Map"],
    [{ a: new Set() }, "/a is a Set"],
    [{ a: new Float64Array(1) }, "/a is a Float64Array"],
    [{ a: () => 1 }, "/a is a function"],
    [{ a: [undefined] }, "/a[0] is undefined"],
    [{ at: new Date(NaN) }, "/at is no date"],
    [{ a: "\ud800" }, "/a is '\\ud800', which has half a surrogate pair at character 1"],
    [{ ["\udc00"]: 1 }, "/ is '\\udc00', which has half a surrogate pair"],
    [self, "deeper than 256 levels, or part of itself"],
  ] as const) {
    assert.throws(
      () => pack(document),
      (error) => error instanceof InvalidArgument && error.reason === "PAYLOAD_MALFORMED" && error.text.includes(path),
      path,
    );
  }
});

test("texts, bytes, times, extensions and absent fields ([2])", () => {
  const at = new Date("2026-01-31T12:00:00.250Z");
  const document = {
    text: "é🚗\0",
    long: "x".repeat(300),
    bytes: new Uint8Array([0, 255]),
    at,
    early: new Date("1901-01-01T00:00:00.001Z"),
    far: new Date(8.64e15),
    extension: new ExtData(5, new Uint8Array([1])),
    list: [null, true, [], {}],
    deep: { nothing: undefined, one: { toJSON: () => "as told" } },
    ["__proto__"]: 1,
  };
  const { deep, ...others } = document;
  const read = unpack(pack({ ...others, deep, ["__proto__"]: 1 })) as Record<string, unknown>;
  assert.deepEqual(read, { ...others, far: document.far, deep: { one: "as told" }, ["__proto__"]: 1 });
  assert.ok(read["bytes"] instanceof Uint8Array && !Buffer.isBuffer(read["bytes"]));
});

test("a time that a Date would round stays what it is ([2])", () => {
  const seconds = (data: string) => unpack(bytes(data));
  assert.deepEqual(seconds("d6ff 00000001"), new Date(1_000));
  for (const [payload, data] of [
    ["d7ff 0000000400000001", "0000000400000001"], // a nanosecond
    ["c70cff 00000000 7fffffffffffffff", "000000007fffffffffffffff"], // beyond the range of Date
    ["c705ff 0102030405", "0102030405"], // no time, though its number says so
  ] as const) {
    const time = seconds(payload);
    assert.deepEqual(time, new ExtData(-1, bytes(data)));
    assert.deepEqual(unpack(pack(time)), time, "and is written as it was read");
  }
});

test("names that are no texts are read as their texts, and none is lost ([3])", () => {
  assert.deepEqual(unpack(bytes("83 01a161 c3a162 c0a163")), { 1: "a", true: "b", null: "c" });
  assert.deepEqual(unpack(bytes("82 01a161 a131a162")), [["1", "a"], ["1", "b"]]);
  assert.deepEqual(unpack(bytes("81 cfffffffffffffffff 05")), { "18446744073709551615": 5 });
  assert.deepEqual(unpack(bytes("81 9101 05")), { "[1]": 5 });
  assert.throws(() => unpack(bytes("82 01")), RangeError);
  assert.throws(() => unpack(bytes("05 05")), "bytes behind the value");
});

test("the bytes of a record are its own", () => {
  const payload = bytes("81 a161 c40101");
  const read = unpack(payload) as { a: Uint8Array };
  read.a[0] = 7;
  assert.deepEqual(unpack(payload), { a: new Uint8Array([1]) });
});

test("any document comes back as it was", () => {
  const seed = Number(process.env["SEED"] ?? Date.now() % 2 ** 31);
  let state = seed;
  const below = (limit: number) => {
    state = (Math.imul(state, 1_103_515_245) + 12_345) & 0x7fff_ffff;
    return Math.floor((state / 2 ** 31) * limit);
  };
  const some = <Value>(values: readonly Value[]) => values[below(values.length)]!;
  const edge = () => some([0n, 1n, 127n, 128n, 255n, 256n, 65_535n, 65_536n, 2n ** 31n, 2n ** 32n, 2n ** 53n, 2n ** 63n]) + BigInt(below(3) - 1);
  const integer = () => {
    const value = some([1n, -1n]) * edge();
    const fit = value < -(2n ** 63n) ? -(2n ** 63n) : value;
    return Number.isSafeInteger(Number(fit)) ? Number(fit) : fit;
  };
  const value = (depth: number): unknown => {
    switch (below(depth > 3 ? 7 : 9)) {
      case 0:
        return integer();
      case 1:
        return some([0.5, NaN, Infinity, 1e300, 2 ** 70, null, true, false]);
      case 2:
        return "é🚗\0x".repeat(below(20));
      case 3:
        return new Uint8Array(below(300));
      case 4:
        return new Date(some([1, -1]) * below(2 ** 31) * some([1, 1_000, 100_000]) + 0);
      case 5:
        return new ExtData(some([0, 5, 127, -2, -128]), new Uint8Array(below(20)));
      case 6:
        return some(["", "__proto__", "1"]);
      case 7:
        return Array.from({ length: below(20) }, () => value(depth + 1));
      default:
        return Object.fromEntries(Array.from({ length: below(20) }, () => [some(["a", "", "é", "1", "__proto__", "toString", `n${below(99)}`]), value(depth + 1)]));
    }
  };
  for (let round = 0; round < 500; round++) {
    const document = value(0);
    assert.deepEqual(unpack(pack(document)), document, `SEED=${seed}, round ${round}`);
  }
});

test("a text keeps its byte order mark, whatever its length ([4])", () => {
  for (const length of [0, 1, 250, 5_000]) {
    const text = `\ufeff${"x".repeat(length)}`;
    assert.deepEqual(unpack(pack({ a: [text, { [text]: text }] })), { a: [text, { [text]: text }] });
  }
});
