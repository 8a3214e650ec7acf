/** Records, outcomes and changes as the program sees them, made from the messages of the contract. No I/O. */

import { cut, errorOfRefusal, malformed, type Refusal, SowError } from "./errors.js";
import { INT64_MAX } from "./durations.js";
import { oneOf } from "./arguments.js";
import type { JsonValue } from "./json.js";
import { decode, type MessageTypeName } from "./payloads.js";
import type { PublishResponse, PublishResult, TouchResponse } from "./gen/sow/v1/sow_pb.js";
import {
  Durability,
  ErrorReason,
  type Record as RecordMessage,
  type RecordColumns,
  type Refusal as RefusalMessage,
} from "./gen/sow/v1/types_pb.js";

/** A JSON object, as `data` of a record has it where the program names no type. */
export type JsonObject = { [name: string]: JsonValue };

/** The durability that was asked for, or reached (rule P5). */
export type DurabilityName = "fsync" | "buffered" | "replicated";

/** One record as it is stored (rule K6). It owns its bytes. */
export class StoredRecord<T = JsonObject> {
  readonly topic: string;
  /** The record key (rule K4). */
  readonly key: string;
  /** The bytes exactly as published, or the part that `select` keeps; empty with `keysOnly`. */
  readonly payload: Uint8Array;
  /** Larger is newer (rule K7). */
  readonly version: bigint;
  /** When the server applied the publish: microseconds since the epoch. */
  readonly publishTimeMicros: bigint;
  /** When the record expires; null: never. */
  readonly expireTimeMicros: bigint | null;
  /** Name of the instance that accepted the write. */
  readonly origin: string;
  /** Journal sequence of the last change on the instance that answered. */
  readonly sequence: bigint;
  /** The encoding of the payload: json, msgpack, fix, nvfix or binary; empty from an older server. */
  readonly messageType: string;
  /** Between two fields of fix and nvfix. */
  readonly fixSeparator: string;

  constructor(fields: Omit<StoredRecord, "data">) {
    this.topic = fields.topic;
    this.key = fields.key;
    // A copy: the bytes of a message are one block, and one record would keep all of it.
    this.payload = Uint8Array.prototype.slice.call(fields.payload);
    this.version = fields.version;
    this.publishTimeMicros = fields.publishTimeMicros;
    this.expireTimeMicros = fields.expireTimeMicros;
    this.origin = fields.origin;
    this.sequence = fields.sequence;
    this.messageType = fields.messageType;
    this.fixSeparator = fields.fixSeparator;
  }

  /**
   * The document, decoded anew at each access by the message type of the payload: integers beyond 2^53 are bigints, times
   * and other extensions of MessagePack are Dates and ExtData, and values of fix and nvfix are texts. Throws where the
   * payload is none of its type; of a binary topic, where it is no JSON.
   */
  get data(): T {
    const messageType = this.messageType as MessageTypeName;
    try {
      return decode(this.payload, { messageType, separator: this.fixSeparator }) as T;
    } catch (error) {
      const type = messageType === "msgpack" ? "MessagePack" : "JSON";
      throw new SowError(`the payload of ${this.topic} ${JSON.stringify(this.key)} is no ${type}; see \`payload\``, {
        reason: "PAYLOAD_MALFORMED",
        cause: error,
      });
    }
  }
}

/** A record that was published or touched. */
export interface Published {
  readonly refused: false;
  readonly key: string;
  /** Its new version. For a duplicate the one of its first try; 0: not remembered (rule P6). */
  readonly version: bigint;
  /** The expire time stamped on it; null: never, or not known. */
  readonly expireTimeMicros: bigint | null;
  /** false: the expire time of this duplicate is not remembered. */
  readonly expireTimeKnown: boolean;
  /** Journal sequence of the change; 0: not remembered. */
  readonly sequence: bigint;
  /** A lifetime is stored but not acted on, because the topic has expiration disabled (rule L3). */
  readonly ttlIgnored: boolean;
  /** An earlier try had been applied already; nothing was changed now. */
  readonly duplicate: boolean;
  /** The `start` of a subscription to the changes after this one, and the `minPosition` of a read; null: not known. */
  readonly bookmark: string | null;
  /** A removal has deleted a record; one that found none has version and sequence 0 (rule P11). */
  readonly removed: boolean;
}

/** What became of a delete. */
export interface Deleted {
  /** Live records that matched. */
  readonly matched: bigint;
  /** Records deleted; 0 in a dry run. */
  readonly deleted: bigint;
  /** Journal sequence of the last delete; 0 when there was none. */
  readonly lastSequence: bigint;
  /** Fields of the filter in which no record that was read has a value: perhaps they are mistyped (rule Q10). */
  readonly absentFields: readonly string[];
}

interface ChangeParts {
  readonly topic: string;
  /** Where another subscription may go on after this change; null inside a snapshot, and inside an atomic request. */
  readonly bookmark: string | null;
  /** Of a pattern, where there are several cells: the one that it comes from. Not of a mark that is about all cells. */
  readonly cell?: string;
}

/** One message of a subscription; docs/subscriptions.md has the table. */
export type Change<T = JsonObject> =
  /** A record of the snapshot. */
  | (ChangeParts & { readonly op: "sow"; readonly reason: null; readonly key: string; readonly record: StoredRecord<T> })
  /** The snapshot is complete. */
  | (ChangeParts & {
      readonly op: "snapshot_end";
      readonly reason: null;
      /** Of one topic: fields of the filter and of `select` in which no record that was read has a value (rule Q10). */
      readonly absentFields: readonly string[];
    })
  /** Forget the records so far: a fresh snapshot follows. */
  | (ChangeParts & { readonly op: "resync"; readonly reason: null })
  | (ChangeParts & {
      readonly op: "put";
      /** "touched": only the lifetime has changed. */
      readonly reason: null | "touched";
      readonly key: string;
      readonly record: StoredRecord<T>;
      /** With `delta`: the payload has the changed fields and the key fields. */
      readonly isDelta: boolean;
      /** With `delta`: the removed fields. Remove them first, then merge. */
      readonly unsetPaths: readonly string[];
    })
  /** Out of focus: the record is gone, and `previous` is the last one. */
  | (ChangeParts & {
      readonly op: "oof";
      readonly reason: "deleted" | "expired";
      readonly key: string;
      readonly previous: StoredRecord<T>;
    })
  /** Out of focus: the updated record does not match any more, or may not be seen any more. */
  | (ChangeParts & {
      readonly op: "oof";
      readonly reason: "match" | "not_permitted";
      readonly key: string;
      readonly record: StoredRecord<T>;
    })
  /** To change readers. */
  | (ChangeParts & {
      readonly op: "delete" | "expire";
      readonly reason: null;
      readonly key: string;
      readonly previous: StoredRecord<T>;
    });

/** The records of a get. */
export function recordOf<T>(message: RecordMessage): StoredRecord<T> {
  const expireTimeMicros = message.expireTimeMicros ?? null;
  return new StoredRecord<T>({ ...message, expireTimeMicros });
}

/** The records of a batch in columns. Throws InternalError where columns have unequal lengths. */
export function recordsOf<T>(topic: string, columns: RecordColumns): StoredRecord<T>[] {
  const { key, payload, version, publishTimeMicros, expireTimeMicros, sequence, origin, origins } = columns;
  const { messageType, fixSeparator } = columns;
  const count = key.length;
  const optional = [payload.length, origin.length];
  const lengths = [version.length, publishTimeMicros.length, expireTimeMicros.length, sequence.length];
  if (lengths.some((length) => length !== count) || optional.some((length) => length !== 0 && length !== count)) {
    throw malformed("columns of unequal length");
  }
  return key.map((each, index) => {
    const expires = expireTimeMicros[index]!;
    return new StoredRecord<T>({
      topic,
      key: each,
      payload: payload[index] ?? NO_BYTES,
      version: version[index]!,
      publishTimeMicros: publishTimeMicros[index]!,
      expireTimeMicros: expires === INT64_MAX ? null : expires,
      origin: origins[origin[index] ?? 0] ?? "",
      sequence: sequence[index]!,
      messageType,
      fixSeparator,
    });
  });
}

const NO_BYTES = new Uint8Array(0);

/** The wire's value of a durability. */
export function durabilityValue(name: DurabilityName | undefined): Durability {
  return DURABILITIES[oneOf(name, DURABILITY_NAMES, "durability") ?? "default"];
}

const DURABILITY_NAMES = ["fsync", "buffered", "replicated"] as const;
const DURABILITIES = {
  default: Durability.UNSPECIFIED,
  fsync: Durability.FSYNC,
  buffered: Durability.BUFFERED,
  replicated: Durability.REPLICATED,
} as const;

/** The name of a durability; null when the server did not send it. */
export function durabilityName(value: Durability): DurabilityName | null {
  switch (value) {
    case Durability.FSYNC:
      return "fsync";
    case Durability.BUFFERED:
      return "buffered";
    case Durability.REPLICATED:
      return "replicated";
    default:
      return null;
  }
}

/** The position right after a change; null when it is not known. */
export function bookmarkOf(journalEpoch: string, sequence: bigint): string | null {
  return journalEpoch !== "" && sequence !== 0n ? `${journalEpoch}.${sequence}` : null;
}

/** A refusal as the program sees it. */
export function refusalOf(message: RefusalMessage, index: number): Refusal {
  const reason = ErrorReason[message.reason] ?? `REASON_${message.reason}`;
  return { refused: true, index, reason, message: message.message, currentVersion: message.currentVersion };
}

/** The outcome of each record. `firstIndex`: the position of the first one; `atomic`: they were one atomic request. */
export function outcomes(
  response: PublishResponse | TouchResponse,
  expected: number,
  { firstIndex = 0, atomic = false } = {},
): (Published | Refusal)[] {
  const { results, journalEpoch } = response;
  if (results.length !== expected) {
    throw malformed(`${results.length} results for ${expected} records`);
  }
  // The place after an atomic request is after all of its records.
  const end = atomic ? results.reduce((last, { sequence }) => (sequence > last ? sequence : last), 0n) : 0n;
  return results.map((result, index) => outcome(result, firstIndex + index, journalEpoch, end));
}

/** The outcome of the only record; a refusal is thrown. */
export function onlyOutcome(response: PublishResponse | TouchResponse): Published {
  const result = outcomes(response, 1)[0]!;
  if (result.refused) {
    throw errorOfRefusal(result);
  }
  return result;
}

function outcome(result: PublishResult, index: number, journalEpoch: string, end: bigint): Published | Refusal {
  if (result.refusal !== undefined) {
    return refusalOf(result.refusal, index);
  }
  const { key, version, sequence, ttlIgnored, duplicate, removed } = result;
  return {
    refused: false,
    key,
    version,
    expireTimeMicros: result.expireTimeMicros ?? null,
    // A server that remembers nothing of duplicates does not set `expire_time_unknown` either.
    expireTimeKnown: !(result.expireTimeUnknown || (duplicate && version === 0n)),
    sequence,
    ttlIgnored,
    duplicate,
    bookmark: bookmarkOf(journalEpoch, end || sequence),
    removed,
  };
}

/** The error of an answer to a query that ended without its footer. */
export function cutAnswer(): SowError {
  return cut("the answer to the query");
}
