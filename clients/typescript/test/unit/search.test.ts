/** The search for an instance that serves (rule F1): search [1] to [4]. */

import assert from "node:assert/strict";
import test from "node:test";
import { AllRefused, NoAnswer, PermissionDenied, SowError, Unavailable } from "../../src/errors.js";
import { type Instance, noServer, search } from "../../src/search.js";

const instance = (address: string, more: Partial<Instance> = {}): Instance => ({
  address,
  name: `name-${address}`,
  id: address,
  journalEpoch: "e",
  cluster: "",
  serving: true,
  serverVersion: "0",
  contract: 3,
  ...more,
});
const silent = (address: string) => new Unavailable(`${address}: refused`, { reason: "UNREACHABLE" });

/** Answers in turn, with a clock that only sleeping and asking move. */
function world(answers: Record<string, (Instance | SowError)[]>, costMs = 0) {
  let now = 0;
  const asked: string[] = [];
  return {
    asked,
    addresses: Object.keys(answers),
    limitMs: 1_000,
    cluster: "",
    isPatient: true,
    clock: {
      now: () => now,
      sleep: async (ms: number) => {
        now += ms;
      },
    },
    ask: async (address: string) => {
      asked.push(address);
      now += costMs;
      const each = answers[address]!;
      return each.length > 1 ? each.shift()! : each[0]!;
    },
  };
}

test("the first of the order that serves is taken (search [1])", async () => {
  const options = world({ a: [silent("a")], b: [instance("b")], c: [instance("c")] });
  assert.equal((await search(options)).address, "b");
  assert.deepEqual(options.asked, ["a", "b"]);
});

test("an instance that comes back is found in a later round", async () => {
  const options = world({ a: [silent("a"), silent("a"), instance("a")], b: [silent("b")] });
  assert.equal((await search(options)).address, "a");
  assert.deepEqual(options.asked, ["a", "b", "a", "b", "a"]);
});

test("of instances that do not serve the first is taken, but one that serves comes first (search [4])", async () => {
  const down = { serving: false };
  assert.equal((await search(world({ a: [instance("a", down)], b: [instance("b", down)] }))).address, "a");
  assert.equal((await search(world({ a: [instance("a", down)], b: [instance("b")] }))).address, "b");
});

test("another cluster and another server are never taken (search [2])", async () => {
  const options = { ...world({ a: [instance("a", { cluster: "test" })], b: [noServer("b")] }), cluster: "prod" };
  await assert.rejects(search(options), (error) => {
    assert.ok(error instanceof SowError);
    assert.equal(error.reason, "OTHER_CLUSTER");
    assert.match(error.message, /of the cluster test.* of the cluster prod; b is no sow server/);
    return true;
  });
  const unnamed = { ...world({ a: [instance("a")] }), cluster: "prod" };
  assert.equal((await search(unnamed)).address, "a", "an instance without a cluster is accepted");
});

test("the error tells what each address answered, and comes within the limit", async () => {
  const options = world({ a: [silent("a")], b: [noServer("b")] }, 100);
  await assert.rejects(search(options), (error) => {
    assert.ok(error instanceof Unavailable);
    assert.equal(error.reason, "UNREACHABLE");
    assert.match(error.message, /no instance of a, b serves within 1 s: a: refused; b is no sow server/);
    return true;
  });
  assert.ok(options.clock.now() <= 1_100);
});

test("each address is asked once, however little time there is", async () => {
  const options = { ...world({ a: [silent("a")], b: [instance("b")] }, 100), limitMs: 50 };
  assert.equal((await search(options)).address, "b");
});

test("an instance that refuses the caller ends the search", async () => {
  const refusal = new PermissionDenied("unknown token", { reason: "UNAUTHENTICATED" });
  const options = { ...world({ a: [instance("a")] }), ask: () => Promise.reject(refusal) };
  await assert.rejects(search(options), refusal);
});

test("where every address refuses, a client without a time of its own does not wait on (search [3])", async () => {
  const refuses = { ...world({ a: [silent("a")], b: [silent("b")] }), isPatient: false };
  await assert.rejects(search(refuses), (error) => error instanceof AllRefused && error.message.startsWith("no instance of a, b serves: a: refused"));
  assert.ok(refuses.clock.now() < 500 && refuses.asked.length >= 4, "each was asked twice");
  const quiet = new NoAnswer("b: no answer within 250 ms", { reason: "UNREACHABLE" });
  const waits = { ...world({ a: [silent("a")], b: [quiet] }), isPatient: false };
  await assert.rejects(search(waits), (error) => error instanceof Unavailable && error.message.includes("within 1 s"));
  const patient = world({ a: [silent("a")] });
  await assert.rejects(search(patient), (error) => error instanceof Unavailable && !(error instanceof AllRefused));
});
