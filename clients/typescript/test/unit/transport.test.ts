/** Which calls are made again: transport [1], and [4] to [6], against a server of this process that fails as it is told. */

import assert from "node:assert/strict";
import test from "node:test";
import { Metadata, Server, ServerCredentials, status } from "@grpc/grpc-js";
import { create, toBinary } from "@bufbuild/protobuf";
import { BinaryWriter } from "@bufbuild/protobuf/wire";
import { Client } from "../../src/index.js";
import {
  AdminService,
  DescribeInstanceResponseSchema,
  GetResponseSchema,
  PublishResponseSchema,
  QueryResponseSchema,
  SowDeleteResponseSchema,
  TouchResponseSchema,
} from "../../src/contract.js";
import { FailedPrecondition, SowError, Unavailable } from "../../src/errors.js";
import { Transport } from "../../src/transport.js";

type Step = "answer" | "hang" | { readonly code: status; readonly reason?: string };

const ANSWERS: Record<string, Buffer> = {
  Get: Buffer.from(toBinary(GetResponseSchema, create(GetResponseSchema))),
  Publish: Buffer.from(toBinary(PublishResponseSchema, create(PublishResponseSchema, { results: [{ key: "1", version: 5n }] }))),
  Touch: Buffer.from(toBinary(TouchResponseSchema, create(TouchResponseSchema, { results: [{ key: "1" }] }))),
  ListTopics: Buffer.alloc(0),
  DeletePolicy: Buffer.alloc(0),
  SowDelete: Buffer.from(toBinary(SowDeleteResponseSchema, create(SowDeleteResponseSchema, { done: true }))),
  Query: Buffer.from(toBinary(QueryResponseSchema, create(QueryResponseSchema, { response: { case: "footer", value: {} } }))),
};

function rich(reason: string): Metadata {
  const info = new BinaryWriter().tag(1, 2).string(reason).tag(2, 2).string("sow").finish();
  const any = new BinaryWriter().tag(1, 2).string("type.googleapis.com/google.rpc.ErrorInfo").tag(2, 2).bytes(info).finish();
  const metadata = new Metadata();
  metadata.set("grpc-status-details-bin", Buffer.from(new BinaryWriter().tag(3, 2).bytes(any).finish()));
  return metadata;
}

/** A client of a server that takes these steps, one for each call. */
async function setUp(t: { after(end: () => void): void }, ...steps: Step[]) {
  const server = new Server();
  const called: Buffer[] = [];
  const method = (service: string, name: string) => ({
    path: `/sow.v1.${service}/${name}`,
    requestStream: false,
    responseStream: false,
    requestSerialize: (value: Buffer) => value,
    requestDeserialize: (bytes: Buffer) => bytes,
    responseSerialize: (bytes: Buffer) => bytes,
    responseDeserialize: (bytes: Buffer) => bytes,
  });
  for (const [service, names] of [
    ["SowService", ["Get", "Publish", "Touch"]],
    ["AdminService", ["ListTopics", "DeletePolicy"]],
  ] as const) {
    const definitions = Object.fromEntries(names.map((name) => [name, method(service, name)]));
    const handlers = Object.fromEntries(
      names.map((name) => [
        name,
        (call: { request: Buffer }, callback: (error: object | null, answer?: Buffer) => void) => {
          called.push(call.request);
          const step = steps.shift() ?? "answer";
          if (step === "answer") {
            callback(null, ANSWERS[name]!);
          } else if (step !== "hang") {
            const { code, reason } = step;
            callback({ code, details: "told to", metadata: reason === undefined ? new Metadata() : rich(reason) });
          }
        },
      ]),
    );
    server.addService(definitions, handlers);
  }
  const port = await new Promise<number>((resolve, reject) => {
    server.bindAsync("127.0.0.1:0", ServerCredentials.createInsecure(), (error, bound) => (error ? reject(error) : resolve(bound)));
  });
  const client = new Client(`127.0.0.1:${port}`, { timeoutMs: 600_000 }); // longer than any test may take
  t.after(() => {
    client.close();
    server.forceShutdown();
  });
  return { client, called };
}

const refusedAs = (reason: string) => (error: unknown) => error instanceof SowError && error.reason === reason;
const BROKEN: Step = { code: status.UNAVAILABLE };
const STOPPING: Step = { code: status.UNAVAILABLE, reason: "STOPPING" };

test("reads are made again after a break, and after a stop ([4])", async (t) => {
  const { client, called } = await setUp(t, BROKEN, STOPPING, "answer", BROKEN);
  assert.equal(await client.get("t", "1"), null);
  assert.equal(called.length, 3);
  await client.call(AdminService.method.listTopics, {});
  assert.equal(called.length, 5);
});

test("a publish is made again with the same position, which no other publish has ([4])", async (t) => {
  const { client, called } = await setUp(t, BROKEN, "answer");
  assert.equal((await client.publish("t", { id: 1 })).version, 5n);
  assert.deepEqual(called[0], called[1]);
  await Promise.all([client.publish("t", { id: 1 }), client.publish("t", { id: 1 })]);
  assert.equal(new Set(called.map((request) => request.toString("hex"))).size, 3);
});

test("a write without a position is not made again: nobody knows whether it was applied ([4])", async (t) => {
  const { client, called } = await setUp(t, BROKEN, BROKEN);
  await assert.rejects(client.touch("t", "1"), refusedAs("UNREACHABLE"));
  await assert.rejects(client.call(AdminService.method.deletePolicy, { name: "p" }), refusedAs("UNREACHABLE"));
  assert.equal(called.length, 2);
});

test("a refusal, and a write that stands here, are answers", async (t) => {
  const { client, called } = await setUp(
    t,
    { code: status.UNAVAILABLE, reason: "REPLICATION_UNAVAILABLE" },
    { code: status.UNAVAILABLE, reason: "STORE_FAILED" },
    { code: status.NOT_FOUND, reason: "TOPIC_NOT_FOUND" },
  );
  for (const reason of ["REPLICATION_UNAVAILABLE", "STORE_FAILED", "TOPIC_NOT_FOUND"]) {
    await assert.rejects(client.publish("t", { id: 1 }), refusedAs(reason));
  }
  assert.equal(called.length, 3);
});

test("a read that breaks again and again ends with its error", async (t) => {
  const { client, called } = await setUp(t, ...Array.from({ length: 9 }, () => BROKEN));
  await assert.rejects(client.get("t", "1"), refusedAs("UNREACHABLE"));
  assert.equal(called.length, 5);
});

/** A server of a contract; undefined: of the first release, which does not describe itself. */
async function ofContract(t: { after(end: () => void): void }, contract: number | undefined, port = 0) {
  const server = new Server();
  const called: string[] = [];
  const answer = (name: string, responseStream: boolean, bytes: () => Buffer) => ({
    definition: {
      path: `/${name}`,
      requestStream: false,
      responseStream,
      requestSerialize: (value: Buffer) => value,
      requestDeserialize: (given: Buffer) => given,
      responseSerialize: (value: Buffer) => value,
      responseDeserialize: (given: Buffer) => given,
    },
    handler: (call: { write(value: Buffer): void; end(): void }, callback?: (error: null, value: Buffer) => void) => {
      called.push(name.split("/")[1]!);
      if (callback === undefined) {
        call.write(bytes());
        call.end();
      } else {
        callback(null, bytes());
      }
    },
  });
  const description = create(DescribeInstanceResponseSchema, { name: "old", serving: true, contract: contract ?? 0 });
  const answers = [
    answer("sow.v1.SowService/Publish", false, () => ANSWERS["Publish"]!),
    answer("sow.v1.SowService/SowDelete", true, () => ANSWERS["SowDelete"]!),
    answer("sow.v1.SowService/Query", true, () => ANSWERS["Query"]!),
    ...(contract === undefined
      ? [answer("grpc.health.v1.Health/Check", false, () => Buffer.from([8, 1]))]
      : [answer("sow.v1.AdminService/DescribeInstance", true, () => Buffer.from(toBinary(DescribeInstanceResponseSchema, description)))]),
  ];
  for (const { definition, handler } of answers) {
    server.addService({ [definition.path]: definition }, { [definition.path]: handler as never });
  }
  const bound = await new Promise<number>((resolve, reject) => {
    server.bindAsync(`127.0.0.1:${port}`, ServerCredentials.createInsecure(), (error, found) => (error ? reject(error) : resolve(found)));
  });
  t.after(() => server.forceShutdown());
  return { port: bound, called, end: () => server.forceShutdown() };
}

const tooOld = (field: string, contract: number, needs: number) => (error: unknown) =>
  error instanceof FailedPrecondition &&
  error.reason === "SERVER_TOO_OLD" &&
  error.details["field"] === field &&
  error.text.startsWith(`${field}: 127.0.0.1:`) &&
  error.text.endsWith(` is an older server, of contract ${contract}, and would ignore this: it needs contract ${needs}`);

test("nothing is sent that an older server would misunderstand ([6])", async (t) => {
  for (const contract of [2, undefined]) {
    const { port, called } = await ofContract(t, contract);
    const client = new Client(`127.0.0.1:${port}`);
    t.after(() => client.close());
    const of = contract ?? 1;
    const parameters = { n: 1 };
    await assert.rejects(client.query("t", "/a = :n", { parameters }).all(), tooOld("parameters", of, 3));
    await assert.rejects(client.count("t", "/a = :n", { parameters }), tooOld("parameters", of, 3));
    await assert.rejects(client.delete("t", { filter: "/a = :n", parameters }), tooOld("parameters", of, 3));
    await assert.rejects(client.subscribe("t", { filter: "/a = :n", parameters }), tooOld("parameters", of, 3));
    if (contract === undefined) {
      await assert.rejects(client.delete("t", { keys: ["1"], onlyIfVersions: [7n] }), tooOld("by_keys.versions", 1, 2));
      await assert.rejects(client.deltaPublish("t", '{"id":1}'), tooOld("delta", 1, 2));
      await assert.rejects(client.publish("t", '{"id":1}', { durability: "replicated" }), tooOld("durability", 1, 2));
      const publisher = client.publisher("t", { delta: true });
      await publisher.publish('{"id":1}');
      await assert.rejects(publisher.close(), (error) => error instanceof FailedPrecondition && error.details["field"] === "delta");
    } else {
      await client.delete("t", { keys: ["1"], onlyIfVersions: [7n] });
      await client.query("t", "/a = 1").all();
    }
    assert.deepEqual(called.filter((name) => ["DescribeInstance", "Check"].includes(name)).length, 1, "asked once for a connection");
    await client.publish("t", '{"id":1}');
    await client.query("t").all();
    assert.deepEqual(called.slice(-2), ["Publish", "Query"]);
  }
});

test("a server of today gets them, and a client that needs nothing new does not ask ([6])", async (t) => {
  const { port, called } = await ofContract(t, 3);
  const client = new Client(`127.0.0.1:${port}`);
  t.after(() => client.close());
  await client.publish("t", '{"id":1}');
  await client.query("t").all();
  assert.deepEqual(called, ["Publish", "Query"]);
  await client.query("t", "/a = :n", { parameters: { n: 1 } }).all();
  assert.deepEqual(called, ["Publish", "Query", "DescribeInstance", "Query"]);
});

test("the contract is asked for again on a new connection: an older server may be there ([6])", async (t) => {
  const today = await ofContract(t, 3);
  const client = new Client(`127.0.0.1:${today.port}`);
  t.after(() => client.close());
  const ask = () => client.query("t", "/a = :n", { parameters: { n: 1 } }).all();
  await ask();
  today.end();
  await ofContract(t, 2, today.port);
  await assert.rejects(ask(), tooOld("parameters", 2, 3));
});

test("where nobody listens, a client that was given no time to connect does not wait ([5])", async (t) => {
  const { port, end } = await ofContract(t, 3);
  end();
  const calls: ((client: Client) => Promise<unknown>)[] = [
    (client) => client.get("t", "1"),
    (client) => client.query("t").all(),
    (client) => client.publish("t", { id: 1 }),
    (client) => client.subscribe("t"),
    async (client) => {
      const publisher = client.publisher("t");
      await publisher.publish({ id: 1 });
      await publisher.close();
    },
  ];
  for (const [server, message] of [
    [`127.0.0.1:${port}`, `cannot connect to 127.0.0.1:${port}: connect ECONNREFUSED`],
    [`127.0.0.1:${port},127.0.0.1:1`, `no instance of 127.0.0.1:${port}, 127.0.0.1:1 serves: `],
  ] as const) {
    for (const call of calls) {
      const client = new Client(server);
      t.after(() => client.close());
      // The message names no time: nobody has waited for one to pass.
      await assert.rejects(call(client), (error) => error instanceof Unavailable && error.name === "Unavailable" && error.message.startsWith(message));
      client.close();
    }
  }
  const patient = new Client(`127.0.0.1:${port}`, { connectTimeoutMs: 400 });
  t.after(() => patient.close());
  await assert.rejects(patient.get("t", "1"), (error) => error instanceof Unavailable && error.message.includes(" within 0.4 s: connect ECONNREFUSED"));
});

test("a client that was connected once waits for its server ([5])", async (t) => {
  const first = await ofContract(t, 3);
  const transport = new Transport({
    server: `127.0.0.1:${first.port}`,
    tls: undefined,
    token: undefined,
    timeoutMs: 5_000,
    connectTimeoutMs: 5_000,
    isPatient: false,
    onFailover: undefined,
  });
  t.after(() => transport.close());
  await transport.line();
  first.end();
  await assert.rejects(transport.unary(AdminService.method.getStatus, {}, "never"), Unavailable);
  await assert.rejects(transport.line(300), (error) => error instanceof Unavailable && error.message.includes(" within 0.3 s: "));
});

test("closing the client ends its calls", async (t) => {
  const { client, called } = await setUp(t, "hang");
  const waiting = client.get("t", "1");
  while (called.length === 0) {
    await new Promise((resolve) => setImmediate(resolve));
  }
  client.close();
  await assert.rejects(waiting, refusedAs("CLOSED"), "and not at the end of its deadline");
  await assert.rejects(client.publish("t", { id: 1 }), refusedAs("CLOSED"));
});
