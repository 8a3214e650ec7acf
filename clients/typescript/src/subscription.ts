/**
 * Following topics: every change once and in order, however often the connection breaks (rules S1 to S7).
 *
 * `FollowingCore` decides when to call again, and `SubscriptionCore` with it is the whole machine, without I/O and without
 * a clock. `Following` carries frames to it, and makes the calls that it asks for.
 *
 *   [1]  A change is handed out once. A repeated call continues after the position reached. A position inside an atomic
 *        request makes the server send that whole request again; its changes that were handed out before are dropped.
 *   [2]  The position never passes a change that was not handed out. A frame's own bookmark counts once the whole frame
 *        was taken, and Progress once everything before it was.
 *   [3]  A snapshot that cannot continue begins anew. One "resync" tells the program to forget the records so far; there
 *        is none if nothing was handed out. A subscription without a snapshot throws ResyncRequired instead.
 *   [4]  A subscription that is closed, or has thrown why it ended, has no further changes.
 *   [5]  It goes along when its topic moves to another cell (rule C12), and continues at its position. If the other cell
 *        does not know that position, [3] holds.
 */

import { create } from "@bufbuild/protobuf";
import { ELSEWHERE, type Led } from "./cells.js";
import { changesOf, marksOf, prefixOf } from "./changes.js";
import { closed, cut, errorLike, malformed, SowError } from "./errors.js";
import {
  type ChangeBatch,
  type SnapshotEnd,
  type SubscribeRequest,
  SubscribeRequestSchema,
  type SubscribeResponse,
} from "./gen/sow/v1/sow_pb.js";
import type { RecordColumns } from "./gen/sow/v1/types_pb.js";
import { type Change, type JsonObject, recordsOf } from "./records.js";
import { Backoff, CUT_REASONS, streamError } from "./statuses.js";
import { type Frames, RECONNECT_MS } from "./transport.js";

/** The time that a subscription tries to connect again: enough for the restart of a server with much data. */
export const RETRY_FOR_MS = 300_000;

const PASSING_REASONS: ReadonlySet<string> = new Set([...CUT_REASONS, "STOPPING", "OVERLOADED", "ACCESS_CHANGED"]);
const RESYNC_REASONS: ReadonlySet<string> = new Set([
  "RESYNC_REQUIRED",
  "BOOKMARK_TOO_OLD",
  "BOOKMARK_OTHER_EPOCH",
  "BOOKMARK_IN_FUTURE",
]);
/** Losses of an instance: with several addresses the subscription goes on at another one. */
const LOSS_REASONS: ReadonlySet<string> = new Set(["STORE_FAILED", "DISK_FULL"]);

/** Gets the error when an established subscription is interrupted, and null once it is established again. */
export type OnInterruption = (error: SowError | null) => void;

export interface CoreOptions {
  /** How long it tries to repair a broken connection, and how long the first one may take. */
  readonly retryForMs: number;
  readonly connectTimeoutMs: number;
  readonly onInterruption: OnInterruption | undefined;
  /** To the cell of the topic; undefined: there is one place only. */
  readonly way?: Led;
}

/** `elsewhere`: there are other instances to go on at. */
export interface FollowingOptions extends CoreOptions {
  readonly elsewhere: boolean;
}

/** Owns the current frame, and the decision to call again. `C`: the changes that it hands out. */
export abstract class FollowingCore<C> {
  /** The server has confirmed the subscription once. */
  stood = false;
  /** Whether changes from before are still to come, as far as the server has told. */
  behind = true;
  protected readonly asked: SubscribeRequest;
  protected readonly backoff = new Backoff();
  protected standing = false; // the server has confirmed the current call
  protected snapshot: boolean; // a snapshot is wanted, or not complete
  protected interrupted = false; // the program was told so
  protected changes: readonly C[] = []; // of the current frame
  readonly #options: CoreOptions;
  #taken = 0; // of these

  constructor(request: SubscribeRequest, options: CoreOptions) {
    this.asked = request;
    this.#options = options;
    this.snapshot = request.sow;
  }

  /** The position to continue from, after what was handed out; null while there is none. */
  abstract get bookmark(): string | null;
  /** Whether the server has everything that was handed out (rule F9). */
  abstract get covers(): boolean;
  /** The next call continues, or begins with a snapshot. */
  protected abstract goOn(request: SubscribeRequest): void;
  protected abstract feedChanges(batch: ChangeBatch): void;
  protected abstract feedProgress(bookmark: string, covers: boolean): void;
  protected abstract beginSnapshot(bookmark: string): void;
  protected abstract feedSnapshot(topic: string, records: RecordColumns): void;
  protected abstract endSnapshot(end: SnapshotEnd): void;

  // ---- changes ----

  /** The next change of the current frame; undefined: another frame is needed. */
  take(): C | undefined {
    return this.#taken < this.changes.length ? this.changes[this.#taken++] : undefined;
  }

  /** The change that was handed out last of a frame that has more; undefined: none, or all were. */
  protected get last(): C | undefined {
    return this.isTaken ? undefined : this.changes[this.#taken - 1];
  }

  /** The whole current frame was handed out. */
  get isTaken(): boolean {
    return this.#taken === this.changes.length;
  }

  protected show(changes: readonly C[]): void {
    this.changes = changes;
    this.#taken = 0;
  }

  // ---- frames ----

  /** Takes in the next frame of the current call. All changes before it must have been taken. */
  feed({ frame }: SubscribeResponse): void {
    this.settle();
    if (frame.case === "changes" && this.standing && !this.snapshot) {
      this.feedChanges(frame.value);
    } else if (frame.case === "progress" && !this.snapshot) {
      this.feedProgress(frame.value.bookmark, frame.value.covers);
      this.behind = frame.value.behind;
    } else if (frame.case === "snapshotBegin" && this.snapshot && !this.standing) {
      this.beginSnapshot(frame.value.bookmark);
    } else if (frame.case === "snapshot" && this.snapshot && this.standing) {
      const { topic, records } = frame.value;
      if (records !== undefined) {
        this.feedSnapshot(topic, records);
      }
    } else if (frame.case === "snapshotEnd" && this.snapshot && this.standing) {
      this.backoff.reset();
      this.endSnapshot(frame.value);
      this.snapshot = this.behind = false;
    } else if (frame.case !== undefined) {
      throw malformed(`${frame.case} in the wrong place`);
    } // else a kind of frame that a newer server sends
  }

  /** The whole current frame was handed out, and another one follows. */
  protected settle(): void {
    if (!this.isTaken) {
      throw new Error("a frame is asked for when the one before has been handed out");
    }
    this.show([]);
  }

  protected stand(): void {
    if (!this.stood) {
      this.backoff.reset();
    }
    this.standing = this.stood = true;
    this.#options.way?.arrived();
    if (this.interrupted) {
      this.interrupted = false;
      this.tell(null);
    }
  }

  protected tell(interruption: SowError | null): void {
    this.#options.onInterruption?.(interruption);
  }

  // ---- calls ----

  /** The request of the next call: everything after the position. `nowMs` as for `ended`. */
  request(nowMs: number): SubscribeRequest {
    this.settle();
    if (!this.stood) {
      this.backoff.begin(nowMs); // the wait for a first connection counts
    }
    this.standing = false;
    this.behind = true;
    const { $typeName, $unknown, ...fields } = this.asked;
    const request = create(SubscribeRequestSchema, fields);
    this.goOn(request);
    return request;
  }

  /**
   * Milliseconds to wait before the next call, after one that ended with `error`; throws if no call is to follow. `nowMs`
   * is a monotonic clock, `jitter` a random number in [0, 1). `elsewhere`: there are other instances to go on at.
   */
  ended(given: SowError, { nowMs, jitter, elsewhere = false }: { nowMs: number; jitter: number; elsewhere?: boolean }): number {
    const { way } = this.#options;
    const isLed = way?.leads(given) ?? false;
    const error = isLed ? given : way?.told(given) ?? given;
    const { reason } = error;
    const differs = reason === ELSEWHERE && way?.differs === true;
    if (differs && !isLed) {
      way.beginAgain(); // as two cells contradict each other
    }
    // After a change of permissions, rows that it holds may be hidden: only a new snapshot tells which.
    if (this.asked.sow && (RESYNC_REASONS.has(reason) || reason === "ACCESS_CHANGED")) {
      this.snapshot = true;
    } else if (
      !(isLed || differs || PASSING_REASONS.has(reason)) &&
      !(elsewhere && LOSS_REASONS.has(reason)) &&
      !this.leavesMarks(reason)
    ) {
      throw this.failure(error);
    }
    const { retryForMs, connectTimeoutMs } = this.#options;
    const limitMs = this.lasts ? retryForMs : Math.min(connectTimeoutMs, retryForMs);
    const delay = isLed ? 0 : this.backoff.delay(error, { nowMs, jitter, limitMs });
    if (delay === undefined) {
      throw this.failure(error);
    }
    if (this.lasts && !this.interrupted) {
      this.interrupted = true;
      this.tell(error);
    }
    return delay;
  }

  /** It is tried for `retryForMs`, and the program is told meanwhile. Else its begin fails. */
  protected get lasts(): boolean {
    return this.stood;
  }

  /** True when the call can be made again without the marks of its bookmark. */
  protected leavesMarks(_reason: string): boolean {
    return false;
  }

  /** The error as the program gets it: with the position reached. */
  protected failure(error: SowError): SowError {
    const { bookmark } = this;
    return bookmark === null ? error : errorLike(error, error.text, { bookmark });
  }
}

/** Owns the position of a subscription. */
export class SubscriptionCore<T = JsonObject> extends FollowingCore<Change<T>> {
  #shown = false; // something was handed out that a resync would have to take back
  protected position: string; // everything up to here was handed out; "": no position yet
  protected marks: string; // these end every bookmark until others come
  protected prefix: string; // epoch and dot: of these, bookmarks of single changes are made
  #covers = false;
  protected sequence = 0n; // of the last change of the current frame
  protected repeated = 0n; // changes up to this sequence are repeated ([1]); 0: none
  protected after = ""; // the position once all of them were handed out; "": unchanged

  constructor(request: SubscribeRequest, options: CoreOptions) {
    super(request, options);
    const start = request.start.case === "bookmark" ? request.start.value : "";
    this.position = start;
    this.marks = marksOf(start);
    this.prefix = prefixOf(start);
  }

  override get bookmark(): string | null {
    return this.isTaken ? this.after || this.position || null : this.last?.bookmark ?? (this.position || null);
  }

  override get covers(): boolean {
    return this.#covers || !this.marks.includes(";h=");
  }

  /** Its end is the position now ([2]). */
  protected override settle(): void {
    super.settle();
    this.position = this.after || this.position;
    this.after = "";
  }

  protected override show(changes: readonly Change<T>[]): void {
    super.show(changes);
    this.#shown ||= changes.length > 0;
  }

  protected override feedSnapshot(topic: string, records: RecordColumns): void {
    const changes = recordsOf<T>(topic, records).map((record): Change<T> => {
      return { op: "sow", reason: null, topic, bookmark: null, key: record.key, record };
    });
    this.show(changes);
  }

  protected override feedProgress(bookmark: string, covers: boolean): void {
    if (this.standing) {
      this.backoff.reset(); // it has stood a while; the first one may come from a call that breaks right after it
    }
    this.stand();
    const prefix = prefixOf(bookmark);
    if (prefix !== this.prefix) {
      this.sequence = this.repeated = 0n; // another instance has sequences of its own (rule F7)
    }
    this.after = bookmark;
    this.prefix = prefix;
    this.marks = marksOf(bookmark);
    this.#covers = covers;
  }

  protected override beginSnapshot(bookmark: string): void {
    this.stand();
    const resync: Change<T>[] = this.#shown
      ? [{ op: "resync", reason: null, topic: this.asked.topic, bookmark: null }]
      : [];
    this.position = this.marks = "";
    this.prefix = prefixOf(bookmark);
    this.sequence = this.repeated = 0n;
    this.show(resync);
    this.#shown = false;
  }

  protected override endSnapshot({ bookmark, absentFields }: SnapshotEnd): void {
    this.show([{ op: "snapshot_end", reason: null, topic: this.asked.topic, bookmark, absentFields }]);
    this.after = bookmark;
    this.marks = marksOf(bookmark);
  }

  protected override feedChanges(batch: ChangeBatch): void {
    if (!batch.more && batch.bookmark === "") {
      throw malformed("changes without a bookmark");
    }
    const sequences = batch.records?.sequence ?? [];
    const last = sequences.at(-1);
    if (last !== undefined && last <= this.repeated) {
      return; // all of its changes were handed out before the call broke
    }
    let changes = changesOf<T>(batch, this.prefix, this.marks);
    if (this.repeated !== 0n) {
      changes = changes.filter((_, index) => sequences[index]! > this.repeated);
    }
    if (changes.length > 0) {
      this.backoff.reset();
      this.sequence = last!;
    }
    this.show(changes);
    if (!batch.more) {
      this.after = batch.bookmark + this.marks;
      if (sequences.length > 0) {
        this.repeated = 0n;
      }
    }
  }

  protected override goOn(request: SubscribeRequest): void {
    if (!this.snapshot && this.position !== "") {
      this.repeated = this.sequence;
      request.sow = false;
      request.start = { case: "bookmark", value: this.position };
    }
  }

  /** True when the call can be made again without the marks of its bookmark: an older server knows none (rule F6). */
  protected override leavesMarks(reason: string): boolean {
    const plain = this.position.split(";", 1)[0]!;
    if (reason !== "BOOKMARK_MALFORMED" || plain === this.position || this.position.includes(";h=")) {
      return false;
    }
    this.position = plain;
    return true;
  }
}

/** Makes the call of a subscription; `withinMs` bounds the wait for a connection. */
export type OpenSubscription = (request: SubscribeRequest, withinMs: number) => Promise<Frames<SubscribeResponse>>;

/** An async iterator, used by one reader at a time. */
export abstract class Reader<C> implements AsyncIterableIterator<C, undefined> {
  protected isClosed = false;

  /** The next one that is at hand. */
  protected abstract take(): C | undefined;
  /** Waits for more. */
  protected abstract advance(): Promise<void>;

  /** Ends it; a reader that waits for the next change finds the iteration ended. */
  close(): void {
    this.isClosed = true;
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async next(): Promise<IteratorResult<C, undefined>> {
    while (!this.isClosed) {
      const change = this.take();
      if (change !== undefined) {
        return { done: false, value: change };
      }
      await this.advance();
    }
    return { done: true, value: undefined };
  }

  /** The end of a loop. */
  async return(): Promise<IteratorResult<C, undefined>> {
    this.close();
    return { done: true, value: undefined };
  }
}

/** An async iterator over what a core hands out, used by one reader at a time. */
export abstract class Following<C> extends Reader<C> {
  readonly #core: FollowingCore<C>;
  readonly #open: OpenSubscription;
  readonly #options: FollowingOptions;
  #call: Frames<SubscribeResponse> | undefined;
  #isStale = false; // the call that is being made
  #againAt = 0; // when the next call may be made
  #wake: (() => void) | undefined; // ends the wait for it

  constructor(core: FollowingCore<C>, open: OpenSubscription, options: FollowingOptions) {
    super();
    this.#core = core;
    this.#open = open;
    this.#options = options;
  }

  /** Resolves once it is established: no change from now on is missed. The client has called it already. */
  async opened(): Promise<this> {
    while (!this.isReady) {
      if (this.isClosed) {
        throw closed("subscription");
      }
      await this.advance();
    }
    return this;
  }

  /** What `opened` waits for. */
  protected get isReady(): boolean {
    return this.#core.stood;
  }

  /**
   * Where another subscription may start to go on after the last change handed out, or after the quiet time since then;
   * null while there is no such place: before the first frame and inside a snapshot.
   */
  get bookmark(): string | null {
    return this.#core.bookmark;
  }

  /**
   * false: the subscription has come from another instance, and this one may lack changes that were handed out there
   * (rule F9).
   */
  get covers(): boolean {
    return this.#core.covers;
  }

  /**
   * false: the subscription has caught up, and the server sends each change as it happens. true: the snapshot is not
   * complete, the server still reads older changes in its journal, or the connection is interrupted (rule S5).
   */
  get behind(): boolean {
    return this.#core.behind;
  }

  override close(): void {
    super.close();
    this.#drop();
    this.#wake?.();
  }

  protected override take(): C | undefined {
    return this.#core.take();
  }

  /** Takes in the next frame, or prepares for the next call. */
  protected override async advance(): Promise<void> {
    await this.#rest(this.#againAt - performance.now());
    if (this.isClosed) {
      return;
    }
    try {
      const call = (this.#call ??= await this.#begin());
      const { done, value } = await call.next();
      if (done) {
        throw cut("the subscription");
      }
      if (!this.isClosed) {
        this.#core.feed(value);
      }
    } catch (error) {
      this.#drop();
      if (!this.isClosed) {
        this.#againAt = performance.now() + this.#delayAfter(streamError(error, "the subscription"));
      }
    }
  }

  /** Ends the present call. The next one follows, for what is wanted by then. */
  protected callAgain(): void {
    this.#isStale = true;
    this.#call?.cancel();
  }

  #delayAfter(error: SowError): number {
    try {
      const { elsewhere } = this.#options;
      return this.#core.ended(error, { nowMs: performance.now(), jitter: Math.random(), elsewhere });
    } catch (failure) {
      this.isClosed = true;
      throw failure;
    }
  }

  async #begin(): Promise<Frames<SubscribeResponse>> {
    const withinMs = this.#core.stood ? RECONNECT_MS : this.#options.connectTimeoutMs;
    this.#isStale = false;
    const call = await this.#open(this.#core.request(performance.now()), withinMs);
    const end = (): void => call.cancel();
    call.line.followers.add(end);
    const cancel = (): void => {
      call.line.followers.delete(end);
      call.cancel();
    };
    if (this.isClosed || this.#isStale) {
      cancel(); // `close` or `callAgain` came before the call was known
    }
    return { ...call, cancel };
  }

  #drop(): void {
    this.#call?.cancel();
    this.#call = undefined;
  }

  async #rest(ms: number): Promise<void> {
    if (ms <= 0 || this.isClosed) {
      return;
    }
    await new Promise<void>((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
    this.#wake = undefined;
  }
}

/**
 * The changes of a topic as they come: an async iterator without an end, used by one reader at a time.
 *
 * When the connection breaks or the server restarts, it calls again and continues at its position: each change comes once,
 * and none is missing. Leaving a `for await` loop closes it, and so does `close` from anywhere; the iteration ends then.
 */
export class Subscription<T = JsonObject> extends Following<Change<T>> {
  /** The cells that a subscription to a pattern follows (see `JoinedSubscription`): none. */
  readonly cells: ReadonlyMap<string, SowError | null> = new Map();

  /** Made by `Client.subscribe` and `Client.sowAndSubscribe`. */
  constructor(request: SubscribeRequest, open: OpenSubscription, options: FollowingOptions) {
    super(new SubscriptionCore<T>(request, options), open, options);
  }
}
