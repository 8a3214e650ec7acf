/** Keys, documents and durations. */

import assert from "node:assert/strict";
import test from "node:test";
import { encode, recordKey, recordKeys } from "../../src/documents.js";
import { dateOf, lifetimeMessage, micros, momentMicros } from "../../src/durations.js";
import { InvalidArgument } from "../../src/errors.js";

const refusedAs = (reason: string) => (error: unknown) => error instanceof InvalidArgument && error.reason === reason;

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
  for (const key of [2 ** 53, NaN, Infinity, null, undefined, {}, [[1]]]) {
    assert.throws(() => recordKey(key as never), refusedAs("INVALID_ARGUMENT"), String(key));
  }
  assert.throws(() => recordKey("\ud800"), refusedAs("KEY_NOT_UTF8"), "an encoder would put another character there");
  assert.throws(() => recordKeys("abc"), refusedAs("INVALID_ARGUMENT"), "a text is no list of keys");
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
  assert.deepEqual(lifetimeMessage(undefined, new Date(5))?.lifetime, { case: "expireTimeMicros", value: 5_000n });
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
