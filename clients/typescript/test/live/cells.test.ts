/** A client follows a topic to its cell (rules C10 to C14), with real servers. One test at a time: they share two cells. */

import assert from "node:assert/strict";
import test, { after, before } from "node:test";
import { AccessService, AdminService, Expiration, LoadService } from "../../src/contract.js";
import { Client, NotFound, ResyncRequired, SowError, Unavailable } from "../../src/index.js";
import { TwoCells } from "../support/cells.js";
import { NO_SERVER, python, Server } from "../support/server.js";

const skip = NO_SERVER;
const refusedAs = (reason: string) => (error: unknown) => error instanceof SowError && error.reason === reason;
const ends: (() => void | Promise<void>)[] = [];
let cells: TwoCells;

before(async () => {
  if (!skip) {
    cells = await TwoCells.start({ after: (end) => ends.push(end) });
  }
});
after(async () => {
  await Promise.all(ends.map((end) => end()));
});

function connect(t: { after(end: () => void): void }, options: ConstructorParameters<typeof Client>[1] = {}): Client {
  const client = new Client(cells.at("a"), options);
  t.after(() => client.close());
  return client;
}

test("every kind of call goes to the cell of its topic, each with a topic that the client meets first", { skip }, async (t) => {
  const client = connect(t);
  const there = async (): Promise<string> => {
    const name = cells.topic("b");
    await cells.direct("b", async (direct) => {
      await direct.call(AdminService.method.createTopic, { name, settings: { key: ["/id"], expiration: Expiration.ENABLED } });
      await direct.publishMany(name, [{ id: "1" }, { id: "2" }]);
    });
    return name;
  };
  const keys = (records: readonly { key: string }[]) => records.map(({ key }) => key);

  assert.equal((await client.publish(await there(), { id: "3" })).key, "3");
  assert.equal((await client.publishMany(await there(), [{ id: "3" }, { id: "4" }])).length, 2);
  assert.equal((await client.deltaPublish(await there(), { id: "1", n: 2 })).key, "1");
  assert.equal((await client.get(await there(), "1"))?.key, "1");
  assert.deepEqual(keys(await client.query(await there()).all()), ["1", "2"]);
  assert.equal(await client.count(await there()), 2n);
  assert.notEqual((await client.touch(await there(), "1", { ttl: "1h" })).expireTimeMicros, null);
  assert.equal((await client.delete(await there(), { all: true })).deleted, 2n);
  assert.equal((await client.delete(await there(), { data: { id: "1" } })).deleted, 1n);
  const change = client.transaction(await there());
  change.remove("1");
  change.publish({ id: "3" });
  assert.equal((await change.commit()).length, 2);
  const everything = await client.sowAndSubscribe(await there());
  assert.equal((await everything.next()).value!.op, "sow");
  everything.close();
  (await client.subscribe(await there())).close();
  const best = await client.liveResult(await there(), "", { orderBy: "/id DESC", topN: 1 });
  assert.deepEqual(keys(best.list()), ["2"]);
  best.close();
  const described = await client.call(AdminService.method.describeTopic, { name: await there() });
  assert.deepEqual(described.topic?.settings?.key, ["/id"]);
  await client.createView(`${await there()}-view`, { source: `b-${cells.topic("b")}`, groupBy: ["/id"] }).catch((error) => {
    assert.ok(error instanceof NotFound, "of the cell b, which knows no such source");
  });
});

test("a topic of the client's own cell stays, and later calls for another go there at once", { skip }, async (t) => {
  const client = connect(t);
  const [here, there] = [cells.topic("a"), cells.topic("b")];
  await client.publish(here, {}, { key: "1" });
  await client.publish(there, {}, { key: "1" });
  await cells.place([[there, "a"]], ["a"]); // home would take it now; the client does not ask it
  await client.publish(there, {}, { key: "2" });
  await cells.place([]);
  assert.deepEqual([await cells.keys("a", here), await cells.keys("b", there)], [["1"], ["1", "2"]]);
});

test("a publisher begins in the cell of its topic, and goes along when it moves, and back", { skip }, async (t) => {
  const client = connect(t);
  for (const publisherId of [undefined, "owner"]) {
    const topic = cells.topic("b");
    const publisher = client.publisher(topic, { batchRecords: 3, ...(publisherId === undefined ? {} : { publisherId }) });
    for (const cell of ["b", "a", "b"] as const) {
      await cells.place([[topic, cell]]);
      for (let number = 0; number < 7; number++) {
        await publisher.publish({}, { key: `${cell}-${publisher.applied}-${number}` });
      }
      await publisher.flush();
    }
    await publisher.close();
    assert.deepEqual([publisher.applied, publisher.duplicates, publisher.refused], [21, 0, 0]);
    assert.equal((await cells.keys("b", topic)).length, 14);
    await cells.place([[topic, "a"]]);
    assert.equal((await cells.keys("a", topic)).length, 7);
    await cells.place([]);
  }
});

test("a publisher waits while the cells disagree, and a single publish tells what both say", { skip }, async (t) => {
  const client = connect(t);
  const topic = cells.topic("b");
  await cells.direct("b", (direct) => direct.publish(topic, {}, { key: "first" }));
  await cells.place([[topic, "a"]], ["b"]); // a does not know it yet
  await assert.rejects(client.publish(topic, "{}", { key: "0" }), (error) => {
    assert.ok(error instanceof SowError && error.reason === "TOPIC_ELSEWHERE");
    assert.equal(
      error.text,
      `${topic}: the cell a says that it lives in the cell b, and the cell b says that it lives in the cell a: their placements differ`,
    );
    return true;
  });
  const publisher = client.publisher(topic, { batchRecords: 2 });
  const taken = publisher.publish({}, { key: "0" }); // which asks for the form of documents first
  const following = client.subscribe(topic);
  await cells.place([]);
  await taken;
  const changes = await following;
  for (let number = 1; number < 5; number++) {
    await publisher.publish({}, { key: String(number) });
  }
  await publisher.close();
  assert.equal((await changes.next()).value!.op, "put");
  changes.close();
  assert.deepEqual([publisher.applied, publisher.duplicates, publisher.refused], [5, 0, 0]);
  assert.deepEqual(await cells.keys("b", topic), ["0", "1", "2", "3", "4", "first"]);
});

test("subscriptions go along when their topic moves, and tell what is missing", { skip }, async (t) => {
  const client = connect(t);
  const topic = cells.topic("a");
  const { bookmark } = await client.publish(topic, { n: 1 }, { key: "1" });
  const changes = await client.subscribe(topic, { start: bookmark! });
  const interruptions: (string | null)[] = [];
  const onInterruption = (error: SowError | null) => interruptions.push(error?.reason ?? null);
  const everything = await client.sowAndSubscribe(topic, { onInterruption });
  const best = await client.liveResult(topic, "", { orderBy: "/n DESC", topN: 1 });
  const ops = async (count: number): Promise<string[]> => {
    const told: string[] = [];
    while (told.length < count) {
      told.push((await everything.next()).value!.op);
    }
    return told;
  };
  assert.deepEqual(await ops(2), ["sow", "snapshot_end"]);
  await cells.place([[topic, "b"]]);
  await cells.direct("b", (direct) => direct.publish(topic, { n: 2 }, { key: "2" }));
  assert.deepEqual(await ops(3), ["resync", "sow", "snapshot_end"]);
  assert.deepEqual(interruptions, ["TOPIC_ELSEWHERE", null]);
  const told = [(await best.next()).value!, (await best.next()).value!];
  assert.deepEqual(told.map(({ op, key }) => `${op} ${key}`), ["oof 1", "put 2"]);
  await assert.rejects(changes.next(), (error) => error instanceof ResyncRequired && error.bookmark !== undefined);
  everything.close();
  best.close();
  await cells.place([]);
});

test("programs go on while their topic moves with its records, and nothing is lost or comes twice (rule C17)", { skip }, async (t) => {
  const client = connect(t);
  const topic = cells.topic("a");
  await client.call(AdminService.method.createTopic, { name: topic, settings: { key: ["/id"] } });
  const publisher = client.publisher(topic, { batchRecords: 5 });
  const best = await client.liveResult<{ id: string }>(topic, "", { orderBy: "/n DESC", topN: 1 });
  let moving = true;
  const moved = cells.move(topic, "b").finally(() => {
    moving = false;
  });
  let count = 0;
  for (; moving || count < 50; count++) {
    await publisher.publish({ id: `p-${count}`, n: count });
    await client.publish(topic, { id: `s-${count}`, n: -1 });
    assert.equal((await client.get(topic, `s-${count}`))?.key, `s-${count}`);
  }
  await moved;
  await publisher.close();
  assert.deepEqual([publisher.applied + publisher.duplicates, publisher.refused], [count, 0]);
  const [there, stray] = await Promise.all(
    (["b", "a"] as const).map((cell) => cells.direct(cell, (direct) => direct.call(AdminService.method.getPlacement, { topic }))),
  );
  assert.deepEqual([there!.topicCell, stray!.copy], ["b", undefined], "the old copy is deleted");
  assert.equal((await cells.keys("b", topic)).length, 2 * count);
  while (best.list()[0]?.key !== `p-${count - 1}`) {
    await best.next();
  }
  best.close();
  await cells.place([]);
});

test("a cell that is down is told for its topics alone", { skip }, async (t) => {
  const client = connect(t, { connectTimeoutMs: 300 });
  const topic = cells.topic("b");
  await client.publish(topic, {}, { key: "1" });
  await cells.servers.b.kill();
  const calls: (() => Promise<unknown>)[] = [
    () => client.get(topic, "1"),
    () => client.count(topic),
    () => client.delete(topic, { keys: ["1"] }),
    () => client.subscribe(topic, { retryForMs: 200 }),
    async () => {
      const publisher = client.publisher(topic, { retryForMs: 200 });
      await publisher.publish("{}", { key: "1" });
      await publisher.close();
    },
  ];
  for (const call of calls) {
    await assert.rejects(call(), (error) => {
      assert.ok(error instanceof Unavailable && error.reason === "UNREACHABLE", String(error));
      assert.ok(error.message.startsWith(`the cell b, where ${topic} lives: cannot connect`), error.message);
      assert.equal(error.details["cell"], "b");
      return true;
    });
  }
  await client.publish(cells.topic("a"), {}, { key: "1" });
  await cells.servers.b.start();
  for (let attempt = 1; (await client.get(topic, "1").catch(() => null)) === null; attempt++) {
    assert.ok(attempt < 20, "gRPC tries to connect every 2 s, and each get waits 0.3 s");
  }
});

test("the topics of all cells are one list, and each cell has a client of its own (rule C19)", { skip }, async (t) => {
  const client = connect(t);
  const names = (["b", "a", "b", "a"] as const).map((cell) => cells.topic(cell));
  for (const name of names) {
    await client.call(AdminService.method.createTopic, { name });
  }
  const listed = (await client.topics({ withStatistics: true })).filter(({ name }) => names.includes(name));
  assert.deepEqual(listed.map(({ name }) => name), names.toSorted());
  assert.ok(listed.every(({ statistics }) => statistics?.liveRecords === 0n));

  const all = await client.cells();
  assert.deepEqual([...all.keys()], ["a", "b"]);
  for (const [cell, only] of all) {
    assert.equal((await only.call(AdminService.method.getStatus, {})).instance, `${cell}-1`);
    const own = (await only.topics()).map(({ name }) => name).filter((name) => names.includes(name));
    assert.deepEqual(own, names.filter((name) => name.startsWith(cell)).toSorted());
    assert.deepEqual([...(await only.cells())], [[cell, only]]);
    const foreign = names.find((name) => !name.startsWith(cell))!;
    await assert.rejects(only.get(foreign, "1"), refusedAs("TOPIC_ELSEWHERE"), "it follows nobody");
    await only.publish(own[0]!, {}, { key: "1" });
  }
  assert.equal((await client.cells()).get("b"), all.get("b"), "made once");
  client.close();
  await assert.rejects(all.get("b")!.topics(), refusedAs("CLOSED"), "its connections are those of the client");
});

test("durables, loads, subscriptions and sessions of all cells are one list each (rule C19)", { skip }, async (t) => {
  const client = connect(t);
  const [here, there] = [cells.topic("a"), cells.topic("b")];
  const loads: string[] = [];
  for (const topic of [there, here]) {
    await client.call(AdminService.method.createTopic, { name: topic });
    await cells.direct(topic === here ? "a" : "b", async (direct) => {
      loads.push((await direct.call(LoadService.method.openLoad, { topic })).loadId);
    });
  }
  python(
    `
from sow_client import Client
with Client(${JSON.stringify(cells.at("a"))}) as client:
    for topic in ${JSON.stringify([there, here])}:
        for name in ("late", "early"):
            client.durable(topic, name).open()
`,
    cells.servers.a.folder,
  );
  const ours = <Item extends { topic: string }>(items: readonly Item[]) => items.filter(({ topic }) => [here, there].includes(topic));
  const durables = ours(await client.durables({ withFigures: true }));
  assert.deepEqual(
    durables.map(({ cell, topic, name }) => [cell, topic, name]),
    [["a", here, "early"], ["a", here, "late"], ["b", there, "early"], ["b", there, "late"]],
  );
  assert.ok(durables.every(({ figures }) => figures !== undefined));
  const opened = ours(await client.loads());
  assert.deepEqual(opened.map(({ cell, loadId }) => [cell, loadId]), [["b", loads[0]], ["a", loads[1]]], "as they were opened");
  for (const [cell, topic] of [["a", here], ["b", there]] as const) {
    assert.deepEqual((await client.durables({ topic })).map((durable) => [durable.cell, durable.topic]), [[cell, topic], [cell, topic]]);
    assert.deepEqual((await client.loads({ topic })).map((load) => load.cell), [cell]);
  }

  const following = [await client.subscribe(there), await client.subscribe(here), await client.subscribe({ pattern: `${here}|${there}` })];
  const found = await client.subscriptions();
  assert.deepEqual(ours(found).map(({ cell }) => cell), ["b", "a"]);
  assert.deepEqual(found.filter(({ topicPattern }) => topicPattern !== "").map(({ cell }) => cell).sort(), ["a", "b"]);
  const [its] = await client.subscriptions({ topic: there });
  assert.deepEqual([its!.cell, its!.topic], ["b", there]);
  const of = async (cell: string) => (await client.cells()).get(cell)!;
  await (await of(its!.cell)).call(AdminService.method.endSubscription, { id: its!.id });
  assert.deepEqual([...new Set((await client.sessions()).map(({ cell }) => cell))].sort(), ["a", "b"]);
  assert.deepEqual(ours(await (await of("b")).durables()).map(({ cell }) => cell), ["b", "b"], "a client of one cell");
  following.forEach((one) => one.close());
});

test("a list is whole or an error that names the cell", { skip }, async (t) => {
  const client = connect(t, { connectTimeoutMs: 2_000 });
  await cells.servers.b.stop();
  const lists = [client.topics(), client.durables(), client.loads(), client.subscriptions(), client.sessions()];
  for (const list of lists) {
    list.catch(() => undefined); // it is awaited in its turn
  }
  for (const list of lists) {
    await assert.rejects(list, (error) => {
      assert.ok(error instanceof Unavailable && error.message.startsWith("the cell b: cannot connect"), String(error));
      assert.equal(error.details["cell"], "b");
      return true;
    });
  }
  assert.ok((await (await client.cells()).get("a")!.topics()).length > 0, "the program may go on with the others");
  await cells.servers.b.start();
});

test("a server without a placement is one cell without a name", { skip }, async (t) => {
  const server = await Server.start(t);
  const client = new Client(server.address);
  t.after(() => client.close());
  await client.publish("orders", {}, { key: "1" });
  assert.deepEqual((await client.topics()).map(({ name, cell }) => [name, cell]), [["orders", ""]]);
  assert.deepEqual([await client.durables(), await client.loads({ topic: "orders" })], [[], []]);
  assert.deepEqual((await client.sessions()).map(({ cell }) => cell), [""]);
  assert.deepEqual([...(await client.cells())], [["", client]]);
});

test("calls without a topic, and those that every cell answers, are of home", { skip }, async (t) => {
  const client = connect(t);
  const there = cells.topic("b");
  await client.publish(there, {}, { key: "1" });
  const names = async (from: Client) => (await from.call(AdminService.method.listTopics, {})).topics.map(({ name }) => name);
  assert.ok(!(await names(client)).includes(there));
  const { cell, topicCell } = await client.call(AdminService.method.getPlacement, { topic: there });
  assert.deepEqual([cell, topicCell], ["a", "b"]);
  await client.call(AccessService.method.whoAmI, {});
  await assert.rejects(
    client.call(AdminService.method.deleteTopic, { name: there, here: true }),
    refusedAs("TOPIC_NOT_FOUND"),
    "a stray would be here",
  );
  assert.deepEqual(await cells.keys("b", there), ["1"]);
});
