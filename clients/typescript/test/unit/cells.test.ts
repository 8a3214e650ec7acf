/** Where a client goes, and where it does not: cells [1] to [4], transport [7], against servers of this process. */

import assert from "node:assert/strict";
import test from "node:test";
import { Metadata, Server, ServerCredentials, status } from "@grpc/grpc-js";
import { create, toBinary } from "@bufbuild/protobuf";
import { BinaryWriter } from "@bufbuild/protobuf/wire";
import { Cells, PAUSES_MS, topicOf } from "../../src/cells.js";
import { AdminService, GetResponseSchema, PublishResponseSchema, SowService } from "../../src/contract.js";
import { errorOfReason, InvalidArgument, SowError } from "../../src/errors.js";
import { Client } from "../../src/index.js";

/** "answer"; "break": the connection breaks, and the call may have been applied; or the address that it names. */
type Step = "answer" | "break" | { readonly to: string };

const METHODS = { Get: toBinary(GetResponseSchema, create(GetResponseSchema)), Publish: published() };
const TOKEN = "the-token-of-the-program";

function published(): Uint8Array {
  return toBinary(PublishResponseSchema, create(PublishResponseSchema, { results: [{ key: "1", version: 5n }] }));
}

function text(number: number, value: string | Uint8Array): BinaryWriter {
  return new BinaryWriter().tag(number, 2).bytes(typeof value === "string" ? Buffer.from(value) : value);
}

function elsewhere(servers: string, from: string): Metadata {
  const details = { cell: `of ${servers}`, servers, from_cell: from };
  const entries = Object.entries(details).map(([name, value]) =>
    text(3, Buffer.concat([text(1, name).finish(), text(2, value).finish()])).finish(),
  );
  const info = Buffer.concat([text(1, "TOPIC_ELSEWHERE").finish(), text(2, "sow").finish(), ...entries]);
  const any = Buffer.concat([text(1, "type.googleapis.com/google.rpc.ErrorInfo").finish(), text(2, info).finish()]);
  const metadata = new Metadata();
  metadata.set("grpc-status-details-bin", Buffer.from(text(3, any).finish()));
  return metadata;
}

/** A server that takes these steps, and the last one again and again. It notes the calls with the tokens that they show. */
async function serve(t: { after(end: () => void): void }) {
  const shown: string[] = [];
  const it = { address: "", shown, steps: [] as Step[] };
  const server = new Server();
  const bytes = (value: Buffer) => value;
  for (const [name, answer] of Object.entries(METHODS)) {
    const serialize = { requestSerialize: bytes, requestDeserialize: bytes, responseSerialize: bytes, responseDeserialize: bytes };
    const definition = { path: `/sow.v1.SowService/${name}`, requestStream: false, responseStream: false, ...serialize };
    const handler = (call: { metadata: Metadata }, callback: (error: object | null, answer?: Buffer) => void) => {
      shown.push(`${name} ${call.metadata.get("authorization")}`);
      const step = it.steps.length > 1 ? it.steps.shift()! : it.steps[0]!;
      if (step === "answer") {
        callback(null, Buffer.from(answer));
      } else if (step === "break") {
        callback({ code: status.UNAVAILABLE, details: "broken", metadata: new Metadata() });
      } else {
        callback({ code: status.FAILED_PRECONDITION, details: "elsewhere", metadata: elsewhere(step.to, it.address) });
      }
    };
    server.addService({ [name]: definition }, { [name]: handler });
  }
  const port = await new Promise<number>((resolve, reject) => {
    server.bindAsync("127.0.0.1:0", ServerCredentials.createInsecure(), (error, bound) => (error ? reject(error) : resolve(bound)));
  });
  t.after(() => server.forceShutdown());
  it.address = `127.0.0.1:${port}`;
  return it;
}

function connect(t: { after(end: () => void): void }, server: string): Client {
  const client = new Client(server, { token: TOKEN });
  t.after(() => client.close());
  return client;
}

function ended(error: unknown): SowError {
  assert.ok(error instanceof SowError, String(error));
  return error;
}

test("no other cell sends a client with its token to a third: home's word counts alone ([2], [3])", async (t) => {
  const [home, b, c] = [await serve(t), await serve(t), await serve(t)];
  home.steps = [{ to: b.address }];
  b.steps = [{ to: c.address }];
  c.steps = ["answer"];
  const error = ended(await connect(t, home.address).get("orders", "1").catch((thrown: unknown) => thrown));
  assert.equal(error.reason, "TOPIC_ELSEWHERE");
  assert.equal(error.details["denied_by"], `of ${b.address}`);
  assert.match(error.text, new RegExp(`says that it lives in the cell of ${c.address}: their placements differ$`));
  const rounds = 1 + PAUSES_MS.length; // as the placements may differ for a moment only
  assert.deepEqual(home.shown, Array(2 * rounds).fill(`Get Bearer ${TOKEN}`));
  assert.deepEqual(b.shown, Array(rounds).fill(`Get Bearer ${TOKEN}`));
  assert.deepEqual(c.shown, []);
});

test("a call is made again while two cells contradict each other, until they agree ([3])", async (t) => {
  const [home, b] = [await serve(t), await serve(t)];
  home.steps = [{ to: b.address }];
  b.steps = [{ to: home.address }, { to: home.address }, "answer"];
  const client = connect(t, home.address);
  assert.equal((await client.publish("orders", "{}", { key: "1" })).version, 5n);
  assert.equal(b.shown.length, 3);
});

test("an answer without good addresses leads nowhere ([2])", async (t) => {
  const home = await serve(t);
  for (const to of ["unix:/tmp/sow", "unix:7450", "DNS:7450", "dns:///localhost:7450", "", "127.0.0.1:1,", "127.0.0.1:0"]) {
    home.steps = [{ to }];
    const error = ended(await connect(t, home.address).get("orders", "1").catch((thrown: unknown) => thrown));
    assert.equal(error.reason, "TOPIC_ELSEWHERE", to);
  }
  assert.equal(home.shown.length, 7, "each was asked once");
});

test("a token goes to no other machine in plain text ([2])", async (t) => {
  const home = await serve(t);
  home.steps = [{ to: "192.0.2.1:7450" }];
  const error = ended(await connect(t, home.address).get("orders", "1").catch((thrown: unknown) => thrown));
  assert.equal(error.reason, "TOPIC_ELSEWHERE");
  assert.match(error.text, /; this client does not go there: token: goes to another machine, 192\.0\.2\.1:7450, over TLS only/);
});

/** A server of the cell of this name that follows patterns, and names these cells. It notes the tokens that it is shown. */
async function serveCell(t: { after(end: () => void): void }, cell: string) {
  const it = { address: "", shown: [] as string[], cells: {} as Record<string, string> };
  const { getPlacement, describeInstance } = AdminService.method;
  const { subscribe } = SowService.method;
  const placement = () => {
    const cells = Object.entries(it.cells).map(([name, address]) => ({ name, servers: [address] }));
    return toBinary(getPlacement.output, create(getPlacement.output, { cell, version: 1n, cells }));
  };
  const frames = {
    DescribeInstance: toBinary(describeInstance.output, create(describeInstance.output, { serving: true, contract: 3 })),
    Subscribe: toBinary(
      subscribe.output,
      create(subscribe.output, { frame: { case: "progress", value: { bookmark: `${cell}${cell}.1` } } }),
    ),
  };
  const server = new Server();
  const asIs = (value: Buffer) => value;
  const definition = { requestStream: false, requestSerialize: asIs, requestDeserialize: asIs, responseSerialize: asIs, responseDeserialize: asIs };
  const note = (name: string, metadata: Metadata) => it.shown.push(`${name} ${metadata.get("authorization")}`);
  server.addService(
    { GetPlacement: { ...definition, path: "/sow.v1.AdminService/GetPlacement", responseStream: false } },
    {
      GetPlacement: (call: { metadata: Metadata }, callback: (error: null, answer: Buffer) => void) => {
        note("GetPlacement", call.metadata);
        callback(null, Buffer.from(placement()));
      },
    },
  );
  for (const [name, answer] of Object.entries(frames)) {
    const service = name === "Subscribe" ? "SowService" : "AdminService";
    server.addService(
      { [name]: { ...definition, path: `/sow.v1.${service}/${name}`, responseStream: true } },
      {
        [name]: (call: { metadata: Metadata; write(frame: Buffer): void; end(): void }) => {
          note(name, call.metadata);
          call.write(Buffer.from(answer));
          if (name !== "Subscribe") {
            call.end();
          }
        },
      },
    );
  }
  const port = await new Promise<number>((resolve, reject) => {
    server.bindAsync("127.0.0.1:0", ServerCredentials.createInsecure(), (error, bound) => (error ? reject(error) : resolve(bound)));
  });
  t.after(() => server.forceShutdown());
  it.address = `127.0.0.1:${port}`;
  return it;
}

test("a subscription to a pattern goes to the cells that home names, and to no others ([2])", async (t) => {
  const [home, b, c] = [await serveCell(t, "a"), await serveCell(t, "b"), await serveCell(t, "c")];
  home.cells = { a: home.address, b: b.address };
  b.cells = { a: c.address, b: c.address, c: c.address };
  const changes = await connect(t, home.address).subscribe({ pattern: ".*" });
  assert.deepEqual([...changes.cells.keys()], ["a", "b"]);
  assert.deepEqual(changes.bookmark, { a: "aa.1;p=1", b: "bb.1;p=1" });
  assert.ok(b.shown.includes(`Subscribe Bearer ${TOKEN}`));
  assert.ok([...home.shown, ...b.shown].every((shown) => shown.endsWith(` Bearer ${TOKEN}`)));
  assert.deepEqual(c.shown, []);
  changes.close();

  home.cells = { a: home.address, b: "192.0.2.1:7450" };
  const error = ended(await connect(t, home.address).subscribe({ pattern: ".*" }).catch((thrown: unknown) => thrown));
  assert.deepEqual([error.constructor, error.details["cell"]], [InvalidArgument, "b"]);
  assert.match(error.text, /^the cell b: this client does not go there: token: goes to another machine, 192\.0\.2\.1:7450, over TLS only/);
});

test("a change that may have been applied at home is not made again in another cell; a read is (transport [7])", async (t) => {
  const [home, b] = [await serve(t), await serve(t)];
  b.steps = ["answer"];
  home.steps = ["break", { to: b.address }];
  const error = ended(await connect(t, home.address).publish("orders", "{}", { key: "1" }).catch((thrown: unknown) => thrown));
  assert.deepEqual([error.reason, home.shown.length, b.shown.length], ["UNREACHABLE", 2, 0]);
  home.steps = ["break", { to: b.address }];
  assert.equal(await connect(t, home.address).get("orders", "1"), null);
  assert.equal(b.shown.length, 1);
  home.steps = [{ to: b.address }];
  assert.equal((await connect(t, home.address).publish("orders", "{}", { key: "1" })).version, 5n);
});

test("closing a client closes the channels to all of its cells", async (t) => {
  const [home, b] = [await serve(t), await serve(t)];
  home.steps = [{ to: b.address }];
  b.steps = ["answer"];
  const client = connect(t, home.address);
  await client.get("orders", "1");
  client.close();
  for (const topic of ["orders", "others"]) {
    assert.equal(ended(await client.get(topic, "1").catch((thrown: unknown) => thrown)).reason, "CLOSED");
  }
});

const DETAILS = { cell: "b", servers: "127.0.0.1:1", from_cell: "a" };
const told = (reason: string, details: Record<string, string> = DETAILS) => errorOfReason("x", { reason, details });

test("nothing is made before home has named another cell, and one transport serves all topics of that cell ([1])", () => {
  const opened: string[] = [];
  const cells = new Cells("home", (servers) => `${opened.push(servers)}`);
  assert.equal(cells.way("t").leads(told("TOPIC_NOT_FOUND")), false);
  assert.deepEqual(opened, []);
  for (const topic of ["t", "u"]) {
    const way = cells.way(topic);
    assert.ok(way.leads(told("TOPIC_ELSEWHERE")));
    assert.equal(cells.way(topic).place, way.place);
  }
  assert.deepEqual(opened, ["127.0.0.1:1"]);
  assert.deepEqual(cells.close(), ["1", "home"]);
});

test("a cell that has no such topic, or is not reached, is doubted: home is asked again ([2])", () => {
  const cells = new Cells("home", (servers) => servers);
  cells.way("t").leads(told("TOPIC_ELSEWHERE"));
  const lost = cells.way("t");
  assert.equal(lost.leads(told("UNREACHABLE", {})), false);
  assert.equal(lost.told(told("UNREACHABLE", {})).text, "the cell b, where t lives: x");
  assert.equal(cells.way("t").place, cells.home);

  cells.way("t").leads(told("TOPIC_ELSEWHERE"));
  const missing = cells.way("t");
  assert.ok(missing.leads(told("TOPIC_NOT_FOUND", {})), "home may name another cell");
  assert.equal(missing.leads(told("TOPIC_ELSEWHERE")), false, "it names the same one");
  const error = missing.told(told("TOPIC_ELSEWHERE"));
  assert.deepEqual([error.reason, error.text], ["TOPIC_NOT_FOUND", "the cell b, where t lives: x"]);
});

test("all cells are those that home names, and none to which the client does not go ([5])", () => {
  const opened: string[] = [];
  const cells = new Cells("home", (servers) => {
    opened.push(servers);
    if (servers.startsWith("192.")) {
      throw new InvalidArgument("over TLS only", { reason: "INVALID_ARGUMENT" });
    }
    return servers;
  });
  const told = (there: string, cell = "a") =>
    create(AdminService.method.getPlacement.output, {
      cell,
      cells: [{ name: "a", servers: ["127.0.0.1:9"] }, { name: "b", servers: there.split(" ") }],
    });
  const found = cells.placed(told("127.0.0.1:1 127.0.0.1:2"));
  assert.deepEqual([...found.keys()], ["a", "b"]);
  assert.equal(found.get("a"), cells.home, "on the program's own addresses");
  assert.equal(cells.placed(told("127.0.0.1:1 127.0.0.1:2")).get("b"), found.get("b"));
  assert.deepEqual(opened, ["127.0.0.1:1,127.0.0.1:2"]);
  for (const [there, why] of [
    ["unix:/tmp/sow", '"unix:/tmp/sow" is no list of HOST:PORT'],
    ["192.0.2.1:1", "over TLS only"],
  ] as const) {
    assert.throws(
      () => cells.placed(told(there)),
      (error) => ended(error).text === `the cell b: this client does not go there: ${why}` && ended(error).details["cell"] === "b",
    );
  }
  for (const nothing of [undefined, told("127.0.0.1:1", "")]) {
    assert.deepEqual([...cells.placed(nothing)], [["", cells.home]]);
  }
  const only = new Cells("b", undefined, "b");
  assert.equal(only.way("t").leads(errorOfReason("x", { reason: "TOPIC_ELSEWHERE", details: DETAILS })), false);
  assert.equal(only.at(only.home).told(errorOfReason("x", { reason: "DENIED" })).text, "the cell b: x");
});

test("the cell of its first topic decides about a call that has several", () => {
  const way = new Cells("home", (servers) => servers).way("t");
  const error = told("TOPIC_ELSEWHERE", { ...DETAILS, topic: "u" });
  assert.equal(way.leads(error), false);
  assert.equal(way.told(error).text, "x; the topics of one call must live in one cell");
});

test("the topic of a request is known from the contract", () => {
  const { createTopic, deleteTopic, getPlacement, listTopics } = AdminService.method;
  assert.equal(topicOf(SowService.method.get.input, create(SowService.method.get.input, { topic: "t" })), "t");
  assert.equal(topicOf(createTopic.input, create(createTopic.input, { name: "t" })), "t");
  assert.equal(topicOf(deleteTopic.input, create(deleteTopic.input, { name: "t" })), "t");
  assert.equal(topicOf(deleteTopic.input, create(deleteTopic.input, { name: "t", here: true })), "", "the copy at home");
  assert.equal(topicOf(getPlacement.input, create(getPlacement.input, { topic: "t" })), "", "every cell answers");
  assert.equal(topicOf(listTopics.input, create(listTopics.input)), "");
});

test("of many topics the cells of the last 10,000 are remembered", () => {
  const cells = new Cells("home", (servers) => servers);
  const error = told("TOPIC_ELSEWHERE");
  for (let number = 0; number <= 10_000; number++) {
    cells.way(`t${number}`).leads(error);
  }
  assert.equal(cells.way("t0").place, cells.home);
  assert.notEqual(cells.way("t1").place, cells.home);
  assert.throws(() => new Cells("home", () => assert.fail()).way("t").leads(told("TOPIC_ELSEWHERE")));
  const refusing = new Cells("home", () => {
    throw new InvalidArgument("no", { reason: "INVALID_ARGUMENT" });
  });
  assert.equal(refusing.way("t").leads(told("TOPIC_ELSEWHERE")), false);
});
