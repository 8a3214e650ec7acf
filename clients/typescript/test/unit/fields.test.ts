import assert from "node:assert/strict";
import { test } from "node:test";

import { fieldsOf } from "../../src/fields.js";

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
