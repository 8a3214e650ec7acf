/** Which requests need a contract: needs [2]. The table is compared with that of the Python clients in test/live. */

import assert from "node:assert/strict";
import test from "node:test";
import { create } from "@bufbuild/protobuf";
import * as contract from "../../src/contract.js";
import { FIELDS, needed } from "../../src/needs.js";

test("every field of the table is one of its request", () => {
  for (const [typeName, fields] of Object.entries(FIELDS)) {
    const schema = Object.values(contract).find(
      (each) => typeof each === "object" && "kind" in each && each.kind === "message" && each.typeName === typeName,
    ) as typeof contract.QueryRequestSchema;
    assert.ok(Object.keys(fields).length > 0);
    assert.equal(needed(schema, create(schema)), undefined); // throws where a path is no field
  }
});

test("a request needs what is in it, and of that the newest", () => {
  const { QueryRequestSchema, SowDeleteRequestSchema, PublishRequestSchema, CreateTopicRequestSchema } = contract;
  const query = (fields: object) => needed(QueryRequestSchema, create(QueryRequestSchema, fields));
  assert.equal(query({ topic: "t" }), undefined);
  assert.deepEqual(query({ filter: "/a" }), { field: "filter", contract: 2 });
  assert.deepEqual(query({ filter: "/a", parameters: { n: {} } }), { field: "parameters", contract: 3 });
  const erase = (selection: object) => needed(SowDeleteRequestSchema, create(SowDeleteRequestSchema, { selection: selection as never }));
  assert.equal(erase({ case: "byKeys", value: { keys: ["1"] } }), undefined);
  assert.equal(erase({ case: "byKeys", value: { keys: ["1"], versions: [7n] } })?.field, "by_keys.versions");
  assert.equal(erase({ case: "byFilter", value: "true" })?.field, "by_filter");
  assert.equal(erase({ case: "all", value: true }), undefined);
  const { FSYNC, REPLICATED } = contract.Durability;
  assert.equal(needed(PublishRequestSchema, create(PublishRequestSchema, { durability: FSYNC })), undefined);
  assert.equal(needed(PublishRequestSchema, create(PublishRequestSchema, { durability: REPLICATED }))?.field, "durability");
  const topic = (settings: object) => needed(CreateTopicRequestSchema, create(CreateTopicRequestSchema, { settings }));
  assert.equal(topic({ key: ["/id"] }), undefined);
  assert.equal(topic({ key: ["/id"], maxEntries: 7n })?.field, "settings.max_entries");
  const publish = (...records: object[]) => needed(PublishRequestSchema, create(PublishRequestSchema, { records: records as never }));
  assert.equal(publish({ key: "a" }), undefined);
  assert.deepEqual(publish({ key: "a" }, { key: "b", remove: true }), { field: "records.remove", contract: 3 });
});
