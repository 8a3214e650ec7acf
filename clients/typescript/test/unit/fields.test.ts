import assert from "node:assert/strict";
import { test } from "node:test";

import { InvalidArgument } from "../../src/errors.js";
import { fieldsOf, fieldsPayload } from "../../src/fields.js";

const fix = (text: string) => fieldsOf(Buffer.from(text), "|", true);

test("a data field of fix holds the separator", () => {
  assert.deepEqual(fix("95=6|96=a|55=Z|55=ACME|44=1|"), { "95": "6", "96": "a|55=Z", "55": "ACME", "44": "1" });
  assert.deepEqual(fix("95=3|96=a|b"), { "95": "3", "96": "a|b" });
  assert.deepEqual(fix("95=0|96=|55=A"), { "95": "0", "96": "", "55": "A" });
});

test("a length that is not true is a plain field, as at the server", () => {
  assert.deepEqual(fix("95=60|96=ab|55=A|"), { "95": "60", "96": "ab", "55": "A" });
  assert.deepEqual(fix("95=3|55=A|96=a|b=1"), { "95": "3", "55": "A", "96": "a", b: "1" });
});

test("055 is tag 55, the first of repeated fields counts, and nvfix has none of this", () => {
  assert.deepEqual(fix("055=A|55=B||"), { "55": "A" });
  assert.deepEqual(fieldsOf(Buffer.from("95=3|96=a|b=1|055=x"), "|", false), { "95": "3", "96": "a", b: "1", "055": "x" });
});

test("bytes that are not UTF-8 are shown", () => {
  assert.deepEqual(fieldsOf(Buffer.from("a=\xe9\xff|b=\xc3\xa9\xf0\x9f", "latin1"), "|", false), { a: "\\xe9\\xff", b: "é\\xf0\\x9f" });
});

test("an object becomes the fields of fix and nvfix, and a data field its length", () => {
  const payload = (document: object, tags: boolean) => Buffer.from(fieldsPayload(document, "|", tags)).toString();
  assert.equal(payload({ sym: "é", n: 1.5, big: 2n ** 70n, b: new Uint8Array([65]), gone: undefined }, false), `sym=é|n=1.5|big=${2n ** 70n}|b=A|`);
  const read = fix(payload({ 96: "a|55=Z", 55: "ACME" }, true));
  assert.deepEqual([read["96"], read["55"]], ["a|55=Z", "ACME"]);
  assert.equal(payload({ 58: "x", 96: "plain" }, true), "58=x|96=plain|");
  for (const [document, tags, fault] of [
    [{ "05": "a", 5: "b" }, true, "/05 is there twice"],
    [{ sym: "a" }, true, "/sym is no tag"],
    [{ "a=b": "a" }, false, "/a=b is no name of a field"],
    [{ "": "a" }, false, "is no name of a field"],
    [{ a: "x|y" }, false, "/a holds the separator of the fields"],
    [{ 58: "x|y" }, true, "/58 holds the separator of the fields"],
    [{ 95: "7", 96: "x|y" }, true, "/96 holds the separator of the fields"],
    [{ a: null }, false, "/a is null, of type null; give text, bytes or a number"],
    [{ a: true }, false, "/a is true, of type boolean"],
    [{ a: { b: 1 } }, false, "/a is { b: 1 }, of type Object"],
    [{ a: NaN }, false, "/a is NaN"],
    [{ a: "\ud800" }, false, "half a surrogate pair"],
    [["a"], false, "is no object of names and values"],
  ] as const) {
    assert.throws(
      () => fieldsPayload(document, "|", tags),
      (error) => error instanceof InvalidArgument && error.reason === "PAYLOAD_MALFORMED" && error.text.includes(fault),
      fault,
    );
  }
});
