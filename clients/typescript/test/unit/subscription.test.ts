/** Every change once and in order, however often the call breaks: subscription [1] to [4]. */

import assert from "node:assert/strict";
import test from "node:test";
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { cut, InternalError, ResyncRequired, SowError, Unavailable } from "../../src/errors.js";
import {
  ChangeBatchSchema,
  ChangeOp,
  ChangeReason,
  type SubscribeRequest,
  SubscribeRequestSchema,
  type SubscribeResponse,
  SubscribeResponseSchema,
} from "../../src/gen/sow/v1/sow_pb.js";
import { Subscription, SubscriptionCore } from "../../src/subscription.js";
import { type Frames, Line } from "../../src/transport.js";

const OPTIONS = { retryForMs: 60_000, connectTimeoutMs: 5_000, onInterruption: undefined };
const NOW = { nowMs: 0, jitter: 0 };
const failure = (reason: string) => new Unavailable("x", { reason });

type Frame = NonNullable<MessageInitShape<typeof SubscribeResponseSchema>["frame"]>;

function frame(content: Frame): SubscribeResponse {
  return create(SubscribeResponseSchema, { frame: content });
}

type More = Omit<Extract<MessageInitShape<typeof ChangeBatchSchema>, { $typeName?: never }>, "records" | "$typeName">;

const progress = (bookmark: string, more: { covers?: boolean; behind?: boolean } = {}) => frame({ case: "progress", value: { bookmark, ...more } });
const begin = (bookmark: string) => frame({ case: "snapshotBegin", value: { bookmark } });
const end = (bookmark: string) => frame({ case: "snapshotEnd", value: { bookmark } });
const snapshot = (...keys: string[]) => frame({ case: "snapshot", value: { topic: "t", records: columns(keys, 1n) } });

function changes(first: bigint, count: number, more: More = {}) {
  const records = columns(Array.from({ length: count }, (_, index) => `k${first + BigInt(index)}`), first);
  const bookmark = more.more ? "" : `e.${first + BigInt(count) - 1n}`;
  const op = Array.from({ length: count }, () => ChangeOp.PUT);
  const value = create(ChangeBatchSchema, { topic: "t", op, records, bookmark, ...more });
  return frame({ case: "changes", value });
}

function columns(key: string[], first: bigint) {
  const numbers = key.map((_, index) => first + BigInt(index));
  return {
    key,
    payload: key.map((each) => Buffer.from(JSON.stringify({ id: each }))),
    version: numbers,
    publishTimeMicros: numbers,
    expireTimeMicros: numbers.map(() => 2n ** 63n - 1n),
    sequence: numbers,
    origins: ["here"],
  };
}

function taken(core: SubscriptionCore): string[] {
  const told: string[] = [];
  for (let change = core.take(); change !== undefined; change = core.take()) {
    told.push("key" in change ? `${change.op} ${change.key}` : change.op);
  }
  return told;
}

function follower(request: MessageInitShape<typeof SubscribeRequestSchema> = {}, options = {}): SubscriptionCore {
  const core = new SubscriptionCore(create(SubscribeRequestSchema, { topic: "t", ...request }), { ...OPTIONS, ...options });
  core.request(0);
  return core;
}

/** Where the next call begins. */
function start(core: SubscriptionCore): string | undefined {
  const request: SubscribeRequest = core.request(0);
  return request.start.case === "bookmark" ? request.start.value : undefined;
}

test("a call that breaks goes on after the last change that was handed out ([1], [2])", () => {
  const core = follower();
  core.feed(progress("e.10"));
  core.feed(changes(11n, 3));
  assert.equal(core.take()?.bookmark, "e.11");
  assert.equal(core.bookmark, "e.11", "two changes of the frame wait");
  assert.deepEqual(taken(core), ["put k12", "put k13"]);
  assert.equal(core.ended(cut("it"), NOW), 50);
  assert.equal(start(core), "e.13");
  core.feed(progress("e.13"));
  core.feed(changes(14n, 1));
  assert.deepEqual(taken(core), ["put k14"]);
});

test("an atomic request that broke in its middle is told once ([1])", () => {
  const core = follower();
  core.feed(progress("e.10"));
  core.feed(changes(11n, 2, { more: true, atomic: true }));
  assert.deepEqual([core.take()?.bookmark, core.take()?.bookmark], [null, null]);
  assert.equal(core.bookmark, "e.10", "inside it is no place to resume at");
  core.ended(cut("it"), NOW);
  assert.equal(start(core), "e.10");
  core.feed(progress("e.10"));
  core.feed(changes(11n, 2, { more: true, atomic: true }));
  assert.deepEqual(taken(core), []);
  core.feed(changes(13n, 2, { atomic: true }));
  assert.deepEqual([core.take()?.bookmark, core.take()?.bookmark], [null, "e.14"]);
  core.feed(changes(15n, 1));
  assert.deepEqual(taken(core), ["put k15"]);
});

test("an atomic request that comes again in other frames is told once, too ([1])", () => {
  const core = follower();
  core.feed(progress("e.10;f.3"));
  core.feed(changes(11n, 2, { more: true, atomic: true }));
  assert.deepEqual(taken(core), ["put k11", "put k12"]);
  assert.equal(core.bookmark, "e.10;f.3", "inside it is no place to resume at");
  core.ended(cut("it"), NOW);
  assert.equal(start(core), "e.10;f.3");
  core.feed(progress("e.10;f.3"));
  core.feed(changes(11n, 4, { atomic: true }));
  assert.deepEqual(taken(core), ["put k13", "put k14"]);
  assert.equal(core.bookmark, "e.14;f.3");
});

test("a snapshot comes before the changes, and is not asked for again", () => {
  const core = follower({ sow: true });
  core.feed(begin("e.5"));
  core.feed(snapshot("a", "b"));
  assert.deepEqual(taken(core), ["sow a", "sow b"]);
  assert.equal(core.bookmark, null, "inside a snapshot there is no place to resume at");
  core.feed(end("e.5"));
  assert.deepEqual(taken(core), ["snapshot_end"]);
  core.ended(failure("STOPPING"), NOW);
  const request = core.request(0);
  assert.deepEqual([request.sow, request.start.value], [false, "e.5"]);
});

test("a snapshot that cannot continue begins anew, with a resync where there is something to forget ([3])", () => {
  const core = follower({ sow: true });
  core.feed(begin("e.5"));
  core.ended(cut("it"), NOW);
  core.request(0);
  core.feed(begin("e.6"));
  assert.deepEqual(taken(core), [], "nothing was handed out");
  core.feed(snapshot("a"));
  taken(core);
  core.feed(end("e.6"));
  taken(core);
  core.ended(new ResyncRequired("x", { reason: "BOOKMARK_TOO_OLD" }), NOW);
  assert.equal(core.request(0).sow, true);
  core.feed(begin("f.1"));
  assert.deepEqual(taken(core), ["resync"]);
  core.ended(cut("it"), NOW);
  core.request(0);
  core.feed(begin("f.2"));
  assert.deepEqual(taken(core), [], "nothing has come since the resync");
  core.feed(end("f.2"));
  assert.deepEqual(taken(core), ["snapshot_end"]);
});

test("without a snapshot a lost position is an error with the bookmark reached ([3])", () => {
  const core = follower();
  core.feed(progress("e.10"));
  core.feed(changes(11n, 1));
  taken(core);
  assert.throws(
    () => core.ended(new ResyncRequired("x", { reason: "RESYNC_REQUIRED" }), NOW),
    (error) => error instanceof ResyncRequired && error.bookmark === "e.11",
  );
});

test("marks of other instances end the bookmarks, until others come (rule F6)", () => {
  const core = follower();
  core.feed(progress("e.10;t=7;f.3", { covers: true }));
  core.feed(changes(11n, 1));
  assert.equal(core.take()?.bookmark, "e.11;t=7;f.3");
  assert.equal(core.bookmark, "e.11;t=7;f.3");
  core.ended(cut("it"), NOW);
  assert.equal(start(core), "e.11;t=7;f.3");
  // Another instance answers, whose sequences are lower.
  core.feed(progress("f.3;t=7;h=e.11"));
  assert.equal(core.covers, false);
  core.feed(changes(4n, 1, { bookmark: "f.4" }));
  assert.equal(core.take()?.bookmark, "f.4;t=7;h=e.11");
});

test("a subscription is behind until the server says that it has caught up, and again after a break (rule S5)", () => {
  const core = follower();
  core.feed(progress("e.10", { behind: true }));
  core.feed(changes(11n, 1));
  core.take();
  assert.equal(core.behind, true);
  core.feed(progress("e.11"));
  assert.equal(core.behind, false);
  core.ended(cut("it"), NOW);
  start(core);
  assert.equal(core.behind, true);
});

test("an older server gets the bookmark without its marks", () => {
  const core = follower();
  core.feed(progress("e.10;t=7;f.3"));
  core.ended(cut("it"), NOW);
  core.request(0);
  core.ended(new SowError("x", { reason: "BOOKMARK_MALFORMED" }), NOW);
  assert.equal(start(core), "e.10");
  assert.throws(() => core.ended(new SowError("x", { reason: "BOOKMARK_MALFORMED" }), NOW), /BOOKMARK_MALFORMED/);
});

test("a change of permissions takes a new snapshot", () => {
  const core = follower({ sow: true });
  core.feed(begin("e.5"));
  core.feed(end("e.5"));
  taken(core);
  core.ended(failure("ACCESS_CHANGED"), NOW);
  assert.equal(core.request(0).sow, true);
});

test("it gives up: after the time to connect at first, and after the time to retry later", () => {
  const first = follower();
  assert.equal(first.ended(failure("UNREACHABLE"), { nowMs: 4_000, jitter: 0 }), 50);
  assert.throws(() => first.ended(failure("UNREACHABLE"), { nowMs: 4_950, jitter: 0 }), /UNREACHABLE/);
  const told: (string | null)[] = [];
  const core = follower({}, { onInterruption: (error: SowError | null) => told.push(error?.reason ?? null) });
  core.feed(progress("e.1"));
  core.ended(failure("UNREACHABLE"), { nowMs: 100_000, jitter: 0 });
  core.ended(failure("UNREACHABLE"), { nowMs: 159_000, jitter: 0 });
  core.request(0);
  core.feed(progress("e.1"));
  assert.deepEqual(told, ["UNREACHABLE", null], "once for each interruption");
  core.feed(progress("e.1"));
  core.ended(failure("UNREACHABLE"), { nowMs: 160_000, jitter: 0 });
  assert.throws(() => core.ended(failure("UNREACHABLE"), { nowMs: 221_000, jitter: 0 }), /UNREACHABLE/);
});

test("a failed store is a reason to go on elsewhere, where there is an elsewhere", () => {
  const core = follower();
  core.feed(progress("e.1"));
  assert.equal(core.ended(failure("STORE_FAILED"), { ...NOW, elsewhere: true }), 50);
  assert.throws(() => core.ended(failure("STORE_FAILED"), NOW), /STORE_FAILED/);
});

test("each kind of change has its form", () => {
  const core = follower();
  core.feed(progress("e.1"));
  const kinds: [ChangeOp, ChangeReason, string, string | null, boolean][] = [
    [ChangeOp.PUT, ChangeReason.UNSPECIFIED, "put", null, true],
    [ChangeOp.PUT, ChangeReason.TOUCHED, "put", "touched", true],
    [ChangeOp.OOF, ChangeReason.DELETED, "oof", "deleted", false],
    [ChangeOp.OOF, ChangeReason.EXPIRED, "oof", "expired", false],
    [ChangeOp.OOF, ChangeReason.MATCH, "oof", "match", true],
    [ChangeOp.OOF, ChangeReason.NOT_PERMITTED, "oof", "not_permitted", true],
    [ChangeOp.DELETE, ChangeReason.UNSPECIFIED, "delete", null, false],
    [ChangeOp.EXPIRE, ChangeReason.UNSPECIFIED, "expire", null, false],
  ];
  core.feed(changes(2n, kinds.length, { op: kinds.map(([op]) => op), reason: kinds.map(([, reason]) => reason) }));
  for (const [, , op, reason, isPresent] of kinds) {
    const change = core.take()!;
    assert.deepEqual([change.op, change.reason, "record" in change], [op, reason, isPresent]);
  }
  core.feed(changes(10n, 1, { isDelta: [true], unsetPaths: [{ paths: ["/a"] }] }));
  const delta = core.take()!;
  assert.ok(delta.op === "put" && delta.isDelta);
  assert.deepEqual(delta.unsetPaths, ["/a"]);
});

test("an answer that the contract does not allow is an error", () => {
  for (const wrong of [
    changes(2n, 1, { op: [] }),
    changes(2n, 1, { op: [99 as ChangeOp] }),
    changes(2n, 1, { bookmark: "" }),
    changes(2n, 2, { isDelta: [true] }),
    snapshot("a"),
    begin("e.1"),
  ]) {
    const core = follower();
    core.feed(progress("e.1"));
    assert.throws(() => core.feed(wrong), (error) => error instanceof InternalError && error.reason === "MALFORMED_RESPONSE");
  }
  const core = follower();
  assert.throws(() => core.feed(changes(2n, 1)), InternalError, "nothing comes before the confirmation");
  core.feed(create(SubscribeResponseSchema)); // a kind of frame of a newer server
});

/** Calls that give these frames and then break, or wait for `cancel`. */
function calls(...scripts: (SubscribeResponse | SowError)[][]) {
  const requests: SubscribeRequest[] = [];
  const line = new Line("a", undefined as never);
  const open = async (request: SubscribeRequest): Promise<Frames<SubscribeResponse>> => {
    requests.push(request);
    const script = [...(scripts.shift() ?? [])];
    let cancel = (): void => undefined;
    const cancelled = new Promise<never>((_, reject) => {
      cancel = () => reject(cut("it"));
    });
    cancelled.catch(() => undefined);
    const next = async () => {
      const step = script.shift();
      if (step instanceof Error) {
        throw step;
      }
      return step === undefined ? await cancelled : { done: false as const, value: step };
    };
    return { line, next, cancel };
  };
  return { open, requests, line };
}

const QUICK = { ...OPTIONS, elsewhere: false };

test("leaving the loop, and close, end the call ([4])", async () => {
  const { open, line } = calls([progress("e.1"), changes(2n, 3)]);
  const subscription = new Subscription(create(SubscribeRequestSchema, { topic: "t" }), open, QUICK);
  await subscription.opened();
  assert.equal(line.followers.size, 1);
  for await (const change of subscription) {
    assert.equal(change.op, "put");
    break;
  }
  assert.equal(line.followers.size, 0);
  assert.equal(subscription.bookmark, "e.2");
  assert.deepEqual(await subscription.next(), { done: true, value: undefined });

  const waiting = new Subscription(create(SubscribeRequestSchema, { topic: "t" }), calls([progress("e.1")]).open, QUICK);
  await waiting.opened();
  const next = waiting.next();
  waiting.close();
  assert.deepEqual(await next, { done: true, value: undefined });
});

test("after a break the next call goes on, and a fatal error ends it ([4])", async () => {
  const fatal = new SowError("gone", { reason: "TOPIC_DELETED" });
  const { open, requests } = calls([progress("e.1"), changes(2n, 1), cut("it")], [progress("e.2"), changes(3n, 1), fatal]);
  const subscription = new Subscription(create(SubscribeRequestSchema, { topic: "t" }), open, QUICK);
  const told: string[] = [];
  await assert.rejects(async () => {
    for await (const change of subscription) {
      told.push(change.bookmark!);
    }
  }, /gone \(TOPIC_DELETED\)/);
  assert.deepEqual(told, ["e.2", "e.3"]);
  assert.equal(requests[1]!.start.value, "e.2");
  assert.equal((await subscription.next()).done, true);
});

test("a move to another instance ends the call, and the next one goes on", async () => {
  const { open, line, requests } = calls([progress("e.1"), changes(2n, 1)], [progress("e.2"), changes(3n, 1)]);
  const subscription = new Subscription(create(SubscribeRequestSchema, { topic: "t" }), open, QUICK);
  assert.equal((await subscription.next()).value?.bookmark, "e.2");
  const next = subscription.next();
  line.followers.forEach((endCall) => endCall());
  assert.equal((await next).value?.bookmark, "e.3");
  assert.equal(requests.length, 2);
  subscription.close();
});
