/**
 * A live result: the list that a query finds, kept right by the server (rules S10, S11, S13).
 *
 *   [1]  The list is always the result of the query at one position. The changes that lead to the next one are taken in
 *        together, before the first of them is handed out.
 *   [2]  Each call begins with a snapshot. Behind the first one it is told as the differences to the list so far, so the
 *        program that applies all changes has the list, whatever happens to the connection.
 */

import { malformed, type SowError } from "./errors.js";
import {
  type ChangeBatch,
  ChangeOp,
  ChangeReason,
  type SnapshotEnd,
  type SubscribeRequest,
} from "./gen/sow/v1/sow_pb.js";
import type { RecordColumns } from "./gen/sow/v1/types_pb.js";
import { type JsonObject, recordsOf, type StoredRecord } from "./records.js";
import { Following, FollowingCore, type FollowingOptions, type OpenSubscription } from "./subscription.js";

interface ResultChangeParts {
  readonly topic: string;
  /** Of the last of the changes that belong together: the position of the list. */
  readonly bookmark: string | null;
  readonly key: string;
}

/**
 * One change of a list. Those that belong together are applied together: take the records of all of them out of the list,
 * then insert the puts one by one at their positions.
 */
export type ResultChange<T = JsonObject> =
  /** The record is new in the list, or has changed. */
  | (ResultChangeParts & {
      readonly op: "put";
      readonly reason: null;
      readonly record: StoredRecord<T>;
      readonly position: number;
    })
  /**
   * The record has left the list. "window": it still matches, and others have pushed it out. null: it left while the
   * server missed changes or the connection was lost, or it is the result of a group.
   */
  | (ResultChangeParts & {
      readonly op: "oof";
      readonly reason: "deleted" | "expired" | "match" | "not_permitted" | "window" | null;
      /** As it was in the list. */
      readonly previous: StoredRecord<T>;
    });

/** Owns the list, and the snapshot that is to take its place. No I/O, no clock. */
export class ResultCore<T = JsonObject> extends FollowingCore<ResultChange<T>> {
  rows: readonly StoredRecord<T>[] = [];
  absentFields: readonly string[] = [];
  #reached: string | null = null; // the position of the list; null: there was no snapshot yet
  #next: StoredRecord<T>[] = []; // the snapshot that is put together
  #together: Told<T>[] = []; // of an interval that is not complete

  override get bookmark(): string | null {
    return this.#reached;
  }

  override get covers(): boolean {
    return true; // each call begins with a snapshot
  }

  protected override goOn(): void {
    this.snapshot = true; // a bookmark begins no live result
  }

  /** The next call begins with a snapshot ([2]). */
  override ended(error: SowError, how: { nowMs: number; jitter: number; elsewhere?: boolean }): number {
    this.snapshot = this.behind = true;
    return super.ended(error, how);
  }

  protected override beginSnapshot(): void {
    this.stand();
    this.#next = [];
    this.#together = [];
  }

  protected override feedSnapshot(topic: string, records: RecordColumns): void {
    for (const record of recordsOf<T>(topic, records)) {
      this.#next.push(record);
    }
  }

  protected override endSnapshot({ bookmark, absentFields }: SnapshotEnd): void {
    const rows = this.#next;
    const told = this.#reached === null ? [] : differences(this.rows, rows);
    this.absentFields = absentFields;
    this.#next = [];
    this.#become(rows, told, bookmark);
  }

  protected override feedChanges(batch: ChangeBatch): void {
    if (!batch.more && batch.bookmark === "") {
      throw malformed("changes without a bookmark");
    }
    this.#together.push(...placed<T>(batch));
    if (batch.more) {
      return;
    }
    this.backoff.reset();
    const held = new Map(this.rows.map((record) => [record.key, record]));
    const told = this.#together.map((change): Told<T> => {
      return change.op === "put" ? change : { ...change, previous: held.get(change.previous.key) ?? change.previous };
    });
    this.#together = [];
    this.#become(applied(this.rows, told), told, batch.bookmark);
  }

  protected override feedProgress(bookmark: string): void {
    if (this.standing) {
      this.backoff.reset();
    }
    this.stand();
    if (this.#together.length === 0) {
      this.#reached = bookmark;
    }
  }

  #become(rows: readonly StoredRecord<T>[], told: readonly Told<T>[], bookmark: string): void {
    this.rows = rows;
    this.#reached = bookmark;
    this.show(told.map((change, index) => ({ ...change, bookmark: index === told.length - 1 ? bookmark : null })));
  }
}

/** A change without its bookmark, which depends on those that it belongs to. */
type Told<T> = ResultChange<T> extends infer C ? (C extends unknown ? Omit<C, "bookmark"> : never) : never;

const REASONS = {
  [ChangeReason.DELETED]: "deleted",
  [ChangeReason.EXPIRED]: "expired",
  [ChangeReason.MATCH]: "match",
  [ChangeReason.NOT_PERMITTED]: "not_permitted",
  [ChangeReason.WINDOW]: "window",
} as const;

/** The changes of a frame, with their places. */
function placed<T>({ topic, op, reason, position, records }: ChangeBatch): Told<T>[] {
  const all = records === undefined ? [] : recordsOf<T>(topic, records);
  if ([op, position].some(({ length }) => length !== all.length) || ![0, all.length].includes(reason.length)) {
    throw malformed("columns of unequal length");
  }
  return all.map((record, index): Told<T> => {
    const { key } = record;
    switch (op[index]) {
      case ChangeOp.PUT:
        return { op: "put", reason: null, topic, key, record, position: position[index]! };
      case ChangeOp.OOF: {
        const why = REASONS[reason[index] as keyof typeof REASONS] ?? null;
        return { op: "oof", reason: why, topic, key, previous: record };
      }
      default:
        throw malformed(`a change of the unknown kind ${op[index]} in a live result`);
    }
  });
}

/** The list after these changes: they are taken out, then the puts are inserted in their order (rule S11). */
export function applied<T>(rows: readonly StoredRecord<T>[], changes: readonly Told<T>[]): StoredRecord<T>[] {
  const concerned = new Set(changes.map(({ key }) => key));
  const left = rows.filter(({ key }) => !concerned.has(key));
  for (const change of changes) {
    if (change.op === "put") {
      if (change.position > left.length) {
        throw malformed(`a place ${change.position} in a list of ${left.length}`);
      }
      left.splice(change.position, 0, change.record);
    }
  }
  return left;
}

/** The changes that lead from one list to another, in the order of rule S11. */
export function differences<T>(before: readonly StoredRecord<T>[], after: readonly StoredRecord<T>[]): Told<T>[] {
  const old = new Map(before.map((record) => [record.key, record]));
  const kept = new Set(after.map(({ key }) => key));
  const gone = before.filter(({ key }) => !kept.has(key)).map((previous): Told<T> => {
    return { op: "oof", reason: null, topic: previous.topic, key: previous.key, previous };
  });
  let isFresh = after.map((record) => differ(old.get(record.key), record));
  const stay = after.map(({ key }) => key).filter((_, index) => !isFresh[index]);
  const stayed = new Set(stay);
  if (before.filter(({ key }) => stayed.has(key)).some(({ key }, index) => key !== stay[index])) {
    isFresh = after.map(() => true); // by sequences, which another instance numbers in another way
  }
  const puts = after
    .map((record, position): Told<T> => ({ op: "put", reason: null, topic: record.topic, key: record.key, record, position }))
    .filter((_, index) => isFresh[index]);
  return [...gone, ...puts];
}

function differ(old: StoredRecord<unknown> | undefined, { version, origin, payload }: StoredRecord<unknown>): boolean {
  return old?.version !== version || old.origin !== origin || Buffer.compare(old.payload, payload) !== 0;
}

/**
 * The first records of a topic in an order, kept right: `list()` has them, and iterating gives their changes. Used by one
 * reader at a time.
 *
 * The list changes when the next changes are asked for, and only then: it is the result of the query at `bookmark`. When
 * the connection breaks or the server restarts, it calls again, also at another instance, and gives the differences to the
 * new list (rules S10, S11, S13).
 */
export class LiveResult<T = JsonObject> extends Following<ResultChange<T>> {
  readonly #result: ResultCore<T>;

  /** Made by `Client.liveResult`. */
  constructor(request: SubscribeRequest, open: OpenSubscription, options: FollowingOptions) {
    const core = new ResultCore<T>(request, options);
    super(core, open, options);
    this.#result = core;
  }

  protected override get isReady(): boolean {
    return this.#result.bookmark !== null;
  }

  /** The records in their order, as of `bookmark`. */
  list(): StoredRecord<T>[] {
    return [...this.#result.rows];
  }

  /**
   * Fields of the filter and of the order in which no record that was read for the last snapshot has a value: perhaps they
   * are mistyped (rule Q10).
   */
  get absentFields(): readonly string[] {
    return this.#result.absentFields;
  }
}
