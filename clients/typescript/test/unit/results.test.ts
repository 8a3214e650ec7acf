/** The list of a live result: results [1] and [2]. */

import assert from "node:assert/strict";
import test from "node:test";
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { InternalError, ResyncRequired, SowError, Unavailable } from "../../src/errors.js";
import {
  ChangeOp,
  ChangeReason,
  SubscribeRequestSchema,
  type SubscribeResponse,
  SubscribeResponseSchema,
} from "../../src/gen/sow/v1/sow_pb.js";
import { needed } from "../../src/needs.js";
import { liveResultRequest } from "../../src/requests.js";
import { applied, differences, ResultCore } from "../../src/results.js";

type Rows = readonly (readonly [key: string, version: number])[];
type Frame = NonNullable<MessageInitShape<typeof SubscribeResponseSchema>["frame"]>;
const { PUT, OOF } = ChangeOp;
const OPTIONS = { retryForMs: 60_000, connectTimeoutMs: 5_000, onInterruption: undefined };
const LOST = new Unavailable("x", { reason: "STREAM_CUT" });

function frame(content: Frame): SubscribeResponse {
  return create(SubscribeResponseSchema, { frame: content });
}

function columns(rows: Rows) {
  const numbers = rows.map(([, version]) => BigInt(version));
  return {
    key: rows.map(([key]) => key),
    payload: rows.map(() => Buffer.from("{}")),
    version: numbers,
    publishTimeMicros: numbers,
    expireTimeMicros: numbers,
    sequence: numbers,
    origins: ["here"],
  };
}

function core(): ResultCore {
  const made = new ResultCore(liveResultRequest("t", "", { orderBy: "/x", topN: 5 }), OPTIONS);
  assert.equal(made.request(0).sow, true);
  return made;
}

function snapshot(to: ResultCore, rows: Rows, bookmark: string): void {
  to.feed(frame({ case: "snapshotBegin", value: { bookmark } }));
  to.feed(frame({ case: "snapshot", value: { topic: "t", records: columns(rows) } }));
  to.feed(frame({ case: "snapshotEnd", value: { bookmark } }));
}

type Told = readonly [op: ChangeOp, key: string, version: number, position: number, reason?: ChangeReason];

function changes(told: readonly Told[], bookmark: string): SubscribeResponse {
  const value = {
    topic: "t",
    op: told.map(([op]) => op),
    records: columns(told.map(([, key, version]) => [key, version])),
    position: told.map(([, , , position]) => position),
    reason: told.map(([, , , , reason]) => reason ?? ChangeReason.UNSPECIFIED),
    bookmark,
    more: bookmark === "",
  };
  return frame({ case: "changes", value });
}

function taken(from: ResultCore): unknown[] {
  const all: unknown[] = [];
  for (let change = from.take(); change !== undefined; change = from.take()) {
    const at = change.op === "put" ? change.position : change.previous.version;
    all.push([change.op, change.reason, change.key, at, change.bookmark]);
  }
  return all;
}

const keys = (of: ResultCore) => of.rows.map(({ key }) => key).join("");

test("the list moves once all changes of an interval are there, and an oof has the record that was in it ([1])", () => {
  const result = core();
  snapshot(result, [["a", 1], ["b", 2], ["c", 3]], "e.3");
  assert.deepEqual([keys(result), result.bookmark, taken(result), result.behind], ["abc", "e.3", [], false]);
  result.feed(changes([[OOF, "b", 0, 0, ChangeReason.WINDOW], [OOF, "c", 0, 0, ChangeReason.DELETED]], ""));
  assert.deepEqual([keys(result), result.bookmark, taken(result)], ["abc", "e.3", []]);
  result.feed(frame({ case: "progress", value: { bookmark: "e.4" } }));
  assert.equal(result.bookmark, "e.3", "the list is not there yet");
  result.feed(changes([[PUT, "d", 5, 0], [PUT, "a", 6, 1]], "e.6"));
  assert.deepEqual([keys(result), result.bookmark], ["da", "e.6"]);
  assert.deepEqual(taken(result), [
    ["oof", "window", "b", 2n, null],
    ["oof", "deleted", "c", 3n, null],
    ["put", null, "d", 0, null],
    ["put", null, "a", 1, "e.6"],
  ]);
  result.feed(frame({ case: "progress", value: { bookmark: "e.9" } }));
  assert.equal(result.bookmark, "e.9");
});

test("after a loss it asks for a snapshot, and tells the differences ([2], rule S13)", () => {
  const result = core();
  snapshot(result, [["a", 1], ["b", 2]], "e.2");
  result.feed(changes([[OOF, "a", 0, 0]], "")); // the rest of it is lost
  const ended = () => result.ended(LOST, { nowMs: 0, jitter: 0 });
  assert.ok(ended() >= 0);
  const request = result.request(0);
  assert.deepEqual([request.sow, request.start.case], [true, undefined]);
  snapshot(result, [["c", 3], ["b", 2]], "f.1");
  assert.deepEqual(taken(result), [["oof", null, "a", 1n, null], ["put", null, "c", 0, "f.1"]]);
  assert.equal(keys(result), "cb");
  const again = result.ended(new ResyncRequired("x", { reason: "RESYNC_REQUIRED" }), { nowMs: 0, jitter: 0 });
  assert.ok(again >= 0);
  assert.throws(() => result.ended(new SowError("x", { reason: "RESULT_TOO_LARGE" }), { nowMs: 0, jitter: 0 }), SowError);
});

test("any list becomes any other by the differences between them (rule S11)", () => {
  let seed = 7;
  const random = (below: number): number => (seed = (seed * 48_271) % 2_147_483_647) % below;
  const made = (): ResultCore => {
    const result = core();
    const rows = new Map(Array.from({ length: random(8) }, () => ["abcdefg"[random(7)]!, random(2)] as const));
    snapshot(result, [...rows], "e.1");
    return result;
  };
  for (let round = 0; round < 300; round++) {
    const [before, after] = [made().rows, made().rows];
    assert.deepEqual(applied(before, differences(before, after)), after);
    assert.deepEqual(differences(after, after), []);
  }
});

test("frames that fit no list are refused", () => {
  const standing = () => {
    const result = core();
    snapshot(result, [["a", 1]], "e.1");
    return result;
  };
  assert.throws(() => standing().feed(changes([[PUT, "b", 2, 2]], "e.2")), InternalError);
  assert.throws(() => standing().feed(changes([[ChangeOp.DELETE, "a", 2, 0]], "e.2")), InternalError);
  const value = { topic: "t", op: [PUT], records: columns([["a", 2]]), bookmark: "e.2" };
  assert.throws(() => standing().feed(frame({ case: "changes", value })), InternalError, "no position");
});

test("a request needs an order and a length, or groups, and a server that knows them", () => {
  const refused = (options: object, field: string) =>
    assert.throws(
      () => liveResultRequest("t", "", options),
      (error) => error instanceof SowError && error.message.includes(field),
    );
  refused({}, "orderBy");
  refused({ orderBy: "/x" }, "topN");
  refused({ orderBy: "/x", topN: 0 }, "topN");
  refused({ orderBy: "/x", topN: 1, skipN: -1 }, "skipN");
  const groups = liveResultRequest("t", "/a", { groupBy: ["/g"], aggregate: { n: "COUNT(*)" }, having: "/n > 1" });
  assert.deepEqual([groups.sow, groups.oof, groups.filter, groups.having], [true, true, "/a", "/n > 1"]);
  assert.deepEqual(needed(SubscribeRequestSchema, groups)?.contract, 3);
});
