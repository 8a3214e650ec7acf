/** Payloads of every message type, between this client and the Python clients: what one writes, the other reads. */

import assert from "node:assert/strict";
import test, { after, before, describe } from "node:test";
import { FIELDS } from "../../src/needs.js";
import { Client, ExtData, InvalidArgument, PublishFailed } from "../../src/index.js";
import { AdminService, MessageType } from "../../src/contract.js";
import { NO_SERVER, python, Server } from "../support/server.js";

const CONFIG = `
[server]
dynamic_topics = true
[topics.packed]
key = ["/id"]
message_type = "msgpack"
[topics.fixed]
key = ["/55"]
message_type = "fix"
[topics.named]
key = ["/sym"]
message_type = "nvfix"
fix_separator = "|"
[topics.comp]
key = ["/a", "/b"]
[topics.blobs]
message_type = "binary"
`;

const WRITE = (address: string) => `
import datetime, msgspec, sow_client
with sow_client.Client(${JSON.stringify(address)}, environment={}) as client:
    at = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)
    client.publish("packed", {
        "id": "python", "small": 5, "safe": 2**53 - 1, "big": 2**53 + 1, "least": -(2**63), "most": 2**64 - 1,
        "float": 0.1, "nan": float("nan"), "bytes": b"\\x00\\xff", "ext": msgspec.msgpack.Ext(5, b"\\x01"),
        "milli": at.replace(microsecond=250_000), "micro": at.replace(microsecond=1), "none": None,
        "numbers": {1: "a", 2: "b"}, "both": {1: "a", "1": "b"},
    })
    client.publish("fixed", {"55": "PY", "96": "a\\x0155=Z", "58": b"\\xe9"})
`;

const READ = (address: string) => `
import datetime, math, msgspec, sow_client
with sow_client.Client(${JSON.stringify(address)}, environment={}) as client:
    found = client.get("packed", 9007199254740993).data
    at = datetime.datetime(2026, 1, 31, 12, 0, 0, 250_000, datetime.UTC)
    assert math.isnan(found.pop("nan")), found
    expected = {
        "id": 9007199254740993, "small": 5, "safe": 2**53 - 1, "long": 2**40, "least": -(2**63), "most": 2**64 - 1,
        "float": 0.1, "bytes": b"\\x00\\xff", "at": at, "ext": msgspec.msgpack.Ext(5, b"\\x01"),
        "deep": {"list": [1, None, "\\u00e9"]},
    }
    assert found == expected, found
    assert [type(found[name]) for name in ("small", "long", "most")] == [int] * 3, found
    assert client.get("packed", "stream").data == {"id": "stream", "n": 1}
    assert client.get("fixed", "TS").data == {"55": "TS", "95": "5", "96": "a\\x01b=1", "44": "9.5"}
    assert client.get("named", "TS").data == {"sym": "TS", "n": str(2**70)}
`;

describe("payloads", { skip: NO_SERVER }, () => {
  let server: Server;
  let client: Client;
  const endings: (() => void | Promise<void>)[] = [];
  before(async () => {
    server = await Server.start({ after: (end) => void endings.push(end) }, CONFIG);
    client = new Client(server.address);
  });
  after(async () => {
    client.close();
    for (const end of endings) {
      await end();
    }
  });

  test("what Python publishes is read exactly", async () => {
    python(WRITE(server.address), server.folder);
    const { data } = (await client.get("packed", "python"))!;
    const { micro, nan, ...others } = data as Record<string, unknown>;
    assert.deepEqual(others, {
      id: "python",
      small: 5,
      safe: Number.MAX_SAFE_INTEGER,
      big: 9007199254740993n,
      least: -(2n ** 63n),
      most: 2n ** 64n - 1n,
      float: 0.1,
      bytes: new Uint8Array([0, 255]),
      ext: new ExtData(5, new Uint8Array([1])),
      milli: new Date("2026-01-31T12:00:00.250Z"),
      none: null,
      numbers: { 1: "a", 2: "b" },
      both: [["1", "a"], ["1", "b"]],
    });
    assert.ok(Number.isNaN(nan));
    assert.ok(micro instanceof ExtData && micro.type === -1, "a Date would round it");
    assert.deepEqual((await client.get("fixed", "PY"))!.data, { 55: "PY", 95: "6", 96: "a\x0155=Z", 58: "\\xe9" });
  });

  test("an object becomes a payload of its topic's type, by every call that takes one", async () => {
    const document = {
      id: 9007199254740993n,
      small: 5,
      safe: Number.MAX_SAFE_INTEGER,
      long: 2 ** 40,
      least: -(2n ** 63n),
      most: 2n ** 64n - 1n,
      float: 0.1,
      nan: NaN,
      bytes: new Uint8Array([0, 255]),
      at: new Date("2026-01-31T12:00:00.250Z"),
      ext: new ExtData(5, new Uint8Array([1])),
      gone: undefined,
      deep: { list: [1, null, "é"] },
    };
    const done = await client.publish("packed", document);
    assert.equal(done.key, "9007199254740993");
    const { gone, ...others } = document;
    assert.deepEqual((await client.get("packed", document.id))!.data, others);
    await client.publishMany("packed", [{ id: "many" }, { id: "m2" }]);
    await client.deltaPublish("packed", { id: "many", n: 1 });
    assert.deepEqual((await client.get("packed", "many"))!.data, { id: "many", n: 1 });
    assert.equal((await client.delete("packed", { data: { id: "m2" } })).deleted, 1n);
    const publisher = client.publisher("packed");
    const taken = [publisher.publish({ id: "stream", n: 0 }), publisher.publish(new Uint8Array(Buffer.from("82a26964a673747265616da16e01", "hex")))];
    await publisher.close(); // not awaited: each is taken nevertheless, and in their order
    await Promise.all(taken);
    assert.deepEqual((await client.get("packed", "stream"))!.data, { id: "stream", n: 1 });
    await client.publish("fixed", { 55: "TS", 96: "a\x01b=1", 44: 9.5 });
    await client.publish("named", { sym: "TS", n: 2n ** 70n });
    python(READ(server.address), server.folder);
    const changes = await client.sowAndSubscribe("packed", { filter: "/id = :id", parameters: { id: document.id } });
    const { value } = await changes.next();
    assert.ok(value?.op === "sow");
    assert.deepEqual(value.record.data, others);
    changes.close();
  });

  test("a document that the type cannot express is refused with its path, and nothing is sent", async () => {
    const refused = (path: string) => (error: unknown) =>
      error instanceof InvalidArgument && error.reason === "PAYLOAD_MALFORMED" && error.text.startsWith(`data: ${path}`);
    await assert.rejects(client.publish("packed", { id: "no", n: 2n ** 64n }), refused("/n is 18446744073709551616, beyond 64 bits"));
    await assert.rejects(client.publish("named", { sym: "no", n: "a|b" }), refused("/n holds the separator"));
    await assert.rejects(client.publish("blobs", { a: 1 }, { key: "no" }), refused("the topic is binary: give bytes"));
    assert.equal(await client.get("packed", "no"), null);
    await client.publish("blobs", "text", { key: "yes" });
  });

  test("a topic that is made anew with another type: the client asks again", async () => {
    await client.call(AdminService.method.createTopic, { name: "later", settings: { key: ["/id"] } });
    await client.publish("later", { id: 1 });
    const publisher = client.publisher("later");
    await publisher.publish({ id: 2 });
    await publisher.flush();
    await client.delete("later", { all: true });
    await client.call(AdminService.method.alterTopic, {
      name: "later",
      settings: { messageType: MessageType.MSGPACK },
      updatePaths: ["message_type"],
    });
    await assert.rejects(client.publish("later", { id: 1 }), (error) => error instanceof InvalidArgument && error.reason === "PAYLOAD_MALFORMED");
    assert.equal((await client.publish("later", { id: 1 })).key, "1");
    await publisher.publish({ id: 2 });
    await assert.rejects(publisher.flush(), PublishFailed);
    await publisher.publish({ id: 3 });
    await publisher.close();
    assert.deepEqual((await client.get("later", 3))!.data, { id: 3 });
  });

  test("no JSON text is stored in a topic that takes nvfix since then", async () => {
    const document = { id: "1", q: "a=b" }; // its JSON has an =, so it would be a field of nvfix
    await client.call(AdminService.method.createTopic, { name: "flat", settings: {} });
    await client.publish("flat", document, { key: "1" });
    const publisher = client.publisher("flat");
    await publisher.publish(document, { key: "1" });
    await publisher.flush();
    await client.delete("flat", { all: true });
    await client.call(AdminService.method.alterTopic, {
      name: "flat",
      settings: { messageType: MessageType.NVFIX },
      updatePaths: ["message_type"],
    });
    await publisher.publish(document, { key: "1" });
    await assert.rejects(publisher.flush(), PublishFailed);
    await assert.rejects(client.publish("flat", document, { key: "2" }), InvalidArgument);
    assert.equal(await client.count("flat"), 0n);
    await publisher.publish(document, { key: "1" });
    await publisher.close();
    await client.publishMany("flat", [document, "id=2"], { keys: ["2", "3"] });
    assert.deepEqual((await client.get("flat", "2"))!.data, document);
    assert.equal(await client.count("flat"), 3n);
  });

  test("a delete by a document asks for the type again", async () => {
    const make = async (messageType: MessageType) =>
      await client.call(AdminService.method.createTopic, { name: "typed", settings: { key: ["/id"], messageType } });
    await make(MessageType.JSON);
    await client.publish("typed", { id: "1" });
    await client.call(AdminService.method.deleteTopic, { name: "typed" });
    await make(MessageType.MSGPACK);
    await client.publish("typed", new Uint8Array([0x81, 0xa2, 0x69, 0x64, 0xa1, 0x31])); // {"id":"1"}
    await assert.rejects(client.delete("typed", { data: { id: "1" } }), InvalidArgument);
    assert.equal((await client.delete("typed", { data: { id: "1" } })).deleted, 1n);
  });

  test("a key with another number of parts is refused, by every call", async () => {
    await client.publish("comp", { a: "x|1", b: "y" });
    assert.notEqual(await client.get("comp", ["x|1", "y"]), null);
    assert.equal(await client.get("comp", ["x", "y"]), null);
    for (const call of [
      () => client.get("comp", ["x", "y", "z"]),
      () => client.get("comp", "x"),
      () => client.getMany("comp", [["x", "y"], ["x"]]),
      () => client.query("comp", "", { keys: ["x"] }).all(),
      () => client.touch("comp", "x", { ttl: "5s" }),
      () => client.delete("comp", { keys: ["x|y|z"] }),
      () => client.get("packed", "a|b"),
    ]) {
      await assert.rejects(call(), (error) => error instanceof InvalidArgument && error.message.includes("and a key here has"));
    }
  });

  test("the table of contracts is that of the Python clients", () => {
    const program = `
import json
from sow_client._contract import FIELDS
ours = json.loads(${JSON.stringify(JSON.stringify(FIELDS))})
theirs = {kind.DESCRIPTOR.full_name: dict(fields) for kind, fields in FIELDS.items()}
assert ours == theirs, (ours, theirs)
`;
    python(program, server.folder);
  });
});
