/** Every method of the client, against a real server. */

import assert from "node:assert/strict";
import test, { after, before, describe } from "node:test";
import {
  type Change,
  Client,
  ConditionFailed,
  dateOf,
  InvalidArgument,
  NotFound,
  type Parameters,
  PublishFailed,
  type Published,
  type Refusal,
  SowError,
} from "../../src/index.js";
import { AdminService, Expiration, MessageType } from "../../src/contract.js";
import { NO_SERVER, Server } from "../support/server.js";

interface Order {
  id: bigint | number;
  price: number;
}

const refusedAs = (reason: string) => (error: unknown) => error instanceof SowError && error.reason === reason;

describe("one server", { skip: NO_SERVER }, () => {
  let client: Client;
  let address: string;
  const endings: (() => void | Promise<void>)[] = [];

  before(async () => {
    const server = await Server.start({ after: (end) => endings.push(end) });
    address = server.address;
    client = new Client(address);
    const settings = { key: ["/id"], index: ["/price"], expiration: Expiration.ENABLED };
    await client.call(AdminService.method.createTopic, { name: "orders", settings });
    await client.call(AdminService.method.createTopic, { name: "pairs", settings: { key: ["/a", "/b"] } });
    const blobs = { messageType: MessageType.BINARY, expiration: Expiration.ENABLED };
    await client.call(AdminService.method.createTopic, { name: "blobs", settings: blobs });
  });

  after(async () => {
    client.close();
    for (const end of endings) {
      await end();
    }
  });

  test("a view is kept right with each change", async () => {
    const { createTopic, describeTopic } = AdminService.method;
    await client.call(createTopic, { name: "deals", settings: { key: ["/id"] } });
    await client.publish("deals", { id: 1, account: "A", qty: 5 });
    await client.createView("positions", { source: "deals", groupBy: ["/account"], select: { qty: "SUM(/qty)" } });
    while (!(await client.call(describeTopic, { name: "positions" })).topic?.viewStatus?.complete);
    await client.publish("deals", { id: 2, account: "A", qty: 7 });
    const [position] = await client.query<{ account: string; qty: number }>("positions").all();
    assert.deepEqual([position?.key, position?.data], ["A", { account: "A", qty: 12 }]);
    await assert.rejects(client.publish("positions", { account: "B", qty: 1 }), refusedAs("VIEW_READ_ONLY"));
  });

  test("a bigint is exact in a filter, and the digits of a float are its key", async () => {
    const large = 123456789012345678901234567890n;
    for (const id of [large, large + 1n]) {
      await client.publish("orders", { id, n: id });
    }
    const keys = async (filter: string) => (await client.query("orders", filter).all()).map((record) => record.key);
    assert.deepEqual(await keys(`/n = ${large}`), [String(large)]);
    assert.deepEqual(await keys(`/n > ${large} AND /n < ${large + 2n}`), [String(large + 1n)]);
    assert.deepEqual(await keys(`/id = ${large + 1n}`), [String(large + 1n)]);
    const float = 1.2345678901234568e20;
    const done = await client.publish("orders", { id: float });
    assert.equal(done.key, String(float));
    assert.equal((await client.publish("orders", '{"id":1.2345678901234568e+20}')).key, done.key, "as Python writes it");
    assert.deepEqual((await client.get("orders", BigInt(String(float))))?.key, done.key);
    await client.delete("orders", { filter: `/id >= ${large / 10n ** 10n}` });
    assert.deepEqual(await keys(`/id >= ${large / 10n ** 10n}`), []);
  });

  test("a record comes back with every digit: key, payload, version, times", async () => {
    const id = 9_007_199_254_740_993n;
    const done = await client.publish("orders", { id, price: 0.1, n: -(2n ** 63n) }, { ttl: "1h" });
    assert.equal(done.key, "9007199254740993");
    const record = (await client.get<Order & { n: bigint }>("orders", id))!;
    assert.equal(Buffer.from(record.payload).toString(), '{"id":9007199254740993,"price":0.1,"n":-9223372036854775808}');
    assert.deepEqual(record.data, { id, price: 0.1, n: -(2n ** 63n) });
    assert.deepEqual([record.version, record.sequence, record.expireTimeMicros], [done.version, done.sequence, done.expireTimeMicros]);
    assert.equal(record.expireTimeMicros! - record.publishTimeMicros, 3_600_000_000n);
    assert.ok(record.version > 2n ** 50n && dateOf(record.publishTimeMicros).getUTCFullYear() > 2000);
  });

  test("keys of several fields, numbers and odd texts find their records (rule K4)", async () => {
    for (const [a, b] of [["x|y", "\\"], [1e-7, true], [-0.0001, 2n ** 70n]] as const) {
      const { key } = await client.publish("pairs", { a, b });
      const found = await client.get("pairs", [a, b]);
      assert.equal(found?.key, key);
    }
    assert.equal(await client.get("pairs", ["x", "y"]), null);
  });

  test("bytes of any kind come back as they went in", async () => {
    const bytes = Uint8Array.from({ length: 256 }, (_, index) => index);
    await client.publish("blobs", bytes, { key: "all|\\é" });
    const record = (await client.get("blobs", "all|\\é"))!;
    assert.deepEqual(Uint8Array.from(record.payload), bytes);
    assert.throws(() => record.data, refusedAs("PAYLOAD_MALFORMED"));
  });

  test("a text of a user is a value of a filter, and never a part of it", async () => {
    const names = ["O'Brien", "' OR true OR /name = '", "\\", "null", "5", "🚗", ""];
    const records = names.map((name, id) => ({ id: `n${id}`, name, n: BigInt(id), big: 2n ** 64n + BigInt(id) }));
    await client.publishMany("orders", records);
    for (const [id, name] of names.entries()) {
      const found = await client.query("orders", "/name = :name", { parameters: { name } }).all();
      assert.deepEqual(found.map(({ key }) => key), [`n${id}`]);
    }
    const keys = async (filter: string, parameters: Parameters) =>
      (await client.query("orders", `${filter} AND @key BEGINS WITH 'n'`, { parameters }).all()).map(({ key }) => key);
    assert.deepEqual(await keys("/n = :n", { n: 3 }), ["n3"]);
    assert.deepEqual(await keys("/n IN :some", { some: [1n, 2, "x", true, null] }), ["n1", "n2"]);
    assert.deepEqual(await keys("/n < :n", { n: 0.5 }), ["n0"]);
    assert.equal(await client.count("orders", "/name = :name", { parameters: { name: names[1]! } }), 1n);
    const attack = { filter: "/name = :name", parameters: { name: names[1]! } };
    assert.equal((await client.delete("orders", { ...attack, dryRun: true })).matched, 1n);
    const changes = await client.sowAndSubscribe("orders", attack);
    const first: Change = (await changes.next()).value!;
    assert.ok(first.op === "sow" && first.key === "n1");
    await changes.close();
    await assert.rejects(client.query("orders", "/name = :name").all(), refusedAs("FILTER_INVALID"));
    await assert.rejects(client.count("orders", "/name = 'x'", { parameters: { name: "x" } }), refusedAs("FILTER_INVALID"));
    await assert.rejects(client.delete("orders", { all: true, parameters: { name: "x" } }), InvalidArgument);
    assert.throws(() => client.query("orders", "/name = :name", { parameters: { name: "\ud800" } }), InvalidArgument);
    assert.equal((await client.delete("orders", { filter: "@key IN :keys", parameters: { keys: records.map(({ id }) => id) } })).deleted, 7n);
  });

  test("a query is of one instant, with filter, order and counts", async () => {
    const documents = Array.from({ length: 2_500 }, (_, index) => ({ id: `q${index}`, price: index }));
    const outcomes = await client.publishMany("orders", documents);
    assert.ok(outcomes.every(({ refused }) => !refused));
    const minPosition = (outcomes.at(-1) as Published).bookmark!;
    const top = client.query<Order>("orders", "/price >= 100", { orderBy: "/price DESC", topN: 3, minPosition });
    const prices: number[] = [];
    for await (const record of top) {
      prices.push(record.data.price);
    }
    assert.deepEqual(prices, [2499, 2498, 2497]);
    assert.equal(top.footer!.returned, 3n);
    assert.ok(top.header!.asOfMicros > 0n);
    const every = await client.query("orders", "@key LIKE '^q'", { keysOnly: true, batchSize: 700 }).all();
    assert.deepEqual([every.length, every[0]!.payload.length], [2_500, 0]);
    assert.equal(await client.count("orders", "/price < 10 AND @key LIKE '^q'"), 10n);
    const absent: string[] = [];
    const onAbsentFields = (paths: readonly string[]) => absent.push(...paths);
    assert.equal(await client.count("orders", "/prcie < 10", { onAbsentFields }), 0n);
    assert.equal(await client.count("orders", "/price < -1", { onAbsentFields }), 0n);
    const mistyped = client.query("orders", "/prcie < 10", { orderBy: "/prize" });
    await mistyped.all();
    const deleted = await client.delete("orders", { filter: "/prcie < 10" });
    assert.deepEqual(
      [absent, mistyped.footer!.absentFields, deleted.absentFields],
      [["/prcie"], ["/prcie", "/prize"], ["/prcie"]],
      "a field that no record has is told (rule Q10)",
    );
    for await (const change of await client.sowAndSubscribe("orders", { filter: "/prcie < 10" })) {
      assert.deepEqual(change.op === "snapshot_end" && change.absentFields, ["/prcie"]);
      break;
    }
    for await (const _ of client.query("orders")) {
      break; // leaving early ends the call
    }
    assert.equal((await client.getMany("orders", ["q7", "none", "q3"])).map(({ key }) => key).join(), "q7,q3");
  });

  test("pages continue where the one before ended (rule Q4)", async () => {
    const seen = new Set<string>();
    let pageToken = "";
    do {
      const page = client.query("orders", "@key LIKE '^q'", { pageSize: 1_000, pageToken });
      (await page.all()).forEach(({ key }) => seen.add(key));
      pageToken = page.footer!.nextPageToken;
    } while (pageToken !== "");
    assert.equal(seen.size, 2_500);
  });

  test("conditions, deltas, touches and deletes", async () => {
    const first = await client.publish("orders", { id: "c", price: 1, note: { a: 1 } }, { onlyIfAbsent: true });
    await assert.rejects(
      client.publish("orders", { id: "c", price: 2 }, { onlyIfAbsent: true }),
      (error) => error instanceof ConditionFailed && error.currentVersion === first.version,
    );
    await client.publish("orders", { id: "c", price: 3, note: { a: 1, b: 2 } }, { onlyIfVersion: first.version });
    await client.deltaPublish("orders", { id: "c", price: 4 }, { unset: ["/note/a"], ttl: "5m" });
    assert.deepEqual((await client.get("orders", "c"))!.data, { id: "c", price: 4, note: { b: 2 } });
    const touched = await client.touch("orders", "c", { ttl: "1h", only: "later" });
    await assert.rejects(client.touch("orders", "c", { ttl: "1m", only: "later" }), refusedAs("CONDITION_FAILED"));
    assert.ok(touched.expireTimeMicros! > 0n);
    assert.equal((await client.persist("orders", "c")).expireTimeMicros, null);
    await assert.rejects(client.touch("orders", "none", { ttl: "1m" }), (error) => error instanceof NotFound && error.reason === "RECORD_NOT_FOUND");

    const { version } = (await client.get("orders", "c"))!;
    assert.equal((await client.delete("orders", { keys: ["c"], onlyIfVersions: [version - 1n] })).deleted, 0n);
    assert.equal((await client.delete("orders", { filter: "@key = 'c'", dryRun: true })).matched, 1n);
    assert.equal((await client.delete("orders", { keys: ["c"], onlyIfVersions: [version] })).deleted, 1n);
    await client.publish("orders", { id: "d", price: 1 });
    assert.equal((await client.delete("orders", { data: { id: "d" } })).deleted, 1n);
  });

  test("each refusal has its class, its reason and the field at fault", async () => {
    await assert.rejects(
      client.get("nowhere", "1"),
      (error) => error instanceof NotFound && error.reason === "TOPIC_NOT_FOUND" && error.details["topic"] === "nowhere",
    );
    await assert.rejects(client.publish("orders", { price: 1 }), (error) => error instanceof InvalidArgument && error.reason === "KEY_FIELD_MISSING");
    await assert.rejects(client.query("orders", "/price >").all(), refusedAs("FILTER_INVALID"));
    await assert.rejects(client.publish("orders", "{"), refusedAs("PAYLOAD_MALFORMED"));
    await assert.rejects(client.call(AdminService.method.createTopic, { name: "orders" }), refusedAs("TOPIC_EXISTS"));
    await assert.rejects(client.call(AdminService.method.createTopic, { name: "a b" }), refusedAs("TOPIC_NAME_INVALID"));
    await assert.rejects(client.get("orders", "x".repeat(21 * 1024 * 1024)), refusedAs("REQUEST_TOO_LARGE"));
    await assert.rejects(client.delete("orders", {}), (error) => error instanceof InvalidArgument && error.details["field"] === "keys");

    const [good, bad] = await client.publishMany("orders", [{ id: "g" }, { price: 1 }]);
    assert.equal(good!.refused, false);
    assert.deepEqual([(bad as Refusal).index, (bad as Refusal).reason], [1, "KEY_FIELD_MISSING"]);
    const [aborted] = (await client.publishMany("orders", [{ id: "h" }, { price: 1 }], { atomic: true })) as Refusal[];
    assert.equal(aborted!.reason, "ATOMIC_ABORTED");
    assert.equal(await client.get("orders", "h"), null);
  });

  test("a publisher keeps the order, and tells refusals", async () => {
    const publisher = client.publisher("orders", { batchRecords: 100, ttl: "1h" });
    for (let price = 0; price < 5_000; price++) {
      await publisher.publish({ id: `p${price % 1_000}`, price });
    }
    await publisher.flush();
    assert.deepEqual([publisher.applied, publisher.refused], [5_000, 0]);
    assert.equal((await client.get<Order>("orders", "p7"))!.data.price, 4_007);
    await publisher.publish({ nothing: true });
    await assert.rejects(publisher.close(), (error) => error instanceof PublishFailed && error.refusals[0]!.index === 5_000);
  });

  test("a transaction moves a record, or changes nothing (rules P4, P11)", async () => {
    await client.publish("orders", { id: "t1", price: 1 });
    const change = client.transaction("orders", { durability: "fsync" });
    change.remove("t1");
    change.publish({ id: "t2", price: 2 }, { ttl: "1h", onlyIfAbsent: true });
    change.remove(undefined, { data: { id: "nobody" } });
    assert.equal((await client.get("orders", "t1"))!.key, "t1", "nothing is sent before the commit");
    const [gone, made, none] = await change.commit();
    assert.deepEqual([gone!.removed, made!.removed, none!.removed], [true, false, false]);
    assert.deepEqual([none!.version, none!.sequence, none!.refused], [0n, 0n, false]);
    assert.ok(made!.expireTimeMicros! > 0n);
    assert.equal(gone!.bookmark, made!.bookmark, "the place behind all of it");
    assert.equal(await client.get("orders", "t1"), null);
    assert.deepEqual((await client.get("orders", "t2"))!.data, { id: "t2", price: 2 });

    const refused = client.transaction("orders");
    refused.remove("t2");
    refused.publish({ id: "t3", price: 3 }, { onlyIfVersion: 7n });
    await assert.rejects(
      refused.commit(),
      (error) =>
        error instanceof PublishFailed &&
        error.reason === "CONDITION_FAILED" &&
        error.refused === 2 &&
        error.refusals[0]!.index === 1,
    );
    assert.equal((await client.get("orders", "t2"))!.key, "t2");
    assert.equal(await client.get("orders", "t3"), null);
  });

  test("a transaction is sent once, and checks what it is given", async () => {
    const change = client.transaction("orders");
    assert.throws(() => change.remove(undefined), refusedAs("INVALID_ARGUMENT"));
    assert.throws(() => change.remove("a", { data: { id: "a" } }), refusedAs("INVALID_ARGUMENT"));
    assert.throws(
      () => change.publish({ id: "a" }, { onlyIfAbsent: true, onlyIfPresent: true }),
      (error) => error instanceof InvalidArgument && error.details["field"] === "onlyIfVersion",
    );
    assert.deepEqual(await change.commit(), []);
    assert.throws(() => change.publish({ id: "a" }), refusedAs("CLOSED"));
    assert.throws(() => change.remove("a"), refusedAs("CLOSED"));
    await assert.rejects(change.commit(), refusedAs("CLOSED"));
    const missing = client.transaction("orders");
    missing.remove("nobody", { onlyIfPresent: true });
    await assert.rejects(missing.commit(), (error) => error instanceof PublishFailed);
    const blobs = client.transaction("blobs");
    blobs.publish(new Uint8Array([0, 255]), { key: "t" });
    blobs.publish("text", { key: 8 });
    assert.deepEqual((await blobs.commit()).map(({ key }) => key), ["t", "8"]);
    const large = client.transaction("orders");
    for (let id = 0; id <= 1_000; id++) {
      large.remove(id);
    }
    await assert.rejects(large.commit(), refusedAs("ATOMIC_TOO_LARGE"));
  });

  test("the next publisher of an id fences the one before (rule P6)", async () => {
    const first = client.publisher("orders", { publisherId: "only" });
    await first.publish({ id: "f1" });
    await first.flush();
    const second = client.publisher("orders", { publisherId: "only" });
    await second.publish({ id: "f2" });
    await second.close();
    await first.publish({ id: "f3" });
    await assert.rejects(first.close(), refusedAs("PUBLISHER_FENCED"));
  });

  test("a subscriber is told what comes, changes and goes, exactly", async () => {
    await client.publish("orders", { id: "s1", price: 10 });
    const changes = await client.sowAndSubscribe<Order>("orders", { filter: "/price > 9 AND @key LIKE '^s'", oof: true });
    const big = 2n ** 60n + 1n;
    await client.publish("orders", { id: "s2", price: 20, big }, { ttl: "1h" });
    await client.touch("orders", "s2", { ttl: "2h" });
    await client.publish("orders", { id: "s1", price: 1 });
    await client.delete("orders", { keys: ["s2"] });
    const last = await client.publish("orders", { id: "s3", price: 30 }, { ttl: "0s" }); // due at once
    assert.ok(last.version > 0n);
    const told: string[] = [];
    for await (const change of changes) {
      told.push([change.op, change.reason ?? "", "key" in change ? change.key : ""].join(" ").trim());
      if (change.op === "put" && change.key === "s2") {
        assert.equal((change.record.data as unknown as { big: bigint }).big, big);
      }
      if (change.op === "oof" && change.reason === "deleted") {
        assert.equal(change.previous.data.price, 20);
      }
      if (told.length === 8) {
        break;
      }
    }
    assert.deepEqual(told.slice(0, 8), [
      "sow  s1",
      "snapshot_end",
      "put  s2",
      "put touched s2",
      "oof match s1",
      "oof deleted s2",
      "put  s3",
      "oof expired s3",
    ]);
  });

  test("a live result is the list of the query, with each change at its place (rules S10, S11)", async () => {
    await client.call(AdminService.method.createTopic, { name: "ranked", settings: { key: ["/id"] } });
    await client.publishMany("ranked", [4, 3, 2, 1].map((price) => ({ id: `r${price}`, price, side: price % 2 })));
    const best = await client.liveResult<Order>("ranked", "/price > 0", { orderBy: "/price DESC", topN: 2, skipN: 1 });
    const keys = () => best.list().map(({ key }) => key);
    assert.deepEqual(keys(), ["r3", "r2"]);
    await client.publish("ranked", { id: "r1", price: 3.5, side: 1 });
    const told: unknown[][] = [];
    const until = async (wanted: string[]): Promise<void> => {
      for (let isWhole = false; !isWhole || keys().join() !== wanted.join(); ) {
        const { value: change } = await best.next();
        isWhole = change!.bookmark !== null;
        told.push([change!.op, change!.reason, change!.key, change!.op === "put" ? change!.position : change!.previous.data.price]);
      }
    };
    await until(["r1", "r3"]);
    await client.delete("ranked", { keys: ["r1"] });
    await until(["r3", "r2"]);
    best.close();
    assert.deepEqual(told.slice(0, 2), [["oof", "window", "r2", 2], ["put", null, "r1", 0]]);
    assert.deepEqual(told.slice(2), [["oof", "deleted", "r1", 3.5], ["put", null, "r2", 1]]);
    const sums = { groupBy: ["/side"], aggregate: { total: "SUM(/price)" }, orderBy: "/total" };
    const sides = await client.liveResult<{ side: number; total: number }>("ranked", "", sums);
    assert.deepEqual(sides.list().map(({ data }) => data), [{ side: 1, total: 3 }, { side: 0, total: 6 }]);
    sides.close();
    await assert.rejects(client.liveResult("ranked", "", { orderBy: "/price" }), refusedAs("INVALID_ARGUMENT"));
    await assert.rejects(client.liveResult("ranked", "", { orderBy: "/price", topN: 10_001 }), refusedAs("INVALID_ARGUMENT"));
  });

  test("a subscription starts where a publish ended, or at the earliest change", async () => {
    const done = await client.publish("orders", { id: "t1", price: 1 });
    await client.publish("orders", { id: "t2", price: 1 });
    const after = await client.subscribe("orders", { start: done.bookmark! });
    const { value } = await after.next();
    assert.ok(value?.op === "put" && value.key === "t2");
    after.close();
    const pattern = await client.subscribe({ pattern: "ord.*" }, { start: "earliest", changes: true });
    assert.equal((await pattern.next()).value?.topic, "orders");
    pattern.close();
    await assert.rejects(client.subscribe("orders", { start: "nonsense" }), refusedAs("BOOKMARK_MALFORMED"));
    await assert.rejects(client.subscribe("orders", { start: new Date(Date.now() + 3_600_000) }), refusedAs("TIME_IN_FUTURE"));
  });

  test("a client that is closed says so", async () => {
    const other = new Client(address);
    const changes = await other.subscribe("pairs");
    const publisher = other.publisher("orders");
    await publisher.publish({ id: "closing" });
    await publisher.flush();
    const waiting = changes.next();
    other.close();
    await assert.rejects(waiting, refusedAs("CLOSED"));
    await assert.rejects(other.get("orders", "1"), refusedAs("CLOSED"));
    await assert.rejects(other.query("orders").all(), refusedAs("CLOSED"));
    await publisher.publish({ id: "lost" });
    await assert.rejects(publisher.close(), refusedAs("CLOSED"));
  });
});
