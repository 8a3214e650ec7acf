/** A client of sow, a state-of-the-world store. See README.md. */

export { ExtData } from "@msgpack/msgpack";
export type { Tls, Token } from "./channel.js";
export { type CellClient, Client, type ClientOptions, type Followed, type InCell } from "./client.js";
export { dateOf, type Duration, type Moment, type Ttl } from "./durations.js";
export {
  Aborted,
  AlreadyExists,
  Cancelled,
  ConditionFailed,
  DataLoss,
  DeadlineExceeded,
  FailedPrecondition,
  InternalError,
  InvalidArgument,
  NotFound,
  PermissionDenied,
  PublishFailed,
  type Refusal,
  ReplicationUnavailable,
  ResourceExhausted,
  ResyncRequired,
  SowError,
  Unavailable,
} from "./errors.js";
export type { JoinedSubscription } from "./joining.js";
export type { JsonValue } from "./json.js";
export { type Key, type KeyField, recordKey } from "./keys.js";
export type { Parameters, ParameterScalar } from "./parameters.js";
export type { Document } from "./payloads.js";
export type { Ack, Publisher } from "./publisher.js";
export type { QueryFooter, QueryHeader, QueryResult } from "./query.js";
export type { Change, Deleted, DurabilityName, JsonObject, Published, StoredRecord } from "./records.js";
export type {
  Bookmarks,
  CountOptions,
  DeleteOptions,
  DeltaOptions,
  LiveResultOptions,
  PublisherOptions,
  PublishManyOptions,
  PublishOptions,
  PutOptions,
  QueryOptions,
  ReadOptions,
  SubscribeOptions,
  Topics,
  TouchOptions,
  TransactionOptions,
  ViewOptions,
} from "./requests.js";
export type { LiveResult, ResultChange } from "./results.js";
export type { Instance } from "./search.js";
export type { OnInterruption, Subscription } from "./subscription.js";
export type { RemovalOptions, Transaction } from "./transaction.js";
export type { OnFailover } from "./transport.js";
