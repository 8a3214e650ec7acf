/** A subscription to a pattern joins all cells (rule C21), with real servers. One test at a time: they share two cells. */

import assert from "node:assert/strict";
import { copyFileSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import test, { after, before } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { AdminService } from "../../src/contract.js";
import {
  type Bookmarks,
  type Change,
  Client,
  type Followed,
  InvalidArgument,
  NotFound,
  ResyncRequired,
  type SowError,
  Unavailable,
} from "../../src/index.js";
import { TwoCells } from "../support/cells.js";
import { NO_SERVER, python, Server } from "../support/server.js";

const live = { skip: NO_SERVER, timeout: 180_000 };
const ends: (() => void | Promise<void>)[] = [];
let cells: TwoCells;

before(async () => {
  if (!live.skip) {
    cells = await TwoCells.start({ after: (end) => ends.push(end) });
  }
});
after(async () => {
  await Promise.all(ends.map((end) => end()));
});

type Context = { after(end: () => void): void };

function connect(t: Context, options: ConstructorParameters<typeof Client>[1] = {}): Client {
  const client = new Client(cells.at("a"), options);
  t.after(() => client.close());
  return client;
}

/** A topic of each cell, with a record. */
async function topics(client: Client): Promise<[here: string, there: string]> {
  const names: [string, string] = [cells.topic("a"), cells.topic("b")];
  for (const name of names) {
    await client.publish(name, {}, { key: "1" });
  }
  return names;
}

const pattern = (...names: string[]) => ({ pattern: names.join("|") });

function bookmarks(changes: Followed): Bookmarks {
  const { bookmark } = changes;
  assert.ok(typeof bookmark === "object" && bookmark !== null, String(bookmark));
  return bookmark;
}

async function taken(changes: Followed, count: number): Promise<Change[]> {
  const found: Change[] = [];
  while (found.length < count) {
    const { done, value } = await changes.next();
    assert.ok(!done, "it has ended");
    found.push(value);
  }
  return found;
}

function told(changes: Change[]): string[] {
  const key = (change: Change) => ("key" in change ? change.key : "");
  return changes.map((change) => `${change.cell ?? ""} ${change.op} ${change.topic} ${key(change)}`).sort();
}

test("a pattern follows the topics of all cells, and goes on from their bookmarks", live, async (t) => {
  const client = connect(t);
  const [here, there] = await topics(client);
  const changes = await client.subscribe(pattern(here, there));
  assert.deepEqual([...changes.cells], [["a", null], ["b", null]]);
  for (const topic of [there, here]) {
    await client.publish(topic, {}, { key: "2" });
  }
  assert.deepEqual(told(await taken(changes, 2)), [`a put ${here} 2`, `b put ${there} 2`]);
  const bookmark = bookmarks(changes);
  assert.deepEqual(Object.keys(bookmark).sort(), ["a", "b"]);
  changes.close();
  assert.equal((await changes.next()).done, true);
  for (const topic of [there, here]) {
    await client.publish(topic, {}, { key: "3" });
  }
  const onwards = await client.subscribe(pattern(here, there), { start: JSON.parse(JSON.stringify(bookmark)) });
  assert.deepEqual(told(await taken(onwards, 2)), [`a put ${here} 3`, `b put ${there} 3`]);
  onwards.close();
  const again = await client.subscribe(pattern(here, there), { start: { b: bookmark["b"]! } });
  const all = told(await taken(again, 4));
  assert.deepEqual(all, [1, 2, 3].map((key) => `a put ${here} ${key}`).concat(`b put ${there} 3`), "a from its earliest change");
  again.close();
});

test("a bookmark of the Python client is one of this client, and the other way round", live, async (t) => {
  const client = connect(t);
  const [here, there] = await topics(client);
  const changes = await client.subscribe(pattern(here, there), { start: "earliest" });
  await taken(changes, 2);
  const folder = cells.servers.a.folder;
  writeFileSync(join(folder, "bookmark.json"), JSON.stringify(bookmarks(changes)));
  changes.close();
  for (const topic of [here, there]) {
    await client.publish(topic, {}, { key: "python" });
    await client.publish(topic, {}, { key: "typescript" });
  }
  const program = `
import itertools, json
from sow_client import Client
with Client(${JSON.stringify(cells.at("a"))}) as client, open("bookmark.json") as file:
    found = []
    with client.subscribe(topic_pattern=${JSON.stringify(`${here}|${there}`)}, start=json.load(file), batch_size=1) as changes:
        for change in changes:
            found.append((change.cell, change.key))
            if {("a", "python"), ("b", "python")} <= set(found):
                break
        result = {"found": found, "bookmark": changes.bookmark}
with open("result.json", "w") as file:
    json.dump(result, file)
`;
  python(program, folder);
  const result = JSON.parse(readFileSync(join(folder, "result.json"), "utf8"));
  const onwards = await client.subscribe(pattern(here, there), { start: result.bookmark });
  const rest = (await taken(onwards, 4 - result.found.length)).map((change) => [change.cell, "key" in change && change.key]);
  const every = ["a", "b"].flatMap((cell) => [[cell, "python"], [cell, "typescript"]]);
  assert.deepEqual([...result.found, ...rest].sort(), every, "each once");
  onwards.close();
});

test("many changes of both cells come in the order of their topics", live, async (t) => {
  const client = connect(t);
  const both = await topics(client);
  const changes = await client.subscribe(pattern(...both));
  const keys = Array.from({ length: 2_000 }, (_, number) => String(number));
  for (let round = 0; round < 3; round++) {
    await Promise.all(both.map((topic) => client.publishMany(topic, keys.map(() => ({})), { keys })));
    const found = await taken(changes, 2 * keys.length);
    for (const topic of both) {
      const own = found.filter((change) => change.topic === topic);
      assert.deepEqual(own.map((change) => "key" in change && change.key), keys);
      assert.ok(own.every(({ cell }) => cell === topic[0]));
    }
  }
  changes.close();
});

test("the snapshots of all cells end once", live, async (t) => {
  const client = connect(t);
  const [here, there] = await topics(client);
  const changes = await client.sowAndSubscribe(pattern(here, there));
  const first = await taken(changes, 3);
  assert.deepEqual(told(first.slice(0, 2)), [`a sow ${here} 1`, `b sow ${there} 1`]);
  const { op, topic, bookmark, cell } = first[2]!;
  assert.deepEqual([op, topic, bookmark, cell], ["snapshot_end", "", null, undefined]);
  await client.publish(there, {}, { key: "2" });
  assert.deepEqual(told(await taken(changes, 1)), [`b put ${there} 2`]);
  assert.deepEqual(Object.keys(bookmarks(changes)).sort(), ["a", "b"]);
  assert.equal(changes.covers, true);
  changes.close();
});

test("a topic that comes to a cell without one is followed from its first change", live, async (t) => {
  const client = connect(t);
  const [here, there] = [cells.topic("a"), cells.topic("b")];
  await assert.rejects(
    client.subscribe(pattern(here, there)),
    (error) => error instanceof NotFound && error.reason === "PATTERN_MATCHES_NOTHING",
  );
  await client.publish(here, {}, { key: "1" });
  const changes = await client.subscribe(pattern(here, there));
  const snapshot = await client.sowAndSubscribe(pattern(here, there));
  assert.deepEqual((await taken(snapshot, 2)).map(({ op }) => op), ["sow", "snapshot_end"]);
  await client.publish(there, {}, { key: "1" });
  assert.deepEqual(told(await taken(changes, 1)), [`b put ${there} 1`]);
  const late = (await taken(snapshot, 2)).map(({ op, cell }) => `${cell} ${op}`).sort();
  const isMadeBefore = late[0] === "b put"; // the snapshot was taken between the making of the topic and its first record
  assert.deepEqual(late, [isMadeBefore ? "b put" : "b sow", "undefined snapshot_end"]);
  changes.close();
  snapshot.close();
});

test("an outage of a cell is told once for its topics, and the others go on", live, async (t) => {
  const client = connect(t, { connectTimeoutMs: 2_000 });
  const [here, there] = await topics(client);
  const heard: (SowError | null)[] = [];
  const changes = await client.subscribe(pattern(here, there), {
    start: "earliest",
    onInterruption: (error) => heard.push(error),
  });
  await taken(changes, 2);
  await cells.servers.b.kill();
  for (const key of ["2", "3"]) {
    await client.publish(here, {}, { key });
    assert.deepEqual(told(await taken(changes, 1)), [`a put ${here} ${key}`]);
  }
  await until(() => heard.length > 0);
  assert.deepEqual(heard.map((error) => error?.details["cell"]), ["b"]);
  assert.match(changes.cells.get("b")!.message, /^the cell b: /);
  assert.equal(changes.cells.get("a"), null);
  const bookmark = bookmarks(changes);
  const resumed = await client.subscribe(pattern(here, there), { start: bookmark });
  await client.publish(here, {}, { key: "4" });
  assert.deepEqual(told(await taken(resumed, 1)), [`a put ${here} 4`], "its other cell is down from the begin");
  await assert.rejects(client.subscribe(pattern(here, there)), (error) => {
    assert.ok(error instanceof Unavailable && error.message.startsWith("the cell b: "), "what b gets now would be missing");
    assert.equal(error.details["cell"], "b");
    return true;
  });
  await cells.servers.b.start();
  await cells.direct("b", (direct) => direct.publish(there, {}, { key: "5" }));
  assert.deepEqual(told(await taken(resumed, 1)), [`b put ${there} 5`]);
  assert.deepEqual(told(await taken(changes, 2)), [`a put ${here} 4`, `b put ${there} 5`]);
  assert.deepEqual(heard.slice(1), [null], "once, and its end");
  changes.close();
  resumed.close();
});

test("while home is down, the others go on, and home goes on where it was", live, async (t) => {
  const home = new Client(cells.at("b"), { connectTimeoutMs: 2_000 });
  t.after(() => home.close());
  const [other, own] = await topics(home);
  const heard: (SowError | null)[] = [];
  const changes = await home.sowAndSubscribe(pattern(other, own), { onInterruption: (error) => heard.push(error) });
  await taken(changes, 3);
  await cells.servers.b.kill();
  await until(() => heard.length > 0);
  await cells.direct("a", (direct) => direct.publish(other, {}, { key: "2" }));
  assert.deepEqual(told(await taken(changes, 1)), [`a put ${other} 2`]);
  assert.deepEqual(heard.map((error) => error?.details["cell"]), ["b"]);
  await cells.servers.b.start();
  await cells.direct("b", (direct) => direct.publish(own, {}, { key: "2" }));
  assert.deepEqual(told(await taken(changes, 1)), [`b put ${own} 2`], "no new snapshot");
  assert.deepEqual(heard.slice(1), [null]);
  changes.close();
});

test("a start that does not fit is refused, and one cell has one bookmark", live, async (t) => {
  const client = connect(t);
  const [here, there] = await topics(client);
  const refused = async (call: Promise<unknown>, message: string) => {
    await assert.rejects(call, (error) => error instanceof InvalidArgument && error.text.startsWith(message));
  };
  await refused(client.subscribe(pattern(here, there), { start: "0d4c5b7e8f90.17" }), "start: is the bookmark of one cell, and there");
  await refused(client.subscribe(here, { start: { a: "0d4c5b7e8f90.17" } }), "start: has the bookmarks of cells, which only a pattern");
  await refused(client.subscribe(pattern(here), { start: {} }), "start: is a mapping without a cell");
  await refused(
    client.subscribe(pattern(here), { start: { a: 5 as unknown as string } }),
    "start: 'a': 5 is not the name of a cell with a bookmark",
  );
  const part = (await client.cells()).get("b")!;
  const own = await part.subscribe(pattern(here, there), { start: "earliest" });
  assert.deepEqual((await taken(own, 1)).map(({ topic, cell }) => [topic, cell]), [[there, undefined]]);
  assert.equal(typeof own.bookmark, "string");
  own.close();

  const server = await Server.start(t);
  const alone = new Client(server.address);
  t.after(() => alone.close());
  await alone.publish("orders", {}, { key: "1" });
  const changes = await alone.sowAndSubscribe({ pattern: "ord.*" });
  assert.deepEqual((await taken(changes, 2)).map(({ op, cell }) => [op, cell]), [["sow", undefined], ["snapshot_end", undefined]]);
  assert.deepEqual([typeof changes.bookmark, changes.cells.size, changes.behind], ["string", 0, false]);
  const onwards = await alone.subscribe({ pattern: "ord.*" }, { start: changes.bookmark! });
  await alone.publish("orders", {}, { key: "2" });
  assert.deepEqual(told(await taken(onwards, 1)), [" put orders 2"]);
  await refused(alone.subscribe({ pattern: "ord.*" }, { start: { a: "0d4c5b7e8f90.17" } }), "start: has the bookmarks of cells, and this");
  changes.close();
  onwards.close();
});

test("no change is lost when a topic moves, and the last state comes last", live, async (t) => {
  const client = connect(t);
  const [topic, other] = [cells.topic("a"), cells.topic("b")];
  for (const name of [topic, other]) {
    await client.call(AdminService.method.createTopic, { name });
  }
  const changes = await client.subscribe(pattern(topic, other), { batchSize: 1 });
  for (let n = 0; n < 50; n++) {
    await client.publish(topic, { n }, { key: "1" });
  }
  await cells.place([[topic, "b"]]);
  await client.publish(topic, { n: 50 }, { key: "1" });
  const seen: number[] = [];
  while (new Set(seen).size < 51 || seen.at(-1) !== 50) {
    const [change] = await taken(changes, 1);
    seen.push("record" in change! ? Number(change.record.data["n"]) : NaN);
  }
  changes.close();
  await cells.place([]);
});

test("no change is lost when two topics swap their cells", live, async (t) => {
  const client = connect(t);
  const both = [cells.topic("a"), cells.topic("b")] as const;
  for (const name of both) {
    await client.call(AdminService.method.createTopic, { name });
  }
  const changes = await client.subscribe(pattern(...both), { batchSize: 1 });
  for (let n = 0; n < 50; n++) {
    for (const name of both) {
      await client.publish(name, { n }, { key: "1" });
    }
  }
  await cells.place([[both[0], "b"], [both[1], "a"]]);
  for (const name of both) {
    await client.publish(name, { n: 50 }, { key: "1" });
  }
  const seen = new Map<string, number[]>(both.map((name) => [name, []]));
  while ([...seen.values()].some((found) => new Set(found).size < 51 || found.at(-1) !== 50)) {
    const [change] = await taken(changes, 1);
    seen.get(change!.topic)!.push("record" in change! ? Number(change.record.data["n"]) : NaN);
  }
  changes.close();
  await cells.place([]);
});

test("programs go on while a topic moves with its records, and no change of the pattern is lost", live, async (t) => {
  const client = connect(t);
  const [topic, other] = [cells.topic("a"), cells.topic("b")];
  for (const name of [topic, other]) {
    await client.call(AdminService.method.createTopic, { name });
  }
  const heard: (SowError | null)[] = [];
  const changes = await client.subscribe(pattern(topic, other), { onInterruption: (error) => heard.push(error) });
  const state = new Map<string, number>();
  const view = await client.sowAndSubscribe(pattern(topic, other));
  let isMoving = true;
  const moved = cells.move(topic, "b").finally(() => {
    isMoving = false;
  });
  let count = 0;
  for (; isMoving || count < 50; count++) {
    await client.publish(topic, { n: count }, { key: `k${count % 7}` });
  }
  await moved;
  await client.publish(topic, { n: count }, { key: "end" });
  const seen = new Set<number>();
  while (seen.size < count + 1) {
    const [change] = await taken(changes, 1);
    if ("record" in change!) {
      seen.add(Number(change.record.data["n"]));
    }
  }
  while (!state.has("end") || state.size < 8) {
    const [change] = await taken(view, 1);
    if (change!.op === "resync") {
      state.clear();
    } else if ("record" in change!) {
      state.set(change.key, Number(change.record.data["n"]));
    }
  }
  assert.deepEqual([...state.values()].sort((one, two) => one - two), Array.from({ length: 8 }, (_, n) => count - 7 + n));
  changes.close();
  view.close();
  await cells.place([]);
});

test("a snapshot follows a topic that moves", live, async (t) => {
  const client = connect(t);
  const [topic, other] = [cells.topic("a"), cells.topic("b")];
  for (const name of [topic, other]) {
    await client.publish(name, {}, { key: "old" });
  }
  const changes = await client.sowAndSubscribe(pattern(topic, other));
  assert.deepEqual((await taken(changes, 3)).map(({ op }) => op), ["sow", "sow", "snapshot_end"]);
  await cells.place([[topic, "b"]]);
  await client.publish(topic, {}, { key: "new" });
  await client.publish(other, {}, { key: "new" });
  const view = new Map([topic, other].map((name) => [name, new Set(["old"])]));
  const isRight = () => view.get(topic)?.size === 1 && view.get(topic)!.has("new") && view.get(other)!.size === 2;
  while (!isRight()) {
    const [change] = await taken(changes, 1);
    if (change!.op === "resync") {
      view.set(change!.topic, new Set());
    } else if ("record" in change!) {
      view.get(change.topic)!.add(change.key);
    }
  }
  changes.close();
  await cells.place([]);
});

test("a cell that a placement adds joins", live, async (t) => {
  const client = connect(t);
  const [here, there] = await topics(client);
  await cells.placeAllInA();
  const changes = await client.subscribe(pattern(here, there));
  assert.deepEqual([...changes.cells], [["a", null]]);
  await cells.place([]);
  assert.deepEqual(told(await taken(changes, 1)), [`b put ${there} 1`], "from its earliest change");
  assert.deepEqual([...changes.cells], [["a", null], ["b", null]]);
  changes.close();
});

test("a cell that was lost and has another placement is told, and so is a program that stops across one", live, async (t) => {
  const client = connect(t);
  const [here, there] = await topics(client);
  const changes = await client.subscribe(pattern(here, there), { start: "earliest" });
  await taken(changes, 2);
  const bookmark = bookmarks(changes);
  assert.ok(Object.values(bookmark).every((one) => one.endsWith(`;p=${cells.version}`)), JSON.stringify(bookmark));
  await cells.servers.b.kill();
  await cells.place([], ["a"]);
  copyFileSync(join(cells.servers.a.folder, "placement.toml"), join(cells.servers.b.folder, "placement.toml"));
  await cells.servers.b.start();
  const told = (message: string) => (error: unknown) => error instanceof ResyncRequired && error.text.startsWith(message);
  await assert.rejects(changes.next(), told("the cell b: it has another placement since it was followed last"));
  assert.equal((await changes.next()).done, true);
  await assert.rejects(
    client.subscribe(pattern(here, there), { start: bookmark }),
    told("the cell a: it has another placement since it was followed last"),
  );
  await assert.rejects(
    client.subscribe(pattern(here, there), { start: { ...bookmark, c: "0d4c5b7e8f90.17" } }),
    told('start: there is no cell "c" any more: its last changes may be missing'),
  );
});

/** Resolves once something is so. */
async function until(holds: () => boolean): Promise<void> {
  for (let attempt = 0; !holds(); attempt++) {
    assert.ok(attempt < 2_000, "it has not come about in 20 s");
    await pause(10);
  }
}
