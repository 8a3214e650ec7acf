/**
 * The errors of the client: one small tree, built from the server's reasons, never from text (rule X1).
 *
 *     SowError
 *     ├── InvalidArgument
 *     ├── NotFound
 *     ├── AlreadyExists
 *     ├── FailedPrecondition
 *     │   └── ConditionFailed          (.currentVersion)
 *     ├── Aborted
 *     ├── ResourceExhausted
 *     ├── ResyncRequired               (.bookmark)
 *     ├── PermissionDenied
 *     ├── Unavailable
 *     │   └── ReplicationUnavailable   (.applied)
 *     ├── DeadlineExceeded
 *     ├── Cancelled
 *     ├── DataLoss
 *     ├── InternalError
 *     └── PublishFailed                (.refusals, .refused)
 *
 * `reason` is a name of `sow.v1.ErrorReason` without its prefix, or one of the few that only a client can know:
 * UNREACHABLE, STREAM_CUT, MALFORMED_RESPONSE, CLOSED, NO_SOW_SERVER, OTHER_CLUSTER, SERVER_TOO_OLD, and, when a status
 * carries no reason, the name of its gRPC code.
 */

/** Additions to an error. */
export interface ErrorParts {
  readonly reason: string;
  readonly details?: Readonly<Record<string, string>> | undefined;
  readonly retryAfterMs?: number | undefined;
  readonly cause?: unknown;
}

/** The base of all errors that the client throws on purpose. */
export class SowError extends Error {
  /** For programs; see docs/errors.md. */
  readonly reason: string;
  /** Additions of the server, such as `field`. */
  readonly details: Readonly<Record<string, string>>;
  /** Milliseconds after which the server asks for a retry; undefined when it does not ask. */
  readonly retryAfterMs: number | undefined;

  constructor(message: string, { reason, details, retryAfterMs, cause }: ErrorParts) {
    super(`${message} (${reason})`, cause === undefined ? undefined : { cause });
    this.name = new.target.name;
    this.reason = reason;
    this.details = details ?? {};
    this.retryAfterMs = retryAfterMs;
  }

  /** The message without the reason behind it. */
  get text(): string {
    return this.message.slice(0, -` (${this.reason})`.length);
  }
}

/** The request, or one of its fields, is invalid in itself. */
export class InvalidArgument extends SowError {}

/** There is no such topic, durable subscription, policy or peer, or no live record of that key. */
export class NotFound extends SowError {}

/** The topic exists, or another instance has the name. */
export class AlreadyExists extends SowError {}

/** The request is valid, but not in the current state. */
export class FailedPrecondition extends SowError {}

/** The condition of a write does not hold (rule P3). */
export class ConditionFailed extends FailedPrecondition {
  /** Version of the live record; 0 when there is none. */
  get currentVersion(): bigint {
    return numberIn(this.details["current_version"]);
  }
}

/** Not done, or ended, because of something else, such as another record of the atomic request. */
export class Aborted extends SowError {}

/** The server is at a limit: a full queue or disk, a backlog quota, a write stall, too large a message or result. */
export class ResourceExhausted extends SowError {}

/** The journal does not continue at the subscriber's position: take a new snapshot (rules S4, S6). */
export class ResyncRequired extends SowError {
  /** The position that the subscriber had reached; undefined when it had not begun. */
  get bookmark(): string | undefined {
    return this.details["bookmark"];
  }
}

/** The server does not allow this client to do that, or does not know the client. */
export class PermissionDenied extends SowError {}

/** The server cannot be reached (UNREACHABLE), is stopping or has stopped writing, or cut the answer. */
export class Unavailable extends SowError {}

/** Every address has refused. A client that has not reached any of them yet does not try again by itself. */
export class AllRefused extends Unavailable {
  constructor(message: string, parts: ErrorParts) {
    super(message, parts);
    this.name = "Unavailable"; // programs know that one
  }
}

/** An address has said nothing in time; it has not refused. */
export class NoAnswer extends Unavailable {}

/**
 * A write with durability "replicated" has reached fewer sync peers than required (rule P5). The `applied` records stay
 * on this server, so they need not be written again.
 */
export class ReplicationUnavailable extends Unavailable {
  /** Records that were written on this server. */
  get applied(): bigint {
    return numberIn(this.details["applied"]);
  }
}

/** No answer in time. A write may or may not have been applied. */
export class DeadlineExceeded extends SowError {}

/** The call was cancelled, or the client, publisher or subscription was closed (CLOSED). */
export class Cancelled extends SowError {}

/** Stored data failed its checksum. */
export class DataLoss extends SowError {}

/** A fault of the server (its log has the details), or an invalid answer. */
export class InternalError extends SowError {}

/** One record that was not applied, with the reason. */
export interface Refusal {
  readonly refused: true;
  /** Its position, from 0, among all records handed to the call or the publisher. */
  readonly index: number;
  readonly reason: string;
  readonly message: string;
  /** For CONDITION_FAILED: version of the live record; 0 when there is none. */
  readonly currentVersion: bigint;
}

/** A publisher's records were refused; all others were applied. */
export class PublishFailed extends SowError {
  /** The first of them; a publisher keeps at most 10,000. */
  readonly refusals: readonly Refusal[];
  /** The number of all of them. */
  readonly refused: number;

  constructor(refusals: readonly [Refusal, ...Refusal[]], refused: number) {
    const [first] = refusals;
    const number = refused === 1 ? "1 record was" : `${refused} records were`;
    super(`${number} refused; the first is number ${first.index}: ${first.message}`, {
      reason: first.reason,
      details: { refused: String(refused) },
    });
    this.refusals = refusals;
    this.refused = refused;
  }
}

type ErrorClass = new (message: string, parts: ErrorParts) => SowError;

/** The class of each reason. A test compares the table with `sow.v1.ErrorReason`. */
export const CLASS_OF_REASON: Readonly<Record<string, ErrorClass>> = {
  INVALID_ARGUMENT: InvalidArgument,
  TOPIC_NOT_FOUND: NotFound,
  TOPIC_NAME_INVALID: InvalidArgument,
  TOPIC_EXISTS: AlreadyExists,
  TOPIC_NOT_EMPTY: FailedPrecondition,
  SET_IN_CONFIG: FailedPrecondition,
  KEY_NOT_ALLOWED: InvalidArgument,
  KEY_REQUIRED: InvalidArgument,
  KEY_FIELD_MISSING: InvalidArgument,
  KEY_FIELD_NOT_SCALAR: InvalidArgument,
  KEY_TOO_LARGE: InvalidArgument,
  KEY_NOT_UTF8: InvalidArgument,
  PAYLOAD_TOO_LARGE: InvalidArgument,
  PAYLOAD_MALFORMED: InvalidArgument,
  REQUEST_TOO_LARGE: InvalidArgument,
  ATOMIC_TOO_LARGE: InvalidArgument,
  ATOMIC_ABORTED: Aborted,
  CONDITION_FAILED: ConditionFailed,
  LIFETIME_REJECTED: InvalidArgument,
  LIFETIME_NEGATIVE: InvalidArgument,
  LIFETIME_TOO_LONG: InvalidArgument,
  RECORD_NOT_FOUND: NotFound,
  UNSUPPORTED_FOR_MESSAGE_TYPE: InvalidArgument,
  FILTER_INVALID: InvalidArgument,
  PAGE_TOKEN_INVALID: InvalidArgument,
  PUBLISHER_FENCED: FailedPrecondition,
  OUTCOME_UNKNOWN: FailedPrecondition,
  STREAM_BROKEN: Aborted,
  OVERLOADED: ResourceExhausted,
  WRITE_STALLED: ResourceExhausted,
  DISK_FULL: ResourceExhausted,
  STORE_FAILED: Unavailable,
  DATA_DAMAGED: DataLoss,
  STOPPING: Unavailable,
  INTERNAL: InternalError,
  ORDER_INVALID: InvalidArgument,
  RESULT_TOO_LARGE: ResourceExhausted,
  UNSET_KEY_FIELD: InvalidArgument,
  BOOKMARK_MALFORMED: InvalidArgument,
  BOOKMARK_OTHER_EPOCH: ResyncRequired,
  BOOKMARK_IN_FUTURE: ResyncRequired,
  BOOKMARK_TOO_OLD: ResyncRequired,
  NO_JOURNAL: FailedPrecondition,
  PATTERN_MATCHES_NOTHING: NotFound,
  RESYNC_REQUIRED: ResyncRequired,
  TOPIC_DELETED: NotFound,
  DURABLE_NOT_FOUND: NotFound,
  DURABLE_IN_USE: FailedPrecondition,
  DURABLE_TAKEN_OVER: Aborted,
  DURABLE_DETACHED: Aborted,
  DURABLE_DIFFERS: FailedPrecondition,
  BACKLOG_QUOTA_EXCEEDED: ResourceExhausted,
  TOPIC_FULL: ResourceExhausted,
  POLICY_NOT_FOUND: NotFound,
  REPLICATION_UNAVAILABLE: ReplicationUnavailable,
  PEER_NOT_FOUND: NotFound,
  PEER_NOT_ACCEPTED: PermissionDenied,
  PEER_UNAUTHENTICATED: PermissionDenied,
  PEER_IS_SELF: FailedPrecondition,
  INSTANCE_NAME_CLASH: AlreadyExists,
  PROTOCOL_MISMATCH: FailedPrecondition,
  CLOCK_SKEW: FailedPrecondition,
  BATCH_DAMAGED: DataLoss,
  RESEED_PENDING: Unavailable,
  PEER_BEHIND: FailedPrecondition,
  TOPIC_DIFFERS: FailedPrecondition,
  EXPORT_NOT_FOUND: NotFound,
  RESUME_TOKEN_INVALID: InvalidArgument,
  LOAD_NOT_FOUND: NotFound,
  LOAD_COMMITTED: FailedPrecondition,
  LOAD_INCOMPLETE: FailedPrecondition,
  LOAD_FAILED: FailedPrecondition,
  UNIT_DONE: FailedPrecondition,
  TIME_IN_FUTURE: FailedPrecondition,
  BACKUP_UNAVAILABLE: FailedPrecondition,
  BACKUP_EXISTS: AlreadyExists,
  UNAUTHENTICATED: PermissionDenied,
  PERMISSION_DENIED: PermissionDenied,
  LIMIT_EXCEEDED: ResourceExhausted,
  ACCESS_CHANGED: Unavailable,
  AUDIT_UNAVAILABLE: Unavailable,
  READER_LOST: Unavailable,
  PEER_OTHER_CLUSTER: FailedPrecondition,
  BEHIND: Unavailable,
  PEER_EXISTS: AlreadyExists,
  EXPRESSION_INVALID: InvalidArgument,
  VIEW_READ_ONLY: FailedPrecondition,
  VIEW_BUILDING: Unavailable,
  TOPIC_HAS_VIEWS: FailedPrecondition,
  TOPIC_ELSEWHERE: FailedPrecondition,
};

const CLASS_OF_CODE: Readonly<Record<string, ErrorClass>> = {
  CANCELLED: Cancelled,
  INVALID_ARGUMENT: InvalidArgument,
  DEADLINE_EXCEEDED: DeadlineExceeded,
  NOT_FOUND: NotFound,
  ALREADY_EXISTS: AlreadyExists,
  PERMISSION_DENIED: PermissionDenied,
  UNAUTHENTICATED: PermissionDenied,
  RESOURCE_EXHAUSTED: ResourceExhausted,
  FAILED_PRECONDITION: FailedPrecondition,
  ABORTED: Aborted,
  OUT_OF_RANGE: InvalidArgument,
  UNAVAILABLE: Unavailable,
  DATA_LOSS: DataLoss,
};

/** The error for a reason; `code` (the name of a gRPC code) decides for reasons of newer servers. */
export function errorOfReason(message: string, parts: ErrorParts, code = "UNKNOWN"): SowError {
  const kind = own(CLASS_OF_REASON, parts.reason) ?? own(CLASS_OF_CODE, code) ?? InternalError;
  return new kind(message, parts);
}

/** The same kind of error with another message and more details. */
export function errorLike(error: SowError, message: string, details: Readonly<Record<string, string>> = {}): SowError {
  const kind = error.constructor as ErrorClass;
  return new kind(message, {
    reason: error.reason,
    details: { ...error.details, ...details },
    retryAfterMs: error.retryAfterMs,
    cause: error.cause ?? error,
  });
}

/** The error for a refusal. */
export function errorOfRefusal(refusal: Refusal): SowError {
  const details =
    refusal.reason === "CONDITION_FAILED" ? { current_version: String(refusal.currentVersion) } : undefined;
  return errorOfReason(refusal.message, { reason: refusal.reason, details });
}

/** The error of an argument that the client itself refuses. */
export function invalid(field: string, fault: string, reason = "INVALID_ARGUMENT"): InvalidArgument {
  return new InvalidArgument(`${field}: ${fault}`, { reason, details: { field } });
}

/** The error of a call on a closed client, publisher or subscription. */
export function closed(what: string): Cancelled {
  return new Cancelled(`the ${what} is closed`, { reason: "CLOSED" });
}

/** The error for an answer that the contract does not allow. */
export function malformed(what: string): InternalError {
  return new InternalError(`the server sent ${what}`, { reason: "MALFORMED_RESPONSE" });
}

/** The error of a stream that ended before its end. */
export function cut(what: string, cause?: unknown): Unavailable {
  return new Unavailable(`${what} was cut off before its end`, { reason: "STREAM_CUT", cause });
}

function own<Value>(table: Readonly<Record<string, Value>>, name: string): Value | undefined {
  return Object.hasOwn(table, name) ? table[name] : undefined;
}

function numberIn(text: string | undefined): bigint {
  return text !== undefined && /^[0-9]+$/.test(text) ? BigInt(text) : 0n;
}
