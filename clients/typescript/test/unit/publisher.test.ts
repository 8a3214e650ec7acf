/** Buffered, pipelined, ordered, and safe to cut: publisher [1] to [5]. */

import assert from "node:assert/strict";
import test from "node:test";
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { Cells, type Led } from "../../src/cells.js";
import { cut, InvalidArgument, PublishFailed, SowError, Unavailable } from "../../src/errors.js";
import {
  type PublishStreamRequest,
  PublishStreamRequestSchema,
  type PublishStreamResponse,
  PublishStreamResponseSchema,
} from "../../src/gen/sow/v1/sow_pb.js";
import { ErrorReason, LifetimeKind } from "../../src/gen/sow/v1/types_pb.js";
import { type Ack, PublishCore, Publisher, type PublisherHooks } from "../../src/publisher.js";
import { type Duplex, Line } from "../../src/transport.js";

const OPTIONS = { batchRecords: 3, maxInFlight: 2, retryForMs: 10_000, connectTimeoutMs: 1_000, elsewhere: false };
const EPOCH = { publisherEpoch: 1n, publisherToken: 7n };
const NOW = { nowMs: 0, jitter: 0 };

function machine(options: Partial<typeof OPTIONS> = {}): PublishCore {
  return made(EPOCH, options);
}

function made(epoch: typeof EPOCH | undefined, options: Partial<typeof OPTIONS> = {}, way?: Led): PublishCore {
  return new PublishCore(create(PublishStreamRequestSchema, { topic: "t" }), { ...OPTIONS, ...options }, "p", epoch, way);
}

function fill(core: PublishCore, count: number, more: { key?: string; bytes?: number } = {}): void {
  for (let index = 0; index < count; index++) {
    core.append({ payload: new Uint8Array(more.bytes ?? 1), key: more.key, lifetime: undefined });
  }
}

const response = (init: MessageInitShape<typeof PublishStreamResponseSchema>) => create(PublishStreamResponseSchema, init);
const refusal = (index: number, reason: ErrorReason) => ({ index, reason, message: "no" });

function sent(core: PublishCore): [bigint, number][] {
  const told: [bigint, number][] = [];
  for (let request = core.nextRequest(); request !== undefined; request = core.nextRequest()) {
    told.push([request.publisher!.firstSequence, request.payload.length]);
  }
  return told;
}

test("sequences have no gaps, and come again in order after a cut ([1])", () => {
  const core = machine();
  fill(core, 5);
  core.seal();
  core.seal();
  assert.equal(core.hasRoom, false);
  assert.deepEqual(sent(core), [[1n, 3], [4n, 2]]);
  core.acknowledge(response({ applied: 3 }));
  core.rewind();
  assert.deepEqual(sent(core), [[4n, 2]]);
  const { ack } = core.acknowledge(response({ duplicates: 2, lastDuplicateSequence: 9n, journalEpoch: "e" }));
  assert.equal(ack.bookmark, "e.9");
  assert.deepEqual([core.applied, core.duplicates, core.unacknowledged], [3, 2, 0]);
});

test("requests that were not sent stay behind those that come again ([1])", () => {
  const core = machine();
  fill(core, 5);
  core.seal();
  core.seal();
  assert.equal(core.nextRequest()?.publisher?.firstSequence, 1n);
  core.rewind();
  assert.deepEqual(sent(core), [[1n, 3], [4n, 2]]);
});

test("a request carries the publisher's position, and columns only where they tell something", () => {
  const core = machine();
  fill(core, 1, { key: "a" });
  core.append({ payload: new Uint8Array(1), key: "b", lifetime: { kind: LifetimeKind.TTL, micros: 5n } });
  fill(core, 1); // without a key: it needs a request of its own
  core.seal();
  core.seal();
  const [keyed, plain] = [core.nextRequest()!, core.nextRequest()!];
  assert.deepEqual(keyed.key, ["a", "b"]);
  assert.deepEqual(keyed.lifetimeKind, [LifetimeKind.UNSPECIFIED, LifetimeKind.TTL]);
  assert.deepEqual(keyed.lifetimeMicros, [0n, 5n]);
  assert.deepEqual([plain.key, plain.lifetimeKind], [[], []]);
  const { publisherId, publisherEpoch, publisherToken, firstSequence } = plain.publisher!;
  assert.deepEqual([publisherId, publisherEpoch, publisherToken, firstSequence], ["p", 1n, 7n, 3n]);
});

test("requests stay small enough, and a large record travels alone ([3])", () => {
  const core = machine({ batchRecords: 100, maxInFlight: 100 });
  fill(core, 2, { bytes: 3 * 1024 * 1024 });
  assert.ok(core.isFull);
  fill(core, 1, { bytes: 16 * 1024 * 1024 });
  for (let index = 0; index < 3; index++) {
    assert.ok(core.hasRoom);
    core.seal();
  }
  assert.equal(core.hasRoom, false, "more than 16 MiB are under way");
  assert.deepEqual(sent(core).map(([, records]) => records), [1, 1, 1]);
  core.acknowledge(response({ applied: 1 }));
  core.acknowledge(response({ applied: 1 }));
  assert.equal(core.hasRoom, false, "the large one still is");
  core.acknowledge(response({ applied: 1 }));
  assert.ok(core.hasRoom);
  assert.throws(() => fill(core, 1, { bytes: 16 * 1024 * 1024 + 1 }), (error) => error instanceof InvalidArgument && error.reason === "PAYLOAD_TOO_LARGE");
});

test("a refusal of a record is counted once, with its position among all ([2])", () => {
  const core = machine();
  fill(core, 5);
  core.seal();
  core.seal();
  sent(core);
  core.acknowledge(response({ applied: 3 }));
  const { ack, error } = core.acknowledge(response({ applied: 1, refusals: [refusal(1, ErrorReason.KEY_FIELD_MISSING)] }));
  assert.equal(error, undefined);
  assert.deepEqual(ack.refusals.map(({ index, reason }) => [index, reason]), [[4, "KEY_FIELD_MISSING"]]);
  const failed = core.takeRefusals();
  assert.ok(failed instanceof PublishFailed);
  assert.deepEqual([failed.refused, failed.reason], [1, "KEY_FIELD_MISSING"]);
  assert.equal(core.takeRefusals(), undefined);
});

test("a refusal for a passing reason settles the records before it, and the rest comes again ([4])", () => {
  const core = machine();
  fill(core, 5);
  core.seal();
  core.seal();
  sent(core);
  const { error } = core.acknowledge(response({ applied: 1, refusals: [refusal(1, ErrorReason.OVERLOADED), refusal(2, ErrorReason.STREAM_BROKEN)] }));
  assert.equal(error?.reason, "OVERLOADED");
  core.rewind();
  assert.equal(core.retryDelay(error!, NOW), 50);
  assert.deepEqual(sent(core), [[2n, 2], [4n, 2]]);
  assert.deepEqual([core.applied, core.refused, core.unacknowledged], [1, 0, 4]);
});

test("the bytes of settled records count no longer ([3])", () => {
  const core = machine({ maxInFlight: 100 });
  fill(core, 2, { bytes: 2 * 1024 * 1024 });
  core.seal();
  fill(core, 1, { bytes: 14 * 1024 * 1024 });
  core.seal();
  assert.equal(core.hasRoom, false);
  sent(core);
  core.acknowledge(response({ applied: 1, refusals: [refusal(1, ErrorReason.OVERLOADED)] }));
  assert.equal(core.hasRoom, false, "16 MiB are left");
  core.rewind();
  sent(core);
  core.acknowledge(response({ applied: 1 }));
  assert.ok(core.hasRoom);
  fill(core, 1, { bytes: 2 * 1024 * 1024 - 1 });
  core.seal();
  assert.ok(core.hasRoom, "one byte below the bound");
});

test("a full disk ends it, unless there is another instance", () => {
  const full = new SowError("full", { reason: "DISK_FULL" });
  const core = machine();
  fill(core, 1);
  assert.throws(() => core.retryDelay(full, NOW), (error) => error instanceof SowError && error.details["unacknowledged"] === "1");
  assert.equal(machine({ elsewhere: true }).retryDelay(full, NOW), 50);
});

test("the time to retry is short while the server was never reached", () => {
  const unreachable = new Unavailable("x", { reason: "UNREACHABLE" });
  const core = machine();
  fill(core, 1);
  core.retryDelay(unreachable, NOW);
  assert.throws(() => core.retryDelay(unreachable, { nowMs: 1_000, jitter: 0 }), Unavailable);
  const broken = machine();
  fill(broken, 1);
  broken.retryDelay(cut("it"), NOW);
  assert.equal(broken.retryDelay(cut("it"), { nowMs: 1_000, jitter: 0 }), 100, "a stream that was cut had reached it");
  const reached = machine();
  fill(reached, 2);
  reached.seal();
  sent(reached);
  reached.acknowledge(response({ applied: 2 }));
  reached.retryDelay(unreachable, NOW);
  assert.equal(reached.retryDelay(unreachable, { nowMs: 1_000, jitter: 0 }), 100);
  assert.throws(() => reached.retryDelay(unreachable, { nowMs: 10_000, jitter: 0 }), Unavailable);
});

test("an answer that fits no request is an error", () => {
  const core = machine();
  assert.throws(() => core.acknowledge(response({})), /no request/);
  fill(core, 2);
  core.seal();
  sent(core);
  assert.throws(() => core.acknowledge(response({ applied: 3 })), /MALFORMED_RESPONSE/);
});

/** A server that answers each request by a rule. */
function server(answer: (request: PublishStreamRequest, stream: number) => PublishStreamResponse | SowError | "silence") {
  let streams = 0;
  const open = async (): Promise<Duplex<PublishStreamRequest, PublishStreamResponse>> => {
    const stream = ++streams;
    const answers: (PublishStreamResponse | SowError | "end")[] = [];
    let wake = (): void => undefined;
    const push = (each: PublishStreamResponse | SowError | "end"): void => {
      answers.push(each);
      wake();
    };
    return {
      line: new Line("a", undefined as never),
      write: async (request) => {
        const given = answer(request, stream);
        if (given !== "silence") {
          push(given);
        }
      },
      next: async () => {
        while (answers.length === 0) {
          await new Promise<void>((resolve) => {
            wake = resolve;
          });
        }
        const each = answers.shift()!;
        if (each instanceof Error) {
          throw each;
        }
        return each === "end" ? { done: true, value: undefined } : { done: false, value: each };
      },
      cancel: () => push(cut("it")),
      end: () => push("end"),
    };
  };
  return { open, streams: () => streams };
}

const applied = (request: PublishStreamRequest) => response({ applied: request.payload.length });

function publisher(open: () => Promise<Duplex<PublishStreamRequest, PublishStreamResponse>>, hooks: Partial<PublisherHooks> = {}): Publisher {
  return new Publisher(machine(), open, { lingerMs: 1, ...hooks });
}

test("flush waits for all records, over a broken stream", async () => {
  const seen: bigint[] = [];
  const { open, streams } = server((request, stream) => {
    if (stream === 1 && request.publisher!.firstSequence > 1n) {
      return cut("it");
    }
    seen.push(request.publisher!.firstSequence);
    return applied(request);
  });
  const acks: Ack[] = [];
  const stream = publisher(open, { onAck: (ack) => acks.push(ack) });
  for (let id = 0; id < 8; id++) {
    await stream.publish({ id });
  }
  await stream.flush();
  assert.deepEqual([stream.applied, stream.refused, streams()], [8, 0, 2]);
  assert.deepEqual(seen, [1n, 4n, 7n]);
  assert.equal(acks.reduce((sum, ack) => sum + ack.applied, 0), 8);
  await stream.close();
  await assert.rejects(stream.publish({}), /the publisher is closed/);
});

test("records go by themselves after the linger", async () => {
  const done = new Promise<void>((resolve) => {
    const { open } = server(applied);
    void publisher(open, { onAck: () => resolve() }).publish({ id: 1 });
  });
  await done;
});

test("producers wait while too many requests are under way ([3])", async () => {
  let release: PublishStreamRequest[] = [];
  const { open } = server((request) => {
    release.push(request);
    return "silence";
  });
  const stream = publisher(open);
  await stream.publish({ id: 1 });
  for (let id = 2; id <= 6; id++) {
    await stream.publish({ id });
  }
  let waited = true;
  const blocked = Promise.all([7, 8, 9].map((id) => stream.publish({ id }))).then(() => {
    waited = false;
  });
  blocked.catch(() => undefined);
  await new Promise((resolve) => setImmediate(resolve));
  assert.ok(waited);
  assert.equal(release.length, 2);
  stream.abort();
  await assert.rejects(blocked, /closed/);
  release = [];
});

test("refusals are thrown by flush, or told to onRefusal", async () => {
  const { open } = server((request) =>
    response({ applied: request.payload.length - 1, refusals: [refusal(0, ErrorReason.PAYLOAD_MALFORMED)] }),
  );
  const stream = publisher(open);
  await stream.publish({ id: 1 });
  await assert.rejects(stream.flush(), PublishFailed);
  await stream.flush();
  await stream.close();
  const told: number[] = [];
  const calm = publisher(open, { onRefusal: ({ index }) => told.push(index) });
  await calm.publish({ id: 1 });
  await calm.close();
  assert.deepEqual(told, [0]);
});

test("a publisher that has failed stays failed ([5])", async () => {
  const { open } = server((request) => response({ refusals: [refusal(0, ErrorReason.PUBLISHER_FENCED)], applied: 0 * request.payload.length }));
  const stream = publisher(open);
  await stream.publish({ id: 1 });
  for (let times = 0; times < 2; times++) {
    await assert.rejects(stream.flush(), (error) => error instanceof SowError && error.reason === "PUBLISHER_FENCED");
  }
  await assert.rejects(stream.publish({ id: 2 }), /PUBLISHER_FENCED/);
  await assert.rejects(stream.close(), /PUBLISHER_FENCED/);
});

test("an error of a callback ends the publisher with that error", async () => {
  const { open } = server(applied);
  const stream = publisher(open, {
    onAck: () => {
      throw new Error("mine");
    },
  });
  await stream.publish({ id: 1 });
  await assert.rejects(stream.flush(), /mine/);
  stream.abort();
});

test("the epoch of a given id is asked for before the first request", async () => {
  const { open } = server((request) => {
    assert.equal(request.publisher!.publisherEpoch, 5n);
    assert.equal(request.publisher!.publisherToken, 9n);
    return applied(request);
  });
  const nextEpoch = async () => ({ publisherEpoch: 5n, publisherToken: 9n });
  const stream = new Publisher(made(undefined), open, { lingerMs: 1, nextEpoch });
  await stream.publish({ id: 1 });
  await stream.close();
  assert.equal(stream.applied, 1);
});

test("removals and puts of one request stay in their order, and wait for a server that knows them", () => {
  const core = machine();
  core.append({ payload: new Uint8Array(1), key: undefined, lifetime: undefined });
  core.append({ payload: new Uint8Array(), key: "a", lifetime: undefined, removes: true });
  core.append({ payload: new Uint8Array(1), key: undefined, lifetime: undefined });
  core.seal();
  assert.deepEqual([core.nextRequest(), core.mustReopen, core.removes], [undefined, true, true]);
  core.rewind();
  assert.equal(core.retryDelay(cut("the stream"), NOW), 0);
  core.knowsRemovals = true;
  const request = core.nextRequest()!;
  assert.deepEqual([request.key, request.remove], [["", "a", ""], [false, true, false]]);
  const { ack } = core.acknowledge(response({ applied: 2, removed: 1, refusals: [refusal(2, ErrorReason.OVERLOADED)] }));
  assert.equal(ack.removed, 1);
  core.rewind();
  const rest = core.nextRequest()!;
  assert.deepEqual([rest.key, rest.remove], [[""], [false]]);
});

// ---- cells (rule C13) ----

const details = { topic: "t", cell: "b", servers: "127.0.0.1:1", from_cell: "a" };
const elsewhere = (index: number) => ({ index, reason: ErrorReason.TOPIC_ELSEWHERE, message: "there", details });

for (const opens of [false, true]) {
  test(`in the cell of its topic the unsettled records begin an epoch; of the program's id: ${opens} ([6])`, () => {
    const way = new Cells("home", (servers) => servers).way("t");
    const core = made(opens ? undefined : EPOCH, {}, way);
    core.opened(EPOCH);
    fill(core, 5);
    core.seal();
    core.seal();
    assert.deepEqual(sent(core), [[1n, 3], [4n, 2]]);
    const { ack, error } = core.acknowledge(response({ applied: 1, refusals: [elsewhere(1)] }));
    assert.deepEqual([ack.applied, core.refused, error?.details["cell"]], [1, 0, "b"]);
    core.rewind();
    assert.equal(core.retryDelay(error!, NOW), 0);
    assert.deepEqual([way.place.cell, way.place.transport, core.wantsEpoch], ["b", "127.0.0.1:1", opens]);
    if (opens) {
      core.opened({ publisherEpoch: 2n, publisherToken: 8n });
    }
    const again = core.nextRequest()!;
    assert.deepEqual([again.publisher!.firstSequence, again.payload.length, again.publisher!.publisherEpoch], [1n, 2, 2n]);
    assert.notEqual(again.publisher!.publisherToken, 7n, "that one is of the cell before");
    assert.deepEqual(sent(core), [[3n, 2]]);
    fill(core, 1);
    core.seal();
    assert.deepEqual(sent(core), [[5n, 1]]);
  });
}

test("while two cells contradict each other a publisher tries again, for a while ([6])", () => {
  const way = new Cells("home", (servers) => servers).way("t");
  const core = made(EPOCH, {}, way);
  fill(core, 1);
  core.seal();
  const refused = (from: string, cell: string) => {
    sent(core);
    const { error } = core.acknowledge(response({ refusals: [{ ...elsewhere(0), details: { ...details, cell, from_cell: from } }] }));
    core.rewind();
    return error!;
  };
  const circle = (nowMs: number) => {
    assert.equal(core.retryDelay(refused("a", "b"), { nowMs, jitter: 0 }), 0);
    assert.equal(core.retryDelay(refused("b", "a"), { nowMs, jitter: 0 }), 0);
    return core.retryDelay(refused("a", "b"), { nowMs, jitter: 0 });
  };
  assert.equal(circle(0), 50);
  assert.equal(way.place.cell, "", "home is asked again");
  assert.throws(
    () => circle(9_999),
    (error) => error instanceof SowError && error.reason === "TOPIC_ELSEWHERE" && /their placements differ; 0 records were/.test(error.message),
  );
});
