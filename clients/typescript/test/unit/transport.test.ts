/** Which calls are made again: transport [1] and [4], against a server of this process that fails as it is told. */

import assert from "node:assert/strict";
import test from "node:test";
import { Metadata, Server, ServerCredentials, status } from "@grpc/grpc-js";
import { create, toBinary } from "@bufbuild/protobuf";
import { BinaryWriter } from "@bufbuild/protobuf/wire";
import { Client } from "../../src/index.js";
import { AdminService, GetResponseSchema, PublishResponseSchema, TouchResponseSchema } from "../../src/contract.js";
import { SowError } from "../../src/errors.js";

type Step = "answer" | "hang" | { readonly code: status; readonly reason?: string };

const ANSWERS: Record<string, Buffer> = {
  Get: Buffer.from(toBinary(GetResponseSchema, create(GetResponseSchema))),
  Publish: Buffer.from(toBinary(PublishResponseSchema, create(PublishResponseSchema, { results: [{ key: "1", version: 5n }] }))),
  Touch: Buffer.from(toBinary(TouchResponseSchema, create(TouchResponseSchema, { results: [{ key: "1" }] }))),
  ListTopics: Buffer.alloc(0),
  DeletePolicy: Buffer.alloc(0),
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
