/** What becomes of calls, publishers and subscriptions when a server goes: resuming, and going on at another instance. */

import assert from "node:assert/strict";
import test from "node:test";
import { Client, type Instance, SowError, Unavailable } from "../../src/index.js";
import { NO_SERVER, Server } from "../support/server.js";

const ORDERS = "[server]\ncluster = 'CLUSTER'\n[topics.orders]\nkey = ['/id']\n";
const config = (name: string, cluster = "prod") => ORDERS.replace("CLUSTER", `${cluster}'\ninstance = '${name}`);
const refusedAs = (reason: string) => (error: unknown) => error instanceof SowError && error.reason === reason;
const skip = NO_SERVER;

test("a server that is not there is an error with its cause, soon", { skip }, async (t) => {
  const client = new Client("127.0.0.1:1", { connectTimeoutMs: 300 });
  t.after(() => client.close());
  await assert.rejects(client.get("orders", "1"), (error) => {
    assert.ok(error instanceof Unavailable && error.reason === "UNREACHABLE");
    assert.match(error.message, /cannot connect to 127\.0\.0\.1:1 within 0\.3 s: .*ECONNREFUSED/);
    return true;
  });
  await assert.rejects(client.subscribe("orders"), refusedAs("UNREACHABLE"));
  const publisher = client.publisher("orders");
  await assert.rejects(publisher.publish({ id: 1 }), refusedAs("UNREACHABLE"), "it needs the topic's message type");
  await publisher.publish('{"id":1}');
  await assert.rejects(publisher.close(), refusedAs("UNREACHABLE"));
});

test("a subscription misses and repeats nothing over kills, and a publisher applies once", { skip }, async (t) => {
  const server = await Server.start(t, config("a"));
  const client = new Client(server.address);
  t.after(() => client.close());
  const interruptions: (string | null)[] = [];
  const changes = await client.subscribe<{ id: number }>("orders", {
    onInterruption: (error) => interruptions.push(error?.reason ?? null),
  });
  const publisher = client.publisher("orders", { batchRecords: 50, retryForMs: 120_000 });
  const ids: number[] = [];
  const read = async (upto: number): Promise<void> => {
    while (ids.length < upto) {
      const { value } = await changes.next();
      assert.ok(value?.op === "put");
      ids.push(value.record.data.id);
    }
  };
  const publish = async (from: number, upto: number): Promise<void> => {
    for (let id = from; id < upto; id++) {
      await publisher.publish({ id });
    }
  };
  await publish(0, 1_000);
  await read(500);
  for (const [end, from] of [
    ["kill", 1_000],
    ["stop", 2_000],
  ] as const) {
    const sending = publish(from, from + 1_000);
    await server[end]();
    await server.start();
    await sending;
    await publisher.flush();
    await read(from + 1_000);
  }
  await publisher.close();
  assert.equal(publisher.applied + publisher.duplicates, 3_000);
  assert.deepEqual(ids, Array.from({ length: 3_000 }, (_, id) => id));
  assert.equal(interruptions.filter((reason) => reason === null).length, 2, "told twice that it goes on");
  assert.equal(await client.count("orders"), 3_000n);
  changes.close();
});

test("a live result tells the differences over a kill (rule S13)", { skip }, async (t) => {
  const server = await Server.start(t, config("a"));
  const client = new Client(server.address);
  t.after(() => client.close());
  await client.publishMany("orders", [1, 2, 3].map((id) => ({ id, price: id })));
  const interruptions: (string | null)[] = [];
  const onInterruption = (error: SowError | null) => interruptions.push(error?.reason ?? null);
  const best = await client.liveResult<{ price: number }>("orders", "", { orderBy: "/price DESC", topN: 2, onInterruption });
  const own = new Map(best.list().map((record) => [record.key, record.data.price]));
  assert.deepEqual([...own], [["3", 3], ["2", 2]]);
  await server.kill();
  await server.start();
  await client.publish("orders", { id: 4, price: 4 });
  while (best.list()[0]!.key !== "4" || interruptions.length < 2) {
    const { value: change } = await best.next();
    change!.op === "put" ? own.set(change!.key, change!.record.data.price) : own.delete(change!.key);
  }
  for (let rest = best.list().length; own.size !== rest || !own.has("4"); ) {
    const { value: change } = await best.next(); // the list is ahead of those that are not handed out yet
    change!.op === "put" ? own.set(change!.key, change!.record.data.price) : own.delete(change!.key);
  }
  assert.deepEqual([...own].sort(), [["3", 3], ["4", 4]]);
  assert.equal(interruptions.at(-1), null);
  best.close();
});

test("calls go on at the next instance that serves, and stay there", { skip }, async (t) => {
  const [a, b] = await Promise.all([Server.start(t, config("a")), Server.start(t, config("b"))]);
  const moves: string[] = [];
  const onFailover = (left: Instance, used: Instance, reason: string) => moves.push(`${left.name} ${used.name} ${reason}`);
  const client = new Client([a.address, b.address], { onFailover });
  t.after(() => client.close());
  const used = () => [client.instance?.name, client.instance?.cluster];
  assert.deepEqual(used(), [undefined, undefined]);
  await client.publish("orders", { id: "at a" });
  assert.deepEqual(used(), ["a", "prod"]);
  const changes = await client.sowAndSubscribe("orders");
  const ops = async (count: number): Promise<string[]> => {
    const told: string[] = [];
    while (told.length < count) {
      told.push((await changes.next()).value!.op);
    }
    return told;
  };
  assert.deepEqual(await ops(2), ["sow", "snapshot_end"]);

  await a.kill();
  await client.publish("orders", { id: "at b" });
  assert.equal((await client.get("orders", "at b"))?.origin, "b");
  assert.deepEqual(await ops(3), ["resync", "sow", "snapshot_end"], "b knows nothing of the bookmarks of a");
  assert.equal(moves.length, 1);
  assert.match(moves[0]!, /^a b (UNREACHABLE|STOPPING)$/);
  changes.close();

  await a.start();
  assert.equal(await client.get("orders", "at a"), null, "nobody asked to go back");
  const publisher = client.publisher("orders");
  await publisher.publish({ id: "p1" });
  await publisher.flush();
  await b.stop();
  await publisher.publish({ id: "p2" });
  await publisher.close();
  assert.equal((await client.get("orders", "p2"))?.origin, "a");
  await a.kill();
  await assert.rejects(client.get("orders", "p2"), (error) => error instanceof SowError && /no instance of .* serves within/.test(error.message));
});

test("a subscription goes on at a peer by its bookmark, without a new snapshot", { skip, timeout: 300_000 }, async (t) => {
  const [a, b] = await Promise.all([Server.make(t), Server.make(t)]);
  const peer = (name: string, address: string) =>
    `[replication]\ntoken = "agreed"\naccept = ["${name}"]\n[[replication.peers]]\nname = "${name}"\naddress = "${address}"\n`;
  a.configure(config("a") + peer("b", b.address));
  b.configure(config("b") + peer("a", a.address));
  await Promise.all([a.start(), b.start()]);
  const client = new Client([a.address, b.address]);
  const atB = new Client(b.address);
  t.after(() => {
    client.close();
    atB.close();
  });
  const changes = await client.subscribe<{ id: number }>("orders");
  const seen = new Set<number>();
  const readUpto = async (id: number): Promise<void> => {
    while (!seen.has(id)) {
      const { value } = await changes.next();
      assert.ok(value?.op === "put");
      seen.add(value.record.data.id);
    }
  };

  let id = 0;
  let { bookmark } = await client.publish("orders", { id });
  await readUpto(id);
  while (!changes.bookmark!.includes(";")) {
    ({ bookmark } = await client.publish("orders", { id: ++id })); // until it tells the position at b, too
    await readUpto(id);
  }
  const arrived = async (): Promise<boolean> =>
    (await atB.get("orders", id, { minPosition: bookmark! }).catch((error: unknown) => {
      assert.ok(refusedAs("BEHIND")(error), String(error));
      return null;
    })) !== null;
  while (!(await arrived()));

  await a.kill();
  await client.publish("orders", { id: ++id });
  assert.equal(client.instance?.name, "b");
  await readUpto(id);
  assert.equal(seen.size, id + 1, "nothing is missing");
  changes.close();
});

test("an instance of another cluster is no place to go on", { skip }, async (t) => {
  const [a, b] = await Promise.all([Server.start(t, config("a")), Server.start(t, config("b", "test"))]);
  const client = new Client(`${a.address},${b.address}`, { connectTimeoutMs: 1_000 });
  t.after(() => client.close());
  await client.publish("orders", { id: 1 });
  await a.kill();
  await assert.rejects(client.get("orders", 1), /b at .* is of the cluster test, and this client is of the cluster prod/);
});
