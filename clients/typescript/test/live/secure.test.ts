/** TLS, tokens and client certificates against a real server (rules A1, N2). */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import test from "node:test";
import { Client, PermissionDenied, SowError } from "../../src/index.js";
import { AccessService } from "../../src/contract.js";
import { NO_SERVER, python, Server } from "../support/server.js";

const CONFIG = `[server]
auth = "token"
[server.tls]
certificate = "server.pem"
key = "server.key"
[access]
file = "auth.toml"
[topics.orders]
key = ["/id"]
`;
const digest = (token: string) => createHash("sha256").update(token).digest("hex");
const ACCESS = `[[identities]]
name = "desk"
token_sha256 = "${digest("desk-token")}"
roles = ["desk"]
[[roles.desk.grants]]
topics = "orders"
allow = ["read", "publish"]
rows = "/price < 100"
`;
const CERTIFICATES = `
from pathlib import Path
from tests.support.servers.certificates import Authority
folder = Path(".")
authority = Authority(folder, "ca")
authority.issue("server")
authority.issue("pricer")
Authority(folder, "other")
`;

test("a token over TLS is known, a wrong one is not, and rows are kept apart", { skip: NO_SERVER }, async (t) => {
  const server = await Server.start(t, CONFIG, (folder) => {
    writeFileSync(join(folder, "auth.toml"), ACCESS, { mode: 0o600 });
    python(CERTIFICATES, folder);
  });
  const tls = { ca: join(server.folder, "ca.pem") };
  const connect = (options: ConstructorParameters<typeof Client>[1]): Client => {
    const client = new Client(server.address, { connectTimeoutMs: 2_000, ...options });
    t.after(() => client.close());
    return client;
  };

  const file = join(server.folder, "desk.token");
  writeFileSync(file, "desk-token\n", { mode: 0o600 });
  for (const token of ["desk-token", { file }, async () => "desk-token"]) {
    const client = connect({ tls, token });
    assert.equal((await client.call(AccessService.method.whoAmI, {})).identity, "desk");
  }
  const client = connect({ tls, token: { file } });
  await client.publish("orders", { id: 1, price: 1 });
  await assert.rejects(client.publish("orders", { id: 2, price: 200 }), (error) => error instanceof PermissionDenied);
  await assert.rejects(client.delete("orders", { all: true }), (error) => error instanceof PermissionDenied);
  const changes = await client.sowAndSubscribe("orders");
  const { value } = await changes.next();
  assert.ok(value?.op === "sow" && value.key === "1");
  changes.close();
  const publisher = client.publisher("orders");
  await publisher.publish({ id: 3, price: 3 });
  await publisher.close();

  for (const token of ["wrong-token", undefined]) {
    await assert.rejects(connect(token === undefined ? { tls } : { tls, token }).get("orders", 1), (error) => {
      return error instanceof PermissionDenied && error.reason === "UNAUTHENTICATED";
    });
  }
  const unreachable = (error: unknown) => error instanceof SowError && error.reason === "UNREACHABLE";
  await assert.rejects(connect({ tls: { ca: join(server.folder, "other.pem") }, token: "desk-token" }).get("orders", 1), unreachable);
  await assert.rejects(connect({ token: "desk-token" }).get("orders", 1), unreachable, "plain text to a TLS port");
});

test("a certificate says who the client is", { skip: NO_SERVER }, async (t) => {
  const server = await Server.start(
    t,
    CONFIG.replace('auth = "token"', 'auth = "certificate"').replace("[access]", 'client_ca = "ca.pem"\n[access]'),
    (folder) => {
      const access = ACCESS.replace(/token_sha256 = .*/, 'certificate = "CN:pricer"');
      writeFileSync(join(folder, "auth.toml"), access, { mode: 0o600 });
      python(CERTIFICATES, folder);
    },
  );
  const [ca, certificate, key] = ["ca.pem", "pricer.pem", "pricer.key"].map((name) => join(server.folder, name));
  const client = new Client(server.address, { tls: { ca, certificate, key } });
  t.after(() => client.close());
  const { identity, credential } = await client.call(AccessService.method.whoAmI, {});
  assert.deepEqual([identity, credential], ["desk", "certificate"]);
  const without = new Client(server.address, { tls: { ca }, connectTimeoutMs: 1_000 });
  t.after(() => without.close());
  await assert.rejects(without.get("orders", 1), (error) => error instanceof SowError && error.reason === "UNREACHABLE");
});
