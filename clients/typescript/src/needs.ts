/**
 * Fields of requests that an older server would ignore, and with them a wish of the caller. No I/O.
 *
 *   [1]  A request with such a field goes only to a server whose contract has it: else "delete at this version" would be a
 *        delete. The client asks a server for its contract once for a connection, and only when it needs to know.
 *   [2]  `FIELDS` is the table of the Python clients (`sow_client._contract`); a test compares the two.
 */

import { type DescField, type DescMessage, isFieldSet, type MessageShape } from "@bufbuild/protobuf";
import { FailedPrecondition, type SowError } from "./errors.js";

/** A field that a request needs, and the first contract that has it. */
export interface Needed {
  readonly field: string;
  readonly contract: number;
}

/** The contract that knows removals in a stream (rule P11). An older server would publish their documents. */
export const REMOVALS: Needed = { field: "remove", contract: 3 };
/** The contract of servers that do not tell one: the first release. */
export const UNDESCRIBED = 1;

const PUBLISH = { "ttl_mode=3": 2, "durability=3": 2, delta: 2, unset_paths: 2 };
const PARAMETERS = { parameters: 3 };
const CAPS = ["max_records", "max_stored_bytes"];
const SETTINGS: Record<string, number> = Object.fromEntries(
  [
    "index",
    "max_age",
    "max_bytes",
    "max_entries",
    "backlog_ttl",
    "backlog_quota_bytes",
    "backlog_quota_age",
    "backlog_quota_entries",
    "backlog_action",
    "delivery_limit",
    "durable_idle_ttl",
    "idle_ttl",
    "publish_is_use",
    "only_if_empty",
    "auto_delete",
    "replicate_durables",
    "dead_letter",
    "dead_letter_by_key",
    "on_missing",
  ].map((name) => [`settings.${name}`, 2]),
);
for (const name of CAPS) SETTINGS[`settings.${name}`] = 3;

/** By request: the path of a field, perhaps with its value, and the first contract that has it. */
export const FIELDS: Readonly<Record<string, Readonly<Record<string, number>>>> = {
  "sow.v1.PublishRequest": { ...PUBLISH, "records.remove": 3 },
  "sow.v1.PublishStreamRequest": { ...PUBLISH, remove: 3 },
  "sow.v1.GetRequest": { touch: 2, touch_below_micros: 2, min_position: 2 },
  "sow.v1.QueryRequest": {
    ...{ filter: 2, order_by: 2, explain: 2, min_position: 2, with_plan: 2, plan_only: 2, ...PARAMETERS },
    ...{ group_by: 3, aggregate: 3, having: 3 },
  },
  "sow.v1.SubscribeRequest": {
    ...PARAMETERS,
    ...{ order_by: 3, top_n: 3, skip_n: 3, group_by: 3, aggregate: 3, having: 3, tell_left: 3 },
  },
  "sow.v1.SowDeleteRequest": { "by_keys.versions": 2, by_filter: 2, "durability=3": 2, publisher: 2, ...PARAMETERS },
  "sow.v1.TouchRequest": { "durability=3": 2, only: 2, atomic: 2, versions: 2 },
  "sow.v1.CreateTopicRequest": { ...SETTINGS, view: 3, here: 3 },
  "sow.v1.AlterTopicRequest": SETTINGS,
  "sow.v1.DeleteTopicRequest": { here: 3 },
  "sow.v1.ReloadPlacementRequest": { placement: 3, prepare: 3, drop_prepared: 3 },
  "sow.v1.SetPolicyRequest": Object.fromEntries(CAPS.map((name) => [`policy.topic.${name}`, 3])),
  "sow.v1.RestampRequest": PARAMETERS,
  "sow.v1.WatchFiguresRequest": { history_micros: 3 },
  "sow.v1.OpenExportRequest": { ...PARAMETERS, others: 3 },
  "sow.v1.ReadChangesRequest": PARAMETERS,
};

/** A field of a request that servers before some contract ignore, the newest of those; undefined: there is none. */
export function needed<Desc extends DescMessage>(schema: Desc, message: MessageShape<Desc>): Needed | undefined {
  return testsOf(schema).find(({ steps, wanted }) => isSet(message as Fields, steps, wanted))?.needed;
}

/** The error of a request that an older server would misunderstand. */
export function tooOld({ field, contract: needs }: Needed, server: string, contract: number): SowError {
  return new FailedPrecondition(
    `${field}: ${server} is an older server, of contract ${contract}, and would ignore this: it needs contract ${needs}`,
    { reason: "SERVER_TOO_OLD", details: { field, server, contract: String(contract), needed: String(needs) } },
  );
}

type Fields = MessageShape<DescMessage> & Readonly<Record<string, unknown>>;

interface Test {
  readonly steps: readonly DescField[];
  /** undefined: any value counts. */
  readonly wanted: number | undefined;
  readonly needed: Needed;
}

const tests = new Map<string, readonly Test[]>();

/** The newest first. Each call runs them, so the fields are looked up once. */
function testsOf(schema: DescMessage): readonly Test[] {
  let made = tests.get(schema.typeName);
  if (made === undefined) {
    const fields = Object.entries(FIELDS[schema.typeName] ?? {}).sort(([, one], [, other]) => other - one);
    made = fields.map(([path, contract]) => {
      const [field = "", wanted] = path.split("=");
      const value = wanted === undefined ? undefined : Number(wanted);
      return { steps: stepsOf(schema, field), wanted: value, needed: { field, contract } };
    });
    tests.set(schema.typeName, made);
  }
  return made;
}

function stepsOf(schema: DescMessage, path: string): DescField[] {
  let at: DescMessage | undefined = schema;
  return path.split(".").map((step) => {
    const field: DescField | undefined = at?.fields.find(({ name }) => name === step);
    if (field === undefined) {
      throw new Error(`${schema.typeName} has no field ${path}`);
    }
    at = field.message;
    return field;
  });
}

/** True if a message, or one of those in a list on the way, has the field. */
function isSet(message: Fields, [field, ...rest]: readonly DescField[], wanted: number | undefined): boolean {
  if (field === undefined || !isFieldSet(message, field)) {
    return false;
  }
  const { oneof, localName, fieldKind } = field;
  const value = oneof === undefined ? message[localName] : (message[oneof.localName] as { value?: unknown }).value;
  if (rest.length === 0) {
    return wanted === undefined || value === wanted;
  }
  const inner = fieldKind === "list" ? (value as Fields[]) : [value as Fields];
  return inner.some((one) => isSet(one, rest, wanted));
}
