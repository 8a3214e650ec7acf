/** Addresses, tokens and TLS: channel [1] and [2]. */

import assert from "node:assert/strict";
import { chmodSync, mkdtempSync, rmSync, utimesSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import test from "node:test";
import { addressesOf, Bearer, channelCredentials, fromEnvironment, isLocal } from "../../src/channel.js";
import { InvalidArgument } from "../../src/errors.js";

const HERE = ["127.0.0.1:7450"];

function folder(t: { after(end: () => void): void }): string {
  const path = mkdtempSync(join(tmpdir(), "sow-"));
  t.after(() => rmSync(path, { recursive: true }));
  return path;
}

test("a list of addresses has each once, with its port", () => {
  assert.deepEqual(addressesOf("a, b:1,a:7450"), ["a:7450", "b:1"]);
  assert.deepEqual(addressesOf(["[::1]", "unix:/run/s", "dns:///x:1"]), ["[::1]:7450", "unix:/run/s", "dns:///x:1"]);
  for (const server of ["", "a,,b", "a:0", "a:65536", "a b", "a:x", []]) {
    assert.throws(() => addressesOf(server), InvalidArgument, JSON.stringify(server));
  }
});

test("a token goes to another machine over TLS only (channel [2])", () => {
  assert.deepEqual(["127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "unix:/x"].filter(isLocal).length, 5);
  for (const server of ["10.0.0.1:7450", "localhost.example:7450", "127.0.0.1.example:7450"]) {
    assert.throws(() => new Bearer("secret", [...HERE, server], undefined), /over TLS only/);
    assert.ok(new Bearer("secret", [server], {}));
  }
});

test("a token is a text, a function, or a private file that is read again when it has changed", async (t) => {
  const shown = async (bearer: Bearer) => (await bearer.metadata()).get("authorization")[0];
  assert.equal(await shown(new Bearer("abc\n", HERE, undefined)), "Bearer abc");
  let calls = 0;
  const bearer = new Bearer(async () => `t${++calls}`, HERE, undefined);
  assert.deepEqual([await shown(bearer), await shown(bearer)], ["Bearer t1", "Bearer t2"]);

  const file = join(folder(t), "token");
  writeFileSync(file, "one\n", { mode: 0o600 });
  const fromFile = new Bearer({ file }, HERE, undefined);
  assert.equal(await shown(fromFile), "Bearer one");
  writeFileSync(file, "two\n");
  utimesSync(file, 1, 1);
  assert.equal(await shown(fromFile), "Bearer two");
  assert.equal(await shown(new Bearer(undefined, HERE, undefined)), undefined);
});

test("what is no token is refused, and not shown (channel [1])", async (t) => {
  const file = join(folder(t), "token");
  writeFileSync(file, "secret two", { mode: 0o600 });
  const secret = (make: () => unknown) => {
    assert.throws(make, (error) => error instanceof InvalidArgument && !error.message.includes("secret"));
  };
  secret(() => new Bearer("secret two", HERE, undefined));
  secret(() => new Bearer("", HERE, undefined));
  secret(() => new Bearer({ file }, HERE, undefined));
  secret(() => new Bearer(file, HERE, undefined));
  secret(() => new Bearer({ file: `${file}x` }, HERE, undefined));
  writeFileSync(file, "secret");
  chmodSync(file, 0o644);
  secret(() => new Bearer({ file }, HERE, undefined));
  await assert.rejects(new Bearer(() => "secret two", HERE, undefined).metadata(), InvalidArgument);
});

test("a file of TLS that cannot be used is named", (t) => {
  const file = join(folder(t), "ca.pem");
  writeFileSync(file, "nothing");
  assert.throws(() => channelCredentials({ ca: file }), /tls\.ca: .*is no PEM file/);
  assert.throws(() => channelCredentials({ ca: `${file}x` }), /tls\.ca: cannot read/);
  assert.throws(() => channelCredentials({ key: file }), /given together/);
});

test("the environment names server, TLS and token as for the command", () => {
  assert.deepEqual(fromEnvironment({ SOW_TLS_CA: "" }), { server: "127.0.0.1:7450" });
  const { server, tls, token } = fromEnvironment({ SOW_SERVER: "a,b", SOW_TLS_CA: "ca.pem", SOW_TOKEN_FILE: "t" });
  assert.deepEqual([server, tls?.ca, token], ["a,b", "ca.pem", { file: "t" }]);
});
