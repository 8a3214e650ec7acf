/** Keys, documents, durations, and the errors of arguments. */

import assert from "node:assert/strict";
import test from "node:test";
import { checkMessage } from "../../src/arguments.js";
import { Client } from "../../src/client.js";
import { dateOf, lifetimeMessage, micros, momentMicros } from "../../src/durations.js";
import { InvalidArgument } from "../../src/errors.js";
import {
  PublishRequestSchema,
  QueryRequestSchema,
  SowDeleteRequestSchema,
  SubscribeRequestSchema,
} from "../../src/gen/sow/v1/sow_pb.js";
import { recordKey, recordKeys } from "../../src/keys.js";
import { encode } from "../../src/payloads.js";
import { createViewRequest, deleteRequest, publishRequest, queryRequest, subscribeRequest } from "../../src/requests.js";

const refusedFor = (field: string, fault: string) => (error: unknown) =>
  error instanceof InvalidArgument && error.details["field"] === field && error.text.startsWith(`${field}: `) && error.text.includes(fault);
const refusedAs = (reason: string) => (error: unknown) => error instanceof InvalidArgument && error.reason === reason;

test("expressions of groups have their names, and a field names itself", () => {
  const groups = queryRequest("t", "", { groupBy: ["/site"], aggregate: { n: "COUNT(*)", s: "SUM(/px)" }, having: "/n > 1" });
  const plain = ({ name, expression }: { name: string; expression: string }) => [name, expression];
  assert.deepEqual(groups.groupBy.map(plain), [["", "/site"]]);
  assert.deepEqual(groups.aggregate.map(plain), [
    ["n", "COUNT(*)"],
    ["s", "SUM(/px)"],
  ]);
  assert.equal(groups.having, "/n > 1");
  const named = queryRequest("t", "", { groupBy: { minute: "FLOOR(/ts / 60)" } });
  assert.deepEqual(named.groupBy.map(plain), [["minute", "FLOOR(/ts / 60)"]]);
  assert.throws(() => queryRequest("t", "", { groupBy: [1 as unknown as string] }), refusedFor("groupBy", "is of type number"));
});

test("a view has the expressions of a query, and fields of each record", () => {
  const plain = ({ name, expression }: { name: string; expression: string }) => [name, expression];
  const made = createViewRequest("positions", { source: "orders", where: "/open", groupBy: ["/a"], select: { q: "SUM(/q)" } });
  assert.deepEqual([made.name, made.view?.source, made.view?.where], ["positions", "orders", "/open"]);
  assert.deepEqual(made.view?.groupBy.map(plain), [["", "/a"]]);
  assert.deepEqual(made.view?.select.map(plain), [["q", "SUM(/q)"]]);
  const slim = createViewRequest("slim", { source: "orders", select: ["/a"] });
  assert.deepEqual(slim.view?.select.map(plain), [["", "/a"]]);
  assert.throws(() => createViewRequest("v", { source: "o", select: { q: 1 as never } }), refusedFor("select", "is of type number"));
});

test("keys have the canonical text of rule K4", () => {
  for (const [key, text] of [
    ["a|b", "a|b"],
    [["a|b"], "a\\|b"],
    [["AB\\", 7], "AB\\\\|7"],
    [1, "1"],
    [-0, "0"],
    [9007199254740993n, "9007199254740993"],
    [0.1, "0.1"],
    [0.0001, "0.0001"],
    [0.00001, "1e-05"],
    [1.5e-7, "1.5e-07"],
    [-2.5e-100, "-2.5e-100"],
    [true, "true"],
    [["", false], "|false"],
  ] as const) {
    assert.equal(recordKey(key), text);
  }
});

test("a key that would be rounded, or has no text, is refused", () => {
  for (const [key, fault] of [
    [2 ** 53, "beyond 2^53"],
    [NaN, "NaN is no key: NaN and infinities have no form in JSON"],
    [Infinity, "is no key"],
    [null, "null is of type null; a key is a text, a number, a bigint, a boolean, or an array"],
    [undefined, "is of type undefined"],
    [{}, "{} is of type Object"],
    [[[1]], "[ 1 ] is of type Array"],
    [[], "is an empty array; it needs a value for each key field"],
    ["x🚗\ud800", "has half a surrogate pair at character 3"], // an encoder would put another character there
    [["a", "\udc00"], "has half a surrogate pair at character 1"],
  ] as const) {
    assert.throws(() => recordKey(key as never), refusedFor("key", fault), String(fault));
  }
  for (const keys of ["abc", 5, new Uint8Array(2), new Map(), {}, null]) {
    assert.throws(() => recordKeys(keys as never), refusedFor("keys", "must be a list of keys; write ["));
  }
  assert.throws(() => recordKeys(["a", NaN]), refusedFor("keys[1]", "is no key"));
});

test("documents are JSON, text or bytes", () => {
  assert.equal(Buffer.from(encode({ id: 2n ** 60n })).toString(), '{"id":1152921504606846976}');
  assert.equal(Buffer.from(encode('{"id":1}')).toString(), '{"id":1}');
  const bytes = new Uint8Array([0, 255]);
  assert.equal(encode(bytes), bytes);
  assert.throws(() => encode("\udc00"), refusedAs("PAYLOAD_MALFORMED"));
  assert.throws(() => encode(7 as never), refusedAs("PAYLOAD_MALFORMED"));
});

test("durations are exact microseconds (rule L1)", () => {
  for (const [text, value] of [
    ["30s", 30_000_000n],
    ["1h30m", 5_400_000_000n],
    ["1.5s", 1_500_000n],
    ["2w", 1_209_600_000_000n],
    ["7d", 604_800_000_000n],
    ["0s", 0n],
    ["0.4us0.6us", 1n],
    ["1999ns", 1n],
    [".5ms", 500n],
    ["3µs", 3n],
    [7n, 7n],
  ] as const) {
    assert.equal(micros(text, "ttl"), value, String(text));
  }
  for (const text of ["", "30", "-1s", "1 s", "1x", "s", "1s ", "never", "99999999999w", 30, 2n ** 63n]) {
    assert.throws(() => micros(text as never, "ttl"), refusedAs("INVALID_ARGUMENT"), String(text));
  }
  assert.throws(() => micros(-1n, "ttl"), refusedAs("LIFETIME_NEGATIVE"));
});

test("absent, zero and never are three different lifetimes", () => {
  assert.equal(lifetimeMessage(undefined, undefined), undefined);
  assert.deepEqual(lifetimeMessage("0s", undefined)?.lifetime, { case: "ttlMicros", value: 0n });
  assert.deepEqual(lifetimeMessage("never", undefined)?.lifetime, { case: "never", value: true });
  assert.deepEqual(lifetimeMessage(undefined, new Date(2e12))?.lifetime, { case: "expireTimeMicros", value: 2n * 10n ** 15n });
  assert.throws(() => lifetimeMessage("1s", 1n), refusedAs("INVALID_ARGUMENT"));
  assert.throws(() => lifetimeMessage(undefined, -1n), refusedAs("LIFETIME_NEGATIVE"));
});

test("moments are dates or microseconds, never plain numbers", () => {
  assert.equal(momentMicros(new Date(1_769_860_800_001), "start"), 1_769_860_800_001_000n);
  assert.equal(dateOf(1_769_860_800_001_999n).getTime(), 1_769_860_800_001);
  for (const moment of [1_769_860_800, new Date(NaN)]) {
    assert.throws(() => momentMicros(moment as never, "start"), refusedAs("INVALID_ARGUMENT"));
  }
});

test("a time in another unit than microseconds is refused with a sentence about units", () => {
  const [seconds, millis] = [1_795_860_040n, 1_795_860_040_000n];
  for (const moment of [seconds, millis, 0n]) {
    const fault = `${moment} is more than ten years ago; it counts microseconds since 1970, not seconds or milliseconds; a Date`;
    assert.throws(() => lifetimeMessage(undefined, moment), refusedFor("expireAt", `${fault}, or ttl for a time from now, has`));
    assert.throws(() => momentMicros(moment, "start"), refusedFor("start", `${fault} has no such doubt`));
  }
  const ofSeconds = new Date(Number(seconds));
  assert.throws(() => lifetimeMessage(undefined, ofSeconds), refusedFor("expireAt", "a Date counts milliseconds since 1970, not seconds"));
});

test("a value that no field of a request holds is refused by the argument's name", () => {
  const half = "\ud800";
  for (const [field, fault, make] of [
    ["topic", "has half a surrogate pair at character 1", () => queryRequest(half, "", {})],
    ["topic", "5 is of type number, which it does not take", () => queryRequest(5 as never, "", {})],
    ["filter", "has half a surrogate pair", () => queryRequest("t", half, {})],
    ["orderBy", "has half a surrogate pair", () => queryRequest("t", "", { orderBy: half })],
    ["minPosition", "has half a surrogate pair", () => queryRequest("t", "", { minPosition: half })],
    ["select[1]", "has half a surrogate pair", () => queryRequest("t", "", { select: ["/a", half] })],
    ["exclude[0]", "7 is of type number", () => queryRequest("t", "", { exclude: [7 as never] })],
    ["select", "must be a list of texts; write ['/a']", () => queryRequest("t", "", { select: "/a" as never })],
    ["keysOnly", "'yes' is of type string", () => queryRequest("t", "", { keysOnly: "yes" as never })],
    ["batchSize", "1099511627776 is out of its range", () => queryRequest("t", "", { batchSize: 2 ** 40 })],
    ["batchSize", "-1 is negative", () => queryRequest("t", "", { batchSize: -1 })],
    ["pageSize", "1.5 is no whole number", () => queryRequest("t", "", { pageSize: 1.5 })],
    ["skipN", "NaN is no whole number", () => queryRequest("t", "", { skipN: NaN })],
    ["topN", "0 is less than 1", () => queryRequest("t", "", { topN: 0 })],
    ["topN", "18446744073709551616 is out of its range", () => queryRequest("t", "", { topN: 2n ** 64n })],
    ["parameters.n", "has half a surrogate pair", () => queryRequest("t", "/a = :n", { parameters: { n: half } })],
  ] as const) {
    assert.throws(() => checkMessage(QueryRequestSchema, make()), refusedFor(field, fault), `${field}: ${fault}`);
  }
  const version = 2n ** 63n;
  for (const [field, fault, options] of [
    ["onlyIfVersion", "9223372036854775808 is out of its range", { onlyIfVersion: version }],
    ["onlyIfVersion", "7 is of type number", { onlyIfVersion: 7 }],
    ["durability", "'disk' is not one of fsync, buffered, replicated", { durability: "disk" }],
  ] as const) {
    const make = () => publishRequest("t", [new Uint8Array(1)], options as never, undefined);
    assert.throws(() => checkMessage(PublishRequestSchema, make()), refusedFor(field, fault), field);
  }
  for (const [field, fault, options] of [
    ["onlyIfVersions[1]", "is out of its range", { keys: ["a", "b"], onlyIfVersions: [1n, version] }],
    ["onlyIfVersions", "must be a list of versions", { keys: ["a"], onlyIfVersions: 7n }],
    ["filter", "has half a surrogate pair", { filter: half }],
    ["filter", "7 is of type number", { filter: 7 }],
  ] as const) {
    assert.throws(() => checkMessage(SowDeleteRequestSchema, deleteRequest("t", options as never)), refusedFor(field, fault), field);
  }
  for (const [field, fault, topics, options] of [
    ["topics", "has half a surrogate pair", { pattern: half }, {}],
    ["start", "has half a surrogate pair", "t", { start: half }],
    ["topics", "{} is of type Object, which it does not take", {}, {}],
    ["topics", "undefined is of type undefined", undefined, {}],
    ["parameters", "an object of names and values is needed, not a string", "t", { parameters: "n" }],
    ["parameters", "needed, not a Map", "t", { parameters: new Map() }],
    ["start", "a number is not a bookmark", "t", { start: 5 }],
  ] as const) {
    const make = () => subscribeRequest(topics as never, options as never, false);
    assert.throws(() => checkMessage(SubscribeRequestSchema, make()), refusedFor(field, fault), field);
  }
  checkMessage(QueryRequestSchema, queryRequest("t", "/é = :n", { topN: 2n ** 63n, parameters: { n: [1, "🚗", null] }, select: [] }));
});

test("times to wait are numbers from zero on, and as long as one wants", () => {
  for (const [value, fault] of [
    [-1, "-1 is negative"],
    [NaN, "is not a number"],
    ["5", "'5' is no number of milliseconds"],
    [5n, "5n is no number of milliseconds"],
  ] as const) {
    assert.throws(() => new Client("127.0.0.1", { timeoutMs: value as never }), refusedFor("timeoutMs", fault));
    assert.throws(() => new Client("127.0.0.1", { connectTimeoutMs: value as never }), refusedFor("connectTimeoutMs", fault));
  }
  assert.throws(() => new Client(5 as never), refusedFor("server", "must be a list of addresses; write [5]"));
  assert.throws(() => new Client(["a", 5 as never]), refusedFor("server", "5 is of type number"));
  for (const timeoutMs of [0, 1e10, Infinity]) {
    new Client("127.0.0.1", { timeoutMs, connectTimeoutMs: timeoutMs }).close();
  }
});

test("JSON has no half characters and no dates that are none", () => {
  for (const [document, path] of [
    [{ a: { b: ["x", "\ud800"] } }, "data: /a/b[1] is '\\ud800', which has half a surrogate pair at character 1"],
    [{ ["a\udc00"]: 1 }, "data: / is 'a\\udc00', which has half"],
    [{ at: new Date(NaN) }, "data: /at is no date, which JSON cannot express"],
  ] as const) {
    assert.throws(() => encode(document), (error) => refusedAs("PAYLOAD_MALFORMED")(error) && (error as Error).message.startsWith(path));
  }
});
