/** Subscriptions over several cells: outages, cells that come, and topics that move: joined [1] to [6], joining [1] (rule C21). */

import assert from "node:assert/strict";
import test from "node:test";
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { AllRefused, closed, cut, DeadlineExceeded, invalid, NotFound, ResyncRequired, type SowError, Unavailable } from "../../src/errors.js";
import {
  ChangeOp,
  type SubscribeRequest,
  SubscribeRequestSchema,
  type SubscribeResponse,
  SubscribeResponseSchema,
} from "../../src/gen/sow/v1/sow_pb.js";
import { gone, JoinedCore, type PartCore } from "../../src/joined.js";
import { JoinedSubscription, Parts } from "../../src/joining.js";
import type { Change } from "../../src/records.js";
import type { Bookmarks } from "../../src/requests.js";
import { type Frames, Line } from "../../src/transport.js";

const NOTHING = new NotFound("no topic matches", { reason: "PATTERN_MATCHES_NOTHING" });
const CUT = new Unavailable("the connection broke", { reason: "UNREACHABLE" });
const NOW = { nowMs: 0, jitter: 0.5 };
const OPTIONS = { retryForMs: 30_000, connectTimeoutMs: 5_000, onInterruption: undefined };

type Frame = NonNullable<MessageInitShape<typeof SubscribeResponseSchema>["frame"]>;

interface Entry {
  readonly topic: string;
  readonly key: string;
  readonly value: string;
  readonly sequence: bigint;
}

const frame = (content: Frame) => create(SubscribeResponseSchema, { frame: content });
const progress = (bookmark: string) => frame({ case: "progress", value: { bookmark } });
const left = (version: bigint) => frame({ case: "topicsLeft", value: { placementVersion: version } });

function columns(entries: readonly Entry[]) {
  const numbers = entries.map(({ sequence }) => sequence);
  return {
    key: entries.map(({ key }) => key),
    payload: entries.map(({ value }) => Buffer.from(value)),
    version: numbers,
    publishTimeMicros: numbers,
    expireTimeMicros: numbers.map(() => 2n ** 63n - 1n),
    sequence: numbers,
    origins: ["here"],
  };
}

/** A cell, and the call that follows it. */
class Cell {
  readonly name: string;
  readonly topics: Set<string>;
  version = 1n;
  journal: Entry[] = [];
  call: Iterator<SubscribeResponse | undefined> | undefined;
  seen = new Set<string>();
  /** The call ends once everything up to there is sent; the journal may go on. */
  leavesAt: number | undefined;

  constructor(name: string, topics: string[]) {
    this.name = name;
    this.topics = new Set(topics);
  }

  bookmark(sequence: number): string {
    return `${this.name.repeat(4)}.${sequence}`;
  }

  publish(topic: string, value: string): void {
    this.journal.push({ topic, key: "k", value, sequence: BigInt(this.journal.length + 1) });
  }

  changes(entry: Entry): SubscribeResponse {
    const { topic, sequence } = entry;
    const bookmark = this.bookmark(Number(sequence));
    return frame({ case: "changes", value: { topic, op: [ChangeOp.PUT], records: columns([entry]), bookmark } });
  }

  /** The frames of a call; undefined: there is none at the moment. Ends, or gives `topicsLeft`. */
  *frames(request: SubscribeRequest): Generator<SubscribeResponse | undefined> {
    let at = this.journal.length;
    if (request.sow) {
      yield frame({ case: "snapshotBegin", value: { bookmark: this.bookmark(at) } });
      const rows = new Map(this.journal.filter(({ topic }) => this.seen.has(topic)).map((entry) => [entry.topic, entry]));
      for (const [topic, entry] of rows) {
        yield frame({ case: "snapshot", value: { topic, records: columns([entry]) } });
      }
      yield frame({ case: "snapshotEnd", value: { bookmark: this.bookmark(at) } });
    } else {
      const { start } = request;
      at = start.case === "bookmark" ? Number(start.value.split(".")[1]) : start.case === "earliest" ? 0 : at;
      yield progress(this.bookmark(at));
    }
    while (this.leavesAt !== 0) {
      const last = this.journal.length;
      for (const entry of this.journal.slice(at, last)) {
        if (this.seen.has(entry.topic)) {
          at = Number(entry.sequence);
          yield this.changes(entry);
          if ((this.leavesAt as number | undefined) === 0) {
            yield left(this.version);
          }
        }
      }
      at = last;
      yield progress(this.bookmark(at));
      if (this.leavesAt !== undefined && at >= this.leavesAt) {
        break;
      }
      while (this.journal.length === at && this.leavesAt === undefined) {
        yield undefined;
      }
    }
    yield left(this.version);
  }
}

/** Two cells, a topic of each and one that moves, and a subscriber, who takes one step at a time. */
class World {
  readonly cells = new Map([["a", new Cell("a", ["a", "moving"])], ["b", new Cell("b", ["b"])]]);
  readonly place = new Map([["a", "a"], ["b", "b"], ["moving", "a"]]);
  readonly published: string[] = [];
  readonly told: string[] = [];
  readonly shown = new Map<string, string>();
  ends = 0;
  core: JoinedCore;
  readonly sow: boolean;
  readonly random: () => number;

  constructor(seed: number, sow: boolean) {
    this.random = mulberry(seed);
    this.sow = sow;
    this.core = this.joined(undefined);
  }

  joined(starts: Bookmarks | undefined): JoinedCore {
    const start = starts === undefined && !this.sow ? ({ case: "earliest", value: true } as const) : { case: undefined };
    const request = create(SubscribeRequestSchema, { topicPattern: ".*", sow: this.sow, start });
    const core = new JoinedCore(request, starts, OPTIONS);
    core.begin("a", request, this.cells.keys());
    core.found(this.cells.keys());
    return core;
  }

  draw<Value>(from: Iterable<Value>): Value {
    const all = [...from];
    return all[Math.floor(this.random() * all.length)]!;
  }

  publish(): void {
    const topic = this.draw(this.place.keys());
    const value = String(this.published.length);
    this.cells.get(this.place.get(topic)!)!.publish(topic, value);
    this.published.push(`${topic} ${value}`);
  }

  /** The topic moves with its last record. The cell that it leaves ends its call once all of it is sent, the other at once. */
  move(): void {
    const source = this.cells.get(this.place.get("moving")!)!;
    const target = this.cells.get(source.name === "a" ? "b" : "a")!;
    const stands = ({ name, call, leavesAt }: Cell) => call !== undefined && leavesAt === undefined && this.core.parts!.get(name)!.isNew;
    if (![source, target].every(stands)) {
      return; // else a change may be missing, which is told
    }
    source.topics.delete("moving");
    target.topics.add("moving");
    const last = this.published.filter((one) => one.startsWith("moving ")).at(-1);
    if (last !== undefined) {
      target.publish("moving", last.split(" ")[1]!);
    }
    source.version += 1n;
    target.version += 1n;
    source.leavesAt = source.journal.length;
    target.leavesAt = 0;
    this.place.set("moving", target.name);
  }

  /** A part makes its call, or takes in its next frame. */
  follow(): void {
    const part = this.draw(this.core.parts!.values());
    const cell = this.cells.get(part.cell)!;
    if (!part.isTaken) {
      return;
    }
    if (cell.call === undefined) {
      this.call(part, cell);
      return;
    }
    const { done, value } = cell.call.next();
    if (value === undefined) {
      assert.ok(!done);
      this.endOneThatGoesBack(part);
      return;
    }
    try {
      part.feed(value);
      this.endOneThatGoesBack(part);
    } catch (error) {
      cell.call = undefined;
      part.ended(error as SowError, NOW);
    }
  }

  lookAt(part: PartCore): void {
    const cell = this.cells.get(part.cell)!;
    if (!part.knows(cell.version)) {
      part.saw(cell.version, cell.bookmark(cell.journal.length));
    }
    this.endOneThatGoesBack(part);
  }

  endOneThatGoesBack(part: PartCore): void {
    const cell = this.cells.get(part.cell)!;
    if (part.isToEnd && cell.call !== undefined) {
      cell.call = undefined;
      part.ended(CUT, NOW);
    }
  }

  call(part: PartCore, cell: Cell): void {
    const request = part.request(0);
    if (part.placed(cell.version, request)) {
      this.core.newer(part).forEach((back) => this.lookAt(back));
    }
    cell.leavesAt = undefined;
    cell.seen = new Set(cell.topics);
    cell.call = cell.frames(request);
  }

  /** A call breaks. After another placement that would end the subscription. */
  cut(): void {
    const part = this.draw(this.core.parts!.values());
    const cell = this.cells.get(part.cell)!;
    if (cell.call !== undefined && cell.leavesAt === undefined && part.isTaken) {
      cell.call = undefined;
      part.ended(CUT, NOW);
    }
  }

  /** The program goes on in another process, from its bookmarks, unless that would throw ResyncRequired. */
  restart(): void {
    const starts = this.core.bookmark;
    if (this.sow || typeof starts !== "object" || starts === null) {
      return;
    }
    const isCurrent = Object.entries(starts).every(([cell, at]) => at.endsWith(`;p=${this.cells.get(cell)!.version}`));
    if (!isCurrent || [...this.cells.values()].some(({ leavesAt }) => leavesAt !== undefined)) {
      return;
    }
    this.core = this.joined(JSON.parse(JSON.stringify(starts)));
    this.cells.forEach((cell) => {
      cell.call = undefined;
    });
  }

  take(): void {
    const change = this.core.take();
    if (change !== undefined) {
      this.tell(change);
    } else {
      this.core.nextFrame();
    }
  }

  tell(change: Change): void {
    if (change.op === "snapshot_end") {
      this.ends += 1;
    } else if (change.op === "resync") {
      this.shown.delete(change.topic);
    } else {
      assert.ok("record" in change && this.cells.has(change.cell!));
      this.told.push(`${change.topic} ${change.record.data}`);
      this.shown.set(change.topic, String(change.record.data));
    }
  }

  settle(): void {
    for (let step = 0; step < 2_000; step++) {
      this.follow();
      this.take();
    }
  }
}

/** Random numbers in [0, 1), the same for a seed. */
function mulberry(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

test("nothing is lost and the last state comes last, whatever moves, breaks and restarts ([1], [2], [5])", () => {
  for (let number = 0; number < 60; number++) {
    const seed = (Date.now() % 1_000_000) + number;
    const sow = number % 2 === 1;
    const world = new World(seed, sow);
    const steps = [world.publish, world.follow, world.follow, world.take, world.take, world.cut];
    for (let step = 0; step < 400; step++) {
      world.draw(steps).call(world);
      if (world.random() < 0.02) {
        world.move();
      }
      if (world.random() < 0.1) {
        world.restart();
      }
    }
    world.publish();
    world.settle();
    const last = new Map(world.published.map((one) => one.split(" ") as [string, string]));
    assert.deepEqual(new Map([...world.shown].sort()), new Map([...last].sort()), `seed ${seed}, sow ${sow}`);
    if (sow) {
      assert.ok(world.ends > 0, `seed ${seed}`);
    } else {
      const told = new Set(world.told);
      assert.deepEqual(world.published.filter((one) => !told.has(one)), [], `seed ${seed}`);
    }
  }
});

test("a program that stops across a move is told, and so is one whose cell has gone ([2])", () => {
  const world = new World(1, false);
  for (let count = 0; count < 20; count++) {
    world.publish();
    world.settle();
  }
  const starts = world.core.bookmark as Bookmarks;
  assert.ok(starts["a"]!.endsWith(";p=1"));
  const resumed = world.joined(starts).home;
  const request = resumed.request(0);
  assert.deepEqual(request.start, { case: "bookmark", value: starts["a"]!.replace(";p=1", "") });
  assert.throws(() => resumed.placed(2n, request), (error) => error instanceof ResyncRequired && /another placement/.test(error.text));
  world.cells.delete("b");
  assert.throws(() => world.joined(starts), (error) => error instanceof ResyncRequired && /no cell "b" any more/.test(error.text));
});

function partOf(core: JoinedCore, cell: string): PartCore {
  return core.parts!.get(cell)!;
}

test("a cell that refuses is waited for if nothing is missed meanwhile", () => {
  for (const start of [{ case: "earliest", value: true } as const, { case: undefined }]) {
    const request = create(SubscribeRequestSchema, { topicPattern: ".*", start });
    const heard: (SowError | null)[] = [];
    const core = new JoinedCore(request, undefined, { ...OPTIONS, onInterruption: (error) => heard.push(error) });
    core.begin("a", request);
    core.found(["a", "b"]);
    const part = partOf(core, "b");
    part.request(0);
    const refused = new AllRefused("cannot connect to b:1", { reason: "UNREACHABLE" });
    if (start.case === undefined) {
      assert.throws(() => part.ended(refused, NOW), { text: "the cell b: cannot connect to b:1" });
      continue;
    }
    assert.ok(part.ended(refused, NOW) > 0);
    assert.ok(!(part.interruption instanceof AllRefused));
    part.request(0);
    assert.ok(part.ended(refused, NOW) > 0);
    assert.deepEqual(heard.map((error) => error?.text), ["the cell b: cannot connect to b:1"], "told once");
    assert.equal(core.cells.get("b"), part.interruption);
  }
});

test("a cell without a topic is waited for as the others are, and so is one that accepts calls and says nothing", () => {
  const heard: (SowError | null)[] = [];
  const options = { ...OPTIONS, onInterruption: (error: SowError | null) => heard.push(error) };
  const core = new JoinedCore(create(SubscribeRequestSchema, { topicPattern: ".*" }), undefined, options);
  core.begin("a", create(SubscribeRequestSchema, { topicPattern: ".*" }));
  core.found(["a", "b"]);
  const part = partOf(core, "b");
  part.request(0);
  part.ended(NOTHING, NOW);
  const silent = new DeadlineExceeded("no answer in time", { reason: "DEADLINE_EXCEEDED" });
  const refused = new AllRefused("cannot connect to b:1", { reason: "UNREACHABLE" });
  for (const [nowMs, error] of [[10_000, silent], [15_000, CUT], [20_000, refused]] as const) {
    part.request(nowMs - 5_000);
    assert.ok(part.ended(error, { nowMs, jitter: 0.5 }) > 0);
  }
  assert.deepEqual(heard.map((error) => error?.text), ["the cell b: no answer in time"], "told once");
  assert.deepEqual([heard[0]!.reason, heard[0] instanceof Unavailable], ["UNREACHABLE", true]);
  part.request(30_000);
  part.ended(NOTHING, { nowMs: 30_000, jitter: 0.5 });
  assert.equal(heard.at(-1), null);
  assert.equal(core.cells.get("b"), null);
});

/** A part of the cell a whose call has begun with a placement, after 5. */
function partAt(version: bigint): PartCore {
  const request = create(SubscribeRequestSchema, { topicPattern: ".*" });
  const core = new JoinedCore(request, { a: "aaaa.5" }, OPTIONS);
  core.begin("a", request, ["a"]);
  core.found(["a"]);
  core.home.placed(version, core.home.request(0));
  core.home.feed(progress("aaaa.5"));
  return core.home;
}

test("a call is in order only for the placement that has ended it ([5])", () => {
  const ended = new Unavailable("left", { reason: "ACCESS_CHANGED", details: { complete: "true", placement_version: "2" } });
  const waiting = partAt(1n);
  waiting.ended(ended, NOW);
  assert.equal(waiting.placed(1n, waiting.request(0)), true, "the cell names it a little later than it ends calls");
  assert.equal(waiting.version, 2n);
  const late = partAt(1n);
  late.ended(ended, NOW);
  assert.throws(() => late.placed(3n, late.request(0)), ResyncRequired, "what left with 3 may be missing");
  const broken = partAt(1n);
  broken.ended(cut("the subscription"), NOW);
  assert.throws(() => broken.placed(2n, broken.request(0)), ResyncRequired);
});

test("a call that goes on knows a placement once it is behind its begin, and one that begins with it is told", () => {
  const slow = partAt(1n);
  assert.ok(!slow.knows(2n));
  slow.saw(2n, "aaaa.9");
  assert.ok(slow.knows(2n));
  assert.equal(slow.version, 1n, "there may be changes to come of a topic that has left");
  slow.feed(progress("aaaa.9"));
  assert.ok(slow.knows(2n));
  assert.equal(slow.version, 2n);

  const part = partAt(1n);
  assert.ok(part.began(1n));
  assert.ok(!part.isNew);
  part.ended(CUT, NOW);
  part.placed(1n, part.request(0));
  part.ended(NOTHING, NOW);
  assert.ok(!part.began(2n));
  assert.throws(() => part.placed(2n, part.request(0)), ResyncRequired);
});

test("a placement that comes with the first topic of a cell takes nothing away", () => {
  const part = partAt(1n);
  part.ended(NOTHING, NOW);
  part.placed(1n, part.request(0));
  part.feed(progress("aaaa.0"));
  assert.ok(part.isNew);
  assert.ok(part.began(2n));
  const details = { complete: "false", placement_version: "2" };
  part.ended(new Unavailable("left", { reason: "ACCESS_CHANGED", details }), NOW);
  assert.throws(() => part.placed(2n, part.request(0)), ResyncRequired);
});

test("two topics that swap their cells lose nothing: a call that owes changes is not ended to go back ([5])", () => {
  for (const isCut of [false, true]) {
    const world = new World(1, false);
    const [a, b] = ["a", "b"].map((name) => world.cells.get(name)!) as [Cell, Cell];
    const [ofA, ofB] = [partOf(world.core, "a"), partOf(world.core, "b")];
    const takeAll = () => [world.take(), world.take()];
    for (const [cell, part] of [[b, ofB], [a, ofA], [b, ofB]] as const) {
      if (!part.stood) {
        part.placed(1n, part.request(0));
        part.feed(progress(cell.bookmark(0)));
      }
      cell.publish("swapped", String(world.told.length));
      part.feed(cell.changes(cell.journal.at(-1)!));
      takeAll();
    }
    assert.deepEqual(world.told, ["swapped 0", "swapped 1", "swapped 2"]);
    const ended = (version: bigint) => {
      const details = { complete: "true", placement_version: String(version) };
      return new Unavailable("left", { reason: "ACCESS_CHANGED", details });
    };
    ofB.ended(ended(2n), NOW);
    assert.ok(ofB.placed(2n, ofB.request(0)));
    assert.deepEqual(world.core.newer(ofB), [ofA]);
    assert.ok(!ofA.knows(2n));
    a.publish("a", "3");
    ofA.saw(2n, a.bookmark(2));
    assert.ok(!ofA.isToEnd, "it is behind the placement");
    if (isCut) {
      ofA.ended(CUT, NOW);
      assert.throws(() => ofA.placed(2n, ofA.request(0)), ResyncRequired);
      continue;
    }
    ofA.feed(a.changes(a.journal[1]!));
    assert.ok(!ofA.isToEnd, "its change was not handed out");
    takeAll();
    ofA.feed(progress(a.bookmark(2)));
    assert.ok(ofA.isToEnd);
    ofA.ended(CUT, NOW);
    const request = ofA.request(0);
    ofA.placed(2n, request);
    assert.deepEqual(request.start, { case: "bookmark", value: a.bookmark(0) }, "before its first change of the topic");
  }
});

test("a part that goes back waits for its cell, and ends as any other ([5])", () => {
  const part = partAt(1n);
  part.goBack();
  assert.equal(part.ended(CUT, NOW), 0);
  part.request(0);
  assert.ok(part.ended(CUT, NOW) > 0, "its cell is down");
  assert.equal(part.interruption!.reason, "UNREACHABLE");
  part.request(0);
  assert.throws(() => part.ended(new NotFound("no", { reason: "UNAUTHENTICATED" }), NOW));
  assert.throws(() => part.ended(gone("a"), NOW));
  assert.ok(part.isOver);
});

test("a cell that leaves the placement is dropped with its topics, and its outage ends ([4])", () => {
  const request = create(SubscribeRequestSchema, { topicPattern: ".*", sow: true });
  const heard: (SowError | null)[] = [];
  const core = new JoinedCore(request, undefined, { ...OPTIONS, onInterruption: (error) => heard.push(error) });
  core.begin("a", request);
  core.found(["a", "b"]);
  const cells = ["a", "b"].map((name) => new Cell(name, [name]));
  const told: string[] = [];
  const follow = () => {
    for (let change = core.take(); change !== undefined || core.nextFrame(); change = core.take()) {
      if (change !== undefined) {
        told.push(`${change.op} ${change.topic}`);
      }
    }
  };
  for (const cell of cells) {
    cell.publish(cell.name, "1");
    cell.seen = cell.topics;
    const part = partOf(core, cell.name);
    const frames = cell.frames(part.request(0));
    for (let count = 0; count < 3; count++) {
      part.feed(frames.next().value!);
      follow();
    }
  }
  assert.deepEqual(told, ["sow a", "sow b", "snapshot_end "], "once, at the end of all");
  const part = partOf(core, "b");
  part.ended(CUT, NOW);
  core.drop(part);
  follow();
  assert.deepEqual(told.slice(3), ["resync b", "snapshot_end "]);
  assert.deepEqual(heard.map((error) => error?.reason), ["UNREACHABLE", undefined]);
  assert.deepEqual([...core.cells.keys()], ["a"]);
});

// ---- the calls of the parts ----

/** Calls of two cells without an end, of one change a frame. It counts the frames that were asked for. */
function endless(asked: Map<string, number>, cancelled: string[] = []) {
  const line = new Line("x", undefined as never);
  return async (cell: Cell): Promise<Frames<SubscribeResponse>> => {
    let [isOver, number] = [false, 0];
    return {
      line,
      next: async () => {
        await Promise.resolve();
        if (isOver) {
          throw cut("the subscription");
        }
        asked.set(cell.name, (asked.get(cell.name) ?? 0) + 1);
        number += 1;
        const entry = { topic: cell.name, key: "k", value: String(number), sequence: BigInt(number) };
        return { done: false, value: number === 1 ? progress(cell.bookmark(0)) : cell.changes(entry) };
      },
      cancel: () => {
        isOver = true;
        cancelled.push(cell.name);
      },
    };
  };
}

async function joinedOf(
  cells: ReadonlyMap<string, Cell>,
  open: (cell: Cell) => Promise<Frames<SubscribeResponse>>,
  lookMs?: number,
  asked: () => void = () => undefined,
) {
  const request = create(SubscribeRequestSchema, { topicPattern: ".*" });
  const core = new JoinedCore(request, undefined, OPTIONS);
  const parts = new Parts(core, {
    places: async () => {
      asked();
      return { home: "a", all: new Map(cells) };
    },
    version: async ({ version }) => version,
    open,
    isOfMany: () => false,
  }, OPTIONS, lookMs);
  return await new JoinedSubscription(core, parts).opened();
}

test("a program that reads slowly holds up every cell: one frame of each is at hand ([1])", { timeout: 60_000 }, async () => {
  const cells = new Map(["a", "b"].map((name) => [name, new Cell(name, [name])]));
  const asked = new Map<string, number>();
  const changes = await joinedOf(cells, endless(asked));
  const settled = async () => {
    for (let turn = 0; turn < 200; turn++) {
      await new Promise(setImmediate);
    }
    return [...asked.values()];
  };
  assert.deepEqual(await settled(), [2, 2], "the progress, and one change");
  const told: string[] = [];
  for (let count = 1; count <= 40; count++) {
    told.push((await changes.next()).value!.cell!);
    const [a, b] = (await settled()) as [number, number];
    assert.ok(a + b <= count + 4, `${a} and ${b} frames for ${count} changes`);
  }
  assert.deepEqual(told.filter((cell) => cell === "a").length, 20, "they take turns");
  changes.close();
  assert.equal((await changes.next()).done, true);
});

test("a client that is closed ends a subscription that nobody reads, and its looks at the cells", { timeout: 60_000 }, async () => {
  const cells = new Map(["a", "b"].map((name) => [name, new Cell(name, [name])]));
  const cancelled: string[] = [];
  let isClosed = false;
  const changes = await joinedOf(cells, endless(new Map(), cancelled), 1, () => {
    if (isClosed) {
      throw closed("client");
    }
  });
  isClosed = true;
  while (cancelled.length < 2) {
    await new Promise(setImmediate);
  }
  const rest = async () => {
    for await (const change of changes) {
      assert.ok(["a", "b"].includes(change.cell!), "it was at hand");
    }
  };
  await assert.rejects(rest, { reason: "CLOSED" });
});

test("a part that cannot go on ends all others, and the program is told behind what is at hand", { timeout: 60_000 }, async () => {
  const cells = new Map(["a", "b"].map((name) => [name, new Cell(name, [name])]));
  const cancelled: string[] = [];
  const open = endless(new Map(), cancelled);
  let isGone = false;
  const changes = await joinedOf(cells, async (cell) => {
    const frames = await open(cell);
    const next = async () => {
      if (cell.name === "b" && isGone) {
        throw new NotFound("no such thing", { reason: "TOPIC_DELETED" });
      }
      return await frames.next();
    };
    return { ...frames, next };
  });
  isGone = true;
  const told: string[] = [];
  await assert.rejects(
    async () => {
      for await (const change of changes) {
        told.push(change.cell!);
      }
    },
    { text: "the cell b: no such thing" },
  );
  assert.ok(told.includes("a"), "it was at hand");
  assert.deepEqual([...new Set(cancelled)].sort(), ["a", "b"]);
  assert.equal((await changes.next()).done, true);
});

test("what home tells later is told: a cell to which the client does not go, and that there are no cells", { timeout: 60_000 }, async () => {
  const refused = invalid("token", "goes to another machine over TLS only");
  for (const [told, reason] of [[refused, "INVALID_ARGUMENT"], [undefined, "RESYNC_REQUIRED"]] as const) {
    const cells = new Map(["a", "b"].map((name) => [name, new Cell(name, [name])]));
    let isLater = false;
    const cancelled: string[] = [];
    const changes = await joinedOf(cells, endless(new Map(), cancelled), 1, () => {
      if (isLater && told !== undefined) {
        throw told;
      }
    });
    isLater = true;
    if (told === undefined) {
      cells.clear();
      cells.set("", new Cell("", []));
    }
    while (cancelled.length < 2) {
      await new Promise(setImmediate);
    }
    const rest = async () => {
      for await (const change of changes) {
        assert.ok(["a", "b"].includes(change.cell!));
      }
    };
    await assert.rejects(rest, { reason });
    assert.equal((await changes.next()).done, true);
  }
});

/** A call that gives what is pushed, until it is cancelled. */
class Quiet {
  readonly #frames: SubscribeResponse[] = [];
  #wake: (() => void) | undefined;
  #isOver = false;

  push(...frames: SubscribeResponse[]): void {
    this.#frames.push(...frames);
    this.#wake?.();
  }

  get frames(): Frames<SubscribeResponse> {
    return {
      line: new Line("x", undefined as never),
      next: async () => {
        while (this.#frames.length === 0 && !this.#isOver) {
          await new Promise<void>((resolve) => {
            this.#wake = resolve;
          });
        }
        if (this.#isOver) {
          throw cut("the subscription");
        }
        return { done: false, value: this.#frames.shift()! };
      },
      cancel: () => this.end(),
    };
  }

  end(): void {
    this.#isOver = true;
    this.#wake?.();
  }
}

test("cells are looked at: one that comes joins, one that leaves ends, and another placement is known (joining [2])", { timeout: 60_000 }, async () => {
  const cells = new Map([["a", new Cell("a", ["a"])]]);
  const calls = new Map<string, Quiet[]>();
  const position = new Map([["a", 3], ["b", 1]]);
  const open = async (cell: Cell) => {
    const call = new Quiet();
    call.push(progress(cell.bookmark(position.get(cell.name)!)));
    calls.set(cell.name, [...(calls.get(cell.name) ?? []), call]);
    return call.frames;
  };
  const changes = await joinedOf(cells, open, 1);
  const reading = changes.next(); // a part joins while somebody reads
  const until = async (holds: () => boolean) => {
    while (!holds()) {
      await new Promise(setImmediate);
    }
  };
  assert.deepEqual(changes.bookmark, { a: "aaaa.3;p=1" });
  position.set("a", 5);
  cells.get("a")!.version = 2n;
  await until(() => calls.get("a")!.length > 1); // which asks for the position that the cell has by now
  assert.deepEqual(changes.bookmark, { a: "aaaa.3;p=1" }, "changes of topics that have left may be to come");
  calls.get("a")![0]!.push(progress("aaaa.6"));
  await until(() => JSON.stringify(changes.bookmark) === '{"a":"aaaa.6;p=2"}');

  cells.set("b", new Cell("b", ["b"]));
  await until(() => changes.cells.size === 2 && calls.get("b") !== undefined);
  await until(() => JSON.stringify(changes.bookmark) === '{"a":"aaaa.6;p=2","b":"bbbb.1;p=1"}');
  cells.delete("b");
  calls.get("b")![0]!.end();
  await until(() => changes.cells.size === 1);
  changes.close();
  assert.equal((await reading).done, true);
});
