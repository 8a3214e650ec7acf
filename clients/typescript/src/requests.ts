/** Options of the client's methods, and the requests that they make. No I/O. */

import { create } from "@bufbuild/protobuf";
import { kindOf, list, ofOtherType, oneOf, shown } from "./arguments.js";
import { type Duration, lifetimeMessage, micros, type Moment, momentMicros, type Ttl } from "./durations.js";
import { invalid, type Refusal } from "./errors.js";
import { type CreateTopicRequest, CreateTopicRequestSchema } from "./gen/sow/v1/admin_pb.js";
import {
  KeyListSchema,
  NamedExpressionSchema,
  type Projection,
  ProjectionSchema,
  type PublishRequest,
  PublishRequestSchema,
  type PublishStreamRequest,
  PublishStreamRequestSchema,
  type QueryRequest,
  QueryRequestSchema,
  type SowDeleteRequest,
  SowDeleteRequestSchema,
  type SubscribeRequest,
  SubscribeRequestSchema,
  TouchOnly,
  type TouchRequest,
  TouchRequestSchema,
} from "./gen/sow/v1/sow_pb.js";
import { type Condition, ConditionSchema, type Lifetime, TtlMode } from "./gen/sow/v1/types_pb.js";
import { type Key, recordKey, recordKeys } from "./keys.js";
import { type Parameters, parameterValues } from "./parameters.js";
import type { Document } from "./payloads.js";
import type { Ack } from "./publisher.js";
import { type DurabilityName, durabilityValue } from "./records.js";
import type { OnInterruption } from "./subscription.js";

/** The most records, or keys, in one request (rule K8). */
export const RECORDS_PER_REQUEST_MAX = 10_000;
const CHUNK_BYTES = 8 * 1024 * 1024; // `publishMany` begins a new request at this many bytes

export interface LifetimeOptions {
  /** The lifetime (rule L2). */
  readonly ttl?: Ttl;
  /** Or the moment at which it ends. */
  readonly expireAt?: Moment;
  /** A live record keeps its own expire time (rule L6). */
  readonly keepTtl?: boolean;
  /** A live record gets the later of both expire times. */
  readonly extendTtl?: boolean;
  /** When the server acknowledges (rule P5); by default as the server is configured. */
  readonly durability?: DurabilityName;
}

/** At most one condition (rule P3). */
export interface ConditionOptions {
  readonly onlyIfAbsent?: boolean;
  readonly onlyIfPresent?: boolean;
  readonly onlyIfVersion?: bigint | undefined;
}

export interface PublishOptions extends LifetimeOptions, ConditionOptions {
  /** For topics without key fields (rule K3). */
  readonly key?: Key;
}

export interface DeltaOptions extends PublishOptions {
  /** Fields to remove, as paths such as "/a/b". */
  readonly unset?: readonly string[];
}

export interface PublishManyOptions extends LifetimeOptions, Omit<ConditionOptions, "onlyIfVersion"> {
  /** One key for each document, for topics without key fields. */
  readonly keys?: readonly Key[];
  /** All records are applied in one commit, or none (at most 1,000). */
  readonly atomic?: boolean;
}

/** Of a record in a transaction. */
export interface PutOptions extends ConditionOptions {
  /** For topics without key fields (rule K3). */
  readonly key?: Key;
  /** The lifetime (rule L2). */
  readonly ttl?: Ttl;
  /** Or the moment at which it ends. */
  readonly expireAt?: Moment;
}

export interface TransactionOptions {
  /** When the server acknowledges (rule P5); by default as the server is configured. */
  readonly durability?: DurabilityName;
}

export interface PublisherOptions extends LifetimeOptions {
  /** Records of a request at most, 1 to 10,000. 1,000. */
  readonly batchRecords?: number;
  /** Requests under way at most. 16. */
  readonly maxInFlight?: number;
  /** How long a record waits for others. 20 ms. */
  readonly lingerMs?: number;
  /** How long it tries to go on after a break. 30 s. */
  readonly retryForMs?: number;
  /** Fences every older publisher of this id (rule P6). */
  readonly publisherId?: string;
  /** Merges each record, as `deltaPublish` does. */
  readonly delta?: boolean;
  /** With `delta`: fields to remove from each record. */
  readonly unset?: readonly string[];
  readonly onAck?: (ack: Ack) => void;
  readonly onRefusal?: (refusal: Refusal) => void;
}

/** The payload fields to return, as paths: one of the two. */
export interface ProjectionOptions {
  readonly select?: readonly string[];
  readonly exclude?: readonly string[];
}

export interface ReadOptions extends ProjectionOptions {
  /** A bookmark: the answer shows at least everything up to it, also if another instance gave it (rule F10). */
  readonly minPosition?: string;
}

export interface QueryOptions extends ReadOptions {
  /** The values of the names in the filter, `{ name: user }` for `/Name = :name`: never put a value into its text. */
  readonly parameters?: Parameters;
  /** Such as "/price DESC, /symbol"; by default the order of keys. */
  readonly orderBy?: string;
  /** Only these. */
  readonly keys?: Iterable<Key>;
  /** Payloads are omitted. */
  readonly keysOnly?: boolean;
  /** Records per batch, 1 to 10,000. 1,000. */
  readonly batchSize?: number;
  readonly skipN?: bigint | number;
  readonly topN?: bigint | number;
  /** With `pageToken`: one page in key order, stable under concurrent change (rule Q4). */
  readonly pageSize?: number;
  /** `footer.nextPageToken` of the page before, with otherwise the same options. */
  readonly pageToken?: string;
  /**
   * A result for each group of records with equal values, in place of the records: fields, which name themselves, or
   * expressions by name, `{ minute: "FLOOR(/ts / 60)" }`. `orderBy`, `skipN` and `topN` are then about results (rule Q12).
   */
  readonly groupBy?: readonly string[] | Readonly<Record<string, string>>;
  /** The values of each result: `{ n: "COUNT(*)", notional: "SUM(/px * /qty)" }` (rule Q11). */
  readonly aggregate?: Readonly<Record<string, string>>;
  /** Only results for which this is true, such as "/n > 10". */
  readonly having?: string;
}

export interface CountOptions extends Pick<QueryOptions, "minPosition" | "parameters"> {
  /** Gets the fields of the filter in which no record has a value, if there are any: perhaps they are mistyped (rule Q10). */
  readonly onAbsentFields?: (paths: readonly string[]) => void;
}

export interface SubscribeOptions extends ProjectionOptions {
  /** Only records that match. */
  readonly filter?: string;
  /** The values of the names in the filter. */
  readonly parameters?: Parameters;
  /** A message says when a record goes out of focus: deleted, expired, or no longer matching (rule S2). */
  readonly oof?: boolean;
  /** Of a record that stays in focus only the changed fields (rule S3). */
  readonly delta?: boolean;
  /** With `delta`: also updates that change no field. */
  readonly emptyDeltas?: boolean;
  /** Puts, deletes and expiries as in the journal. */
  readonly changes?: boolean;
  /**
   * A bookmark, "earliest", or a time; by default now. Not with a snapshot. Of a pattern, where there are several cells: the
   * bookmarks of the cells. A cell that is not there begins with its earliest change.
   */
  readonly start?: string | Moment | Bookmarks;
  /** The newest value of each key, at most once per interval. */
  readonly conflation?: Duration;
  /** Progress comes when nothing was sent for this long. 5 s. */
  readonly progress?: Duration;
  /** Records per frame at most. 1,000. */
  readonly batchSize?: number;
  /** How long it tries to repair a broken connection. 5 minutes. */
  readonly retryForMs?: number;
  readonly onInterruption?: OnInterruption;
}

/** Which list a live result is; the rest as for `query` and `subscribe` (rule S10). */
export interface LiveResultOptions
  extends Pick<QueryOptions, "groupBy" | "aggregate" | "having">,
    Pick<SubscribeOptions, "parameters" | "progress" | "select" | "exclude" | "batchSize" | "retryForMs" | "onInterruption"> {
  /** Such as "/price DESC, /symbol". Needed, except with `groupBy` or `aggregate`. */
  readonly orderBy?: string;
  /** At most so many records; with `skipN` at most 10,000. Needed with `orderBy`, except with `groupBy` or `aggregate`. */
  readonly topN?: number;
  /** The list begins behind so many records. */
  readonly skipN?: number;
  /** The list changes at most once per interval. 100 ms; of groups 1 s. */
  readonly conflation?: Duration;
}

export interface TouchOptions {
  readonly ttl?: Ttl;
  readonly expireAt?: Moment;
  readonly onlyIfVersion?: bigint;
  /** The records to touch, by their present expire time (rule L19). */
  readonly only?: "later" | "earlier" | "without" | "with";
  readonly durability?: DurabilityName;
}

/** The definition of a view (rule V1). */
export interface ViewOptions {
  /** The topic whose records it is made of. */
  readonly source: string;
  /** Only records of the source that match this filter. */
  readonly where?: string;
  /** A record for each group of records with equal values; as `groupBy` of a query. */
  readonly groupBy?: readonly string[] | Readonly<Record<string, string>>;
  /**
   * The values of each record, `{ qty: "SUM(/qty)" }`. Without groups and aggregates: fields, which name themselves, and
   * expressions of each record of the source (rule V3).
   */
  readonly select?: readonly string[] | Readonly<Record<string, string>>;
}

/** Exactly one of the first four selects the records (rule D1). */
export interface DeleteOptions {
  readonly keys?: Iterable<Key>;
  /** With `keys`: a version for each; the record is deleted only if it still has it. */
  readonly onlyIfVersions?: readonly bigint[];
  readonly filter?: string;
  /** With `filter`: the values of the names in it. */
  readonly parameters?: Parameters;
  /** The document whose key is derived as for a publish. */
  readonly data?: Document;
  readonly all?: true;
  /** Matches are counted, and no record is deleted. */
  readonly dryRun?: boolean;
  readonly durability?: DurabilityName;
}

/** A topic, or all topics whose whole name matches. */
export type Topics = string | { readonly pattern: string };

/** A bookmark of each cell, by its name: where the subscription to a pattern goes on. JSON has it as the Python clients do. */
export type Bookmarks = Readonly<Record<string, string>>;

/** The request for documents of one request, without its position. */
export function publishRequest(
  topic: string,
  payloads: readonly Uint8Array[],
  options: LifetimeOptions & ConditionOptions,
  keys: readonly Key[] | undefined,
): PublishRequest {
  const condition = conditionOf(options);
  const records = payloads.map((payload, index) => ({
    payload,
    ...present({ key: keys === undefined ? undefined : recordKey(keys[index]!, "key"), condition }),
  }));
  return create(PublishRequestSchema, { topic, records, ...writing(options) });
}

/** A put or a removal of an atomic request, checked, before its document is encoded. */
export interface AtomicRecord {
  /** undefined: a removal by key. */
  readonly data: Document | undefined;
  readonly key?: string;
  readonly lifetime?: Lifetime;
  readonly condition?: Condition;
  readonly remove?: boolean;
}

/** One record of an atomic request, with a lifetime and a condition of its own. */
export function atomicRecord(data: Document | undefined, options: PutOptions): AtomicRecord {
  const { key, ttl, expireAt } = options;
  return {
    data,
    ...present({
      key: key === undefined ? undefined : recordKey(key),
      lifetime: lifetimeMessage(ttl, expireAt),
      condition: conditionOf(options),
    }),
  };
}

/** The request for all of a transaction, without its position. `payloads`: the bytes of each document. */
export function atomicRequest(
  topic: string,
  records: readonly AtomicRecord[],
  payloads: readonly Uint8Array[],
  { durability }: TransactionOptions,
): PublishRequest {
  const made = records.map(({ data: _, ...record }, index) => ({ ...record, payload: payloads[index]! }));
  return create(PublishRequestSchema, { topic, records: made, atomic: true, durability: durabilityValue(durability) });
}

/** How many of the payloads, from one on, go into one request. */
export function fitting(payloads: readonly Uint8Array[], first: number): number {
  let count = 0;
  let bytes = 0;
  for (let index = first; index < payloads.length && count < RECORDS_PER_REQUEST_MAX; index++) {
    bytes += payloads[index]!.length;
    if (count > 0 && bytes > CHUNK_BYTES) {
      break;
    }
    count += 1;
  }
  return count;
}

/** The fields that all requests of a publisher share. */
export function streamDefaults(topic: string, options: PublisherOptions): PublishStreamRequest {
  const { delta = false, unset } = options;
  if (unset !== undefined && !delta) {
    throw invalid("unset", "is for deltas: a plain publish replaces the whole record");
  }
  return create(PublishStreamRequestSchema, { topic, ...writing(options), delta, unsetPaths: unsetOf(unset) });
}

/** The paths of fields to remove. */
export function unsetOf(unset: Iterable<string> | undefined): string[] {
  return unset === undefined ? [] : list(unset, "unset", "texts");
}

/** A change of a lifetime without a payload (rules P8, L19). */
export function touchRequest(topic: string, key: Key, options: TouchOptions): TouchRequest {
  const { ttl, expireAt, only, durability, onlyIfVersion } = options;
  return create(TouchRequestSchema, {
    topic,
    keys: [recordKey(key)],
    ...present({ lifetime: lifetimeMessage(ttl, expireAt), condition: conditionOf({ onlyIfVersion }) }),
    only: TOUCH_ONLY[oneOf(only, TOUCH_ONLY_NAMES, "only") ?? "any"],
    durability: durabilityValue(durability),
  });
}

const TOUCH_ONLY_NAMES = ["later", "earlier", "without", "with"] as const;
const TOUCH_ONLY = {
  any: TouchOnly.UNSPECIFIED,
  later: TouchOnly.LATER,
  earlier: TouchOnly.EARLIER,
  without: TouchOnly.WITHOUT,
  with: TouchOnly.WITH,
} as const;

/** A delete: exactly one of keys, filter, data and all selects the records (rule D1). `payload`: the bytes of `data`. */
export function deleteRequest(topic: string, options: DeleteOptions, payload?: Uint8Array): SowDeleteRequest {
  return create(SowDeleteRequestSchema, {
    topic,
    selection: selectionOf(options, payload),
    parameters: parameterValues(options.parameters),
    dryRun: options.dryRun ?? false,
    durability: durabilityValue(options.durability),
  });
}

function selectionOf(options: DeleteOptions, payload: Uint8Array | undefined): SowDeleteRequest["selection"] {
  const { keys, onlyIfVersions, filter, data, all } = options;
  if ([keys, filter, data, all].filter((each) => each !== undefined).length !== 1) {
    throw invalid("keys", "give exactly one of keys, filter, data and all");
  }
  if (onlyIfVersions !== undefined && keys === undefined) {
    throw invalid("onlyIfVersions", "is for deletes by keys");
  }
  if (options.parameters !== undefined && filter === undefined) {
    throw invalid("parameters", "belong to filter");
  }
  if (keys !== undefined) {
    const versions = onlyIfVersions === undefined ? [] : list(onlyIfVersions, "onlyIfVersions", "versions");
    return { case: "byKeys", value: create(KeyListSchema, { keys: recordKeys(keys), versions }) };
  }
  if (filter !== undefined) {
    if (typeof filter !== "string") {
      throw ofOtherType("filter", filter);
    }
    if (filter.trim() === "") {
      throw invalid("filter", 'is empty; for every record write "true"', "FILTER_INVALID"); // it would match all
    }
    return { case: "byFilter", value: filter };
  }
  return payload === undefined ? { case: "all", value: true } : { case: "byPayload", value: payload };
}

/** The payload fields to return; undefined: the whole payload. */
export function projection({ select, exclude }: ProjectionOptions): Projection | undefined {
  if (select !== undefined && exclude !== undefined) {
    throw invalid("exclude", "give select or exclude, not both");
  }
  if (select === undefined && exclude === undefined) {
    return undefined;
  }
  const [include, others] = [list(select ?? [], "select", "texts"), list(exclude ?? [], "exclude", "texts")];
  return create(ProjectionSchema, { include, exclude: others });
}

/** A query (rule Q2). An empty list of keys is refused: on the wire it would ask for every record. */
export function queryRequest(topic: string, filter: string, options: QueryOptions): QueryRequest {
  const keys = options.keys === undefined ? [] : recordKeys(options.keys);
  if (options.keys !== undefined && keys.length === 0) {
    throw invalid("keys", "is empty; leave it out to ask for every record");
  }
  const { orderBy = "", keysOnly = false, pageToken = "", minPosition = "" } = options;
  return create(QueryRequestSchema, {
    topic,
    filter,
    parameters: parameterValues(options.parameters),
    keys,
    ...present({ select: projection(options) }),
    orderBy,
    keysOnly,
    batchSize: count(options.batchSize, "batchSize"),
    pageSize: count(options.pageSize, "pageSize"),
    pageToken,
    skipN: BigInt(count(options.skipN, "skipN")),
    topN: BigInt(count(options.topN, "topN", 1)),
    minPosition,
    groupBy: expressions(options.groupBy, "groupBy"),
    aggregate: expressions(options.aggregate, "aggregate"),
    having: options.having ?? "",
  });
}

/** Expressions with their names; a field names itself. */
function expressions(given: QueryOptions["groupBy"], option: string): { name: string; expression: string }[] {
  const named: [string, unknown][] =
    given === undefined ? [] : Array.isArray(given) ? given.map((text: unknown) => ["", text]) : Object.entries(given);
  return named.map(([name, expression]) => {
    if (typeof expression !== "string") {
      throw ofOtherType(option, expression);
    }
    return { name, expression };
  });
}

/** A new view (rule V1). */
export function createViewRequest(name: string, options: ViewOptions): CreateTopicRequest {
  const { source, where = "" } = options;
  const view = {
    source,
    where,
    groupBy: expressions(options.groupBy, "groupBy"),
    select: expressions(options.select, "select"),
  };
  return create(CreateTopicRequestSchema, { name, view });
}

/** A subscription. The server checks which options exclude each other. */
export function subscribeRequest(topics: Topics, options: SubscribeOptions, sow: boolean): SubscribeRequest {
  if (typeof topics !== "string" && typeof topics?.pattern !== "string") {
    throw ofOtherType("topics", topics);
  }
  const { filter = "", oof = false, delta = false, emptyDeltas = false, changes = false, start } = options;
  return create(SubscribeRequestSchema, {
    ...(typeof topics === "string" ? { topic: topics } : { topicPattern: topics.pattern }),
    filter,
    parameters: parameterValues(options.parameters),
    sow,
    oof,
    delta,
    emptyDeltas,
    changes,
    start: startOf(start),
    conflationMicros: options.conflation === undefined ? 0n : micros(options.conflation, "conflation"),
    progressMicros: options.progress === undefined ? 0n : micros(options.progress, "progress"),
    batchSize: count(options.batchSize, "batchSize"),
    ...present({ select: projection(options) }),
  });
}

/** A live result: of records, or of the results of groups. */
export function liveResultRequest(topic: string, filter: string, options: LiveResultOptions): SubscribeRequest {
  if (typeof topic !== "string") {
    throw ofOtherType("topic", topic);
  }
  const { orderBy = "", topN, skipN, having = "" } = options;
  const groupBy = expressions(options.groupBy, "groupBy");
  const aggregate = expressions(options.aggregate, "aggregate");
  if (groupBy.length === 0 && aggregate.length === 0 && having === "") {
    if (orderBy === "") {
      throw invalid("orderBy", "is needed, or groupBy or aggregate");
    }
    if (topN === undefined) {
      throw invalid("topN", "is needed with orderBy");
    }
  }
  const { parameters, conflation, progress = "1s", select, exclude, batchSize } = options;
  const followed = present({ parameters, conflation, select, exclude, batchSize });
  const request = subscribeRequest(topic, { filter, oof: true, progress, ...followed }, true);
  request.orderBy = orderBy;
  request.topN = BigInt(count(topN, "topN", 1));
  request.skipN = BigInt(count(skipN, "skipN"));
  request.groupBy = groupBy.map((one) => create(NamedExpressionSchema, one));
  request.aggregate = aggregate.map((one) => create(NamedExpressionSchema, one));
  request.having = having;
  return request;
}

/** The bookmarks of cells that a start has; undefined: it has none. Throws InvalidArgument. */
export function startsOfCells(start: SubscribeOptions["start"]): Bookmarks | undefined {
  if (!isMapping(start)) {
    return undefined;
  }
  const starts = Object.entries(start);
  if (starts.length === 0) {
    throw invalid("start", "is a mapping without a cell");
  }
  for (const [cell, bookmark] of starts) {
    if (typeof bookmark !== "string" || bookmark === "" || cell === "") {
      throw invalid("start", `${shown(cell)}: ${shown(bookmark)} is not the name of a cell with a bookmark`);
    }
  }
  return start;
}

function isMapping(start: SubscribeOptions["start"]): start is Bookmarks {
  return typeof start === "object" && start !== null && [Object.prototype, null].includes(Object.getPrototypeOf(start));
}

function startOf(start: SubscribeOptions["start"]): SubscribeRequest["start"] {
  if (start === undefined) {
    return { case: undefined };
  }
  if (start === "earliest") {
    return { case: "earliest", value: true }; // no bookmark looks like it
  }
  if (isMapping(start)) {
    throw invalid("start", "has the bookmarks of cells, which only a pattern needs: a topic is in one cell");
  }
  if (typeof start !== "string" && typeof start !== "bigint" && !(start instanceof Date)) {
    throw invalid("start", `a ${kindOf(start)} is not a bookmark, a Date, microseconds as a bigint, or "earliest"`);
  }
  return typeof start === "string"
    ? { case: "bookmark", value: start }
    : { case: "startTimeMicros", value: momentMicros(start, "start") };
}

function conditionOf({ onlyIfAbsent, onlyIfPresent, onlyIfVersion }: ConditionOptions): Condition | undefined {
  if ([onlyIfAbsent, onlyIfPresent, onlyIfVersion !== undefined].filter(Boolean).length > 1) {
    throw invalid("onlyIfVersion", "give at most one of onlyIfAbsent, onlyIfPresent and onlyIfVersion");
  }
  if (onlyIfAbsent) {
    return create(ConditionSchema, { condition: { case: "onlyIfAbsent", value: true } });
  }
  if (onlyIfPresent) {
    return create(ConditionSchema, { condition: { case: "onlyIfPresent", value: true } });
  }
  return onlyIfVersion === undefined
    ? undefined
    : create(ConditionSchema, { condition: { case: "onlyIfVersion", value: onlyIfVersion } });
}

/** The fields of a write. */
function writing(options: LifetimeOptions): {
  lifetime?: Lifetime;
  ttlMode: TtlMode;
  durability: ReturnType<typeof durabilityValue>;
} {
  const { ttl, expireAt, keepTtl, extendTtl, durability } = options;
  if (keepTtl && extendTtl) {
    throw invalid("extendTtl", "give keepTtl or extendTtl, not both");
  }
  return {
    ...present({ lifetime: lifetimeMessage(ttl, expireAt) }),
    ttlMode: extendTtl ? TtlMode.EXTEND : keepTtl ? TtlMode.KEEP : TtlMode.UNSPECIFIED,
    durability: durabilityValue(durability),
  };
}

/** A whole number. The look at the whole message finds one that is too large ([1] of arguments). */
function count<N extends number | bigint>(value: N | undefined, field: string, least = 0): N | 0 {
  if (value === undefined) {
    return 0;
  }
  if (typeof value !== "bigint" && !(typeof value === "number" && Number.isInteger(value))) {
    throw invalid(field, `${shown(value)} is no whole number`);
  }
  if (value < least) {
    throw invalid(field, least === 0 ? `${value} is negative` : `${value} is less than ${least}`);
  }
  return value;
}

/** The fields that are not undefined: an unset field of a message is one that is not there. */
function present<Fields extends object>(fields: Fields): { [Name in keyof Fields]?: NonNullable<Fields[Name]> } {
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined)) as ReturnType<
    typeof present<Fields>
  >;
}
