#!/usr/bin/env bash
# Versions: @grpc/grpc-js 1.14.7 on Node.js 20; a stream of 200 messages of 1,000 bytes, then its status.
#
# The guess: the status of a call comes behind its messages, as the trailers do in HTTP/2. A reader gets all that was sent before,
# however slow it is, and then the error.
# What happens: with the status OK it is so. With any other status the client hands the error over as soon as it has arrived: a
# reader of `data` events is told of the error before messages that it gets afterwards, and for a slow reader, iterating or pausing,
# those that it had not taken yet beyond a buffer are dropped without a word. So an error does not say "all before this was told".
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
version=1.14.7
npm init --yes >/dev/null
npm install --silent --no-audit --no-fund "@grpc/grpc-js@$version"
cat >stream.mjs <<'NODE'
import assert from "node:assert/strict";
import { setTimeout as pause } from "node:timers/promises";
import grpc from "@grpc/grpc-js";

const SENT = 200;
const same = (value) => value;
const method = { path: "/t.T/Numbers", requestStream: false, responseStream: true };
const codec = { requestSerialize: same, requestDeserialize: same, responseSerialize: same, responseDeserialize: same };
const server = new grpc.Server();
server.addService({ Numbers: { ...method, ...codec } }, {
  Numbers(call) {
    for (let i = 0; i < SENT; i++) call.write(Buffer.alloc(1000, 1));
    if (call.request[0]) call.emit("error", { code: grpc.status.ABORTED, details: "the end" });
    else call.end();
  },
});
const port = await new Promise((resolve, reject) => {
  const bound = (error, chosen) => (error ? reject(error) : resolve(chosen));
  server.bindAsync("127.0.0.1:0", grpc.ServerCredentials.createInsecure(), bound);
});
const client = new grpc.Client(`127.0.0.1:${port}`, grpc.credentials.createInsecure());

async function iterated(call, ms) {
  let seen = 0;
  try {
    for await (const _ of call) {
      seen++;
      if (ms) await pause(ms);
    }
  } catch (error) {
    assert.equal(error.code, grpc.status.ABORTED);
  }
  return seen;
}

async function paused(call, ms) {
  let [before, after, ended] = [0, 0, false];
  await new Promise((resolve) => {
    call.on("data", () => {
      ended ? after++ : before++;
      call.pause();
      setTimeout(() => call.resume(), ms);
    });
    call.on("error", () => {
      ended = true;
      setTimeout(resolve, 2000);
    });
    call.on("end", resolve);
  });
  return [before, after];
}

const ask = (fails) => client.makeServerStreamRequest(method.path, same, same, Buffer.from([fails]));
const found = {};
for (const [name, fails] of [["OK", 0], ["ABORTED", 1]]) {
  const [before, after] = await paused(ask(fails), 20);
  found[name] = { quick: await iterated(ask(fails), 0), slow: await iterated(ask(fails), 20), before, after };
  console.log(`status ${name}: of ${SENT} messages`, found[name]);
}
client.close();
server.forceShutdown();
assert.deepEqual(found.OK, { quick: SENT, slow: SENT, before: SENT, after: 0 });
assert.equal(found.ABORTED.quick, SENT);
assert.ok(found.ABORTED.slow < SENT, "the behaviour has changed");
assert.ok(found.ABORTED.after > 0 && found.ABORTED.before + found.ABORTED.after < SENT, "the behaviour has changed");
NODE
node stream.mjs
