/**
 * The publisher: buffered, pipelined, ordered, and safe to cut (rules P6, P7).
 *
 * `PublishCore` is the whole machine, without I/O and without a clock. `Publisher` only carries its requests to the server
 * and the answers back.
 *
 *   [1]  Requests are sent, acknowledged and sent again in the order of their sequences, which have no gaps.
 *   [2]  A record is counted exactly once, as applied, duplicate or refused, by the answer that settles it.
 *   [3]  At most `maxInFlight` requests are sealed and not acknowledged. Their payloads exceed 16 MiB by at most one
 *        request.
 *   [4]  A refusal for a passing reason settles the records before it. The refused record and the rest are sent again
 *        unchanged.
 *   [5]  A publisher that has failed stays failed: every later call throws the same error.
 *   [6]  A topic that lives in another cell, or moves there, takes the publisher along (rule C13). The cell that says so
 *        has answered all requests before, and has applied nothing of this one. In the other cell the unsettled records
 *        begin an epoch.
 */

import { create } from "@bufbuild/protobuf";
import { ELSEWHERE, type Led } from "./cells.js";
import { type LifetimeColumn, lifetimeColumn, type Moment, type Ttl } from "./durations.js";
import {
  closed,
  cut,
  errorLike,
  errorOfReason,
  errorOfRefusal,
  invalid,
  malformed,
  PublishFailed,
  type Refusal,
  SowError,
} from "./errors.js";
import {
  type PublishStreamRequest,
  PublishStreamRequestSchema,
  type PublishStreamResponse,
} from "./gen/sow/v1/sow_pb.js";
import { LifetimeKind } from "./gen/sow/v1/types_pb.js";
import { type Key, recordKey } from "./keys.js";
import { type Document, encode, encodedAs, JSON_FORM, needsForm, type PayloadForm } from "./payloads.js";
import { randomToken } from "./positions.js";
import { bookmarkOf, type DurabilityName, durabilityName, refusalOf } from "./records.js";
import { LOSSES } from "./search.js";
import { Backoff, CUT_REASONS, streamError } from "./statuses.js";
import { type Duplex } from "./transport.js";

const BATCH_BYTES = 4 * 1024 * 1024; // a request is sealed before its payloads exceed this
const IN_FLIGHT_BYTES_MAX = 16 * 1024 * 1024;
const PAYLOAD_BYTES_MAX = 16 * 1024 * 1024;
const KEY_BYTES_MAX = 512 * 1024; // no server takes a longer key
const RECORDS_PER_REQUEST_MAX = 10_000;
const REFUSALS_KEPT_MAX = 10_000;
const END_MS = 1_000; // the time that a closing publisher gives the server to end the stream in order

/** Reasons that pass by themselves: unacknowledged records are sent again. */
const RETRIED_REASONS: ReadonlySet<string> = new Set([
  "STREAM_BROKEN",
  "OVERLOADED",
  "WRITE_STALLED",
  "STOPPING",
  "BACKLOG_QUOTA_EXCEEDED",
  "ACCESS_CHANGED",
  "LIMIT_EXCEEDED",
]);
/** Reasons that concern the whole stream and do not pass by themselves. */
const FATAL_REASONS: ReadonlySet<string> = new Set(["DISK_FULL", "STORE_FAILED", "PUBLISHER_FENCED"]);

/** The records that one answer of the server settled. */
export interface Ack {
  readonly applied: number;
  /** Records that an earlier attempt had applied, before a reconnect. */
  readonly duplicates: number;
  readonly refusals: readonly Refusal[];
  /** Version of the last applied record; 0 when none was. */
  readonly lastVersion: bigint;
  /** Journal sequence of the last applied record; 0 when none was. */
  readonly lastSequence: bigint;
  /** The durability reached. */
  readonly durability: DurabilityName | null;
  /** The `start` of a subscription to the changes after these records; null: not known. */
  readonly bookmark: string | null;
  /** Applied records whose lifetime has no effect, because the topic has expiration disabled (rule L3). */
  readonly ttlsIgnored: number;
  /** Removals among the applied records that have deleted a record (rule P11). */
  readonly removed: number;
}

/** How a publisher works. */
export interface CoreOptions {
  readonly batchRecords: number;
  readonly maxInFlight: number;
  readonly retryForMs: number;
  readonly connectTimeoutMs: number;
  /** There are other instances to go on at. */
  readonly elsewhere: boolean;
}

/** Epoch and token of a publisher (rules P6, F11). */
export interface Epoch {
  readonly publisherEpoch: bigint;
  readonly publisherToken: bigint;
}

interface Row {
  readonly payload: Uint8Array;
  /** The form that it was encoded for; none: it is bytes or text of the program's own. */
  readonly encodedAs?: string;
  readonly key: string | undefined;
  readonly lifetime: LifetimeColumn | undefined;
  /** The record of the key, or of the document, is removed (rule P11). */
  readonly removes?: boolean;
}

interface Sealed {
  readonly request: PublishStreamRequest;
  /** Position of its first record among all. */
  firstIndex: number;
  records: number;
  bytes: number;
}

/** Owns the buffer, the sealed requests, the counters and the decision to try again. */
export class PublishCore {
  applied = 0;
  duplicates = 0;
  refused = 0;
  /** There are removals among the records, so only a server that knows them may get the stream. */
  removes = false;
  /** The server of the present stream knows removals. */
  knowsRemovals = false;
  /** The present stream cannot take the next request: another one has to be opened for it. */
  mustReopen = false;
  /** An epoch of the publisher's id has to be begun before the next stream. */
  wantsEpoch: boolean;
  readonly #defaults: PublishStreamRequest;
  readonly #options: CoreOptions;
  readonly #publisherId: string;
  readonly #way: Led | undefined;
  readonly #opens: boolean; // the id is the program's, and the server begins its epochs
  #epoch: Epoch;
  readonly #pending: Row[] = [];
  #pendingBytes = 0;
  #next = 0; // position of the first record that is not sealed
  #before = 0; // records that were settled in other cells
  #queued: Sealed[] = [];
  #sent: Sealed[] = [];
  #sealedBytes = 0;
  #refusals: Refusal[] = [];
  #refusedReported = 0;
  readonly #backoff = new Backoff();

  /**
   * `defaults` has the fields that all requests share. `epoch`: undefined where the server begins those of the id. `way`: to
   * the cell of the topic; undefined: there is one place only.
   */
  constructor(
    defaults: PublishStreamRequest,
    options: CoreOptions,
    publisherId: string,
    epoch: Epoch | undefined,
    way?: Led,
  ) {
    for (const [name, value, most] of [
      ["batchRecords", options.batchRecords, RECORDS_PER_REQUEST_MAX],
      ["maxInFlight", options.maxInFlight, Number.MAX_SAFE_INTEGER],
    ] as const) {
      if (!(Number.isSafeInteger(value) && value >= 1 && value <= most)) {
        throw invalid(name, `${value} is not 1 to ${most}`);
      }
    }
    this.#defaults = defaults;
    this.#options = options;
    this.#publisherId = publisherId;
    this.#opens = this.wantsEpoch = epoch === undefined;
    this.#epoch = epoch ?? NO_EPOCH;
    this.#way = way;
  }

  // ---- the buffer ----

  append(row: Row): void {
    if (row.payload.length > PAYLOAD_BYTES_MAX) {
      const fault = `the payload of ${row.payload.length} bytes is larger than a request (${PAYLOAD_BYTES_MAX} bytes)`;
      throw invalid("data", fault, "PAYLOAD_TOO_LARGE");
    }
    if (row.key !== undefined && row.key.length > KEY_BYTES_MAX) {
      throw invalid("key", `${row.key.length} characters are larger than a request (${KEY_BYTES_MAX})`, "KEY_TOO_LARGE");
    }
    this.#pending.push(row);
    this.#pendingBytes += bytesOf(row);
  }

  /** Records that are not yet in a request. */
  get pending(): number {
    return this.#pending.length;
  }

  /** As many records wait as a request may have. */
  get isFull(): boolean {
    return this.#pending.length >= this.#options.batchRecords || this.#pendingBytes >= BATCH_BYTES;
  }

  /** Another request may be sealed ([3]). */
  get hasRoom(): boolean {
    const inFlight = this.#queued.length + this.#sent.length;
    return inFlight < this.#options.maxInFlight && this.#sealedBytes < IN_FLIGHT_BYTES_MAX;
  }

  /** Turns the oldest pending records into the next request, as many as one request may have. */
  seal(): void {
    const [first] = this.#pending;
    if (first === undefined) {
      return;
    }
    let count = 0;
    let bytes = 0;
    let encodedAs = "";
    let removes = false;
    for (const row of this.#pending) {
      if (encodedAs && row.encodedAs && row.encodedAs !== encodedAs) {
        break; // the topic was made anew meanwhile
      }
      removes ||= row.removes === true;
      // All with a key, or all without. A removal may have one where the others have none.
      const alike = removes || (row.key === undefined) === (first.key === undefined);
      if (count === this.#options.batchRecords || !alike || (count > 0 && bytes + bytesOf(row) > BATCH_BYTES)) {
        break;
      }
      encodedAs ||= row.encodedAs ?? "";
      count += 1;
      bytes += bytesOf(row);
    }
    const rows = this.#pending.splice(0, count);
    this.#pendingBytes -= bytes;
    removes = rows.some((row) => row.removes === true);
    this.removes ||= removes;
    const hasKeys = removes ? rows.some((row) => row.key !== undefined) : first.key !== undefined;
    const lifetimes = rows.some((row) => row.lifetime !== undefined) ? rows.map((row) => row.lifetime ?? ABSENT) : [];
    const { $typeName, $unknown, ...defaults } = this.#defaults;
    const request = create(PublishStreamRequestSchema, {
      ...defaults,
      encodedAs,
      payload: rows.map((row) => row.payload),
      key: hasKeys ? rows.map((row) => row.key ?? "") : [],
      remove: removes ? rows.map((row) => row.removes === true) : [],
      lifetimeKind: lifetimes.map((lifetime) => lifetime.kind),
      lifetimeMicros: lifetimes.map((lifetime) => lifetime.micros),
      publisher: { publisherId: this.#publisherId, firstSequence: BigInt(this.#next - this.#before + 1) },
    });
    this.#queued.push({ request, firstIndex: this.#next, records: count, bytes });
    this.#next += count;
    this.#sealedBytes += bytes;
  }

  /** The epoch of the publisher is known. */
  opened(epoch: Epoch): void {
    this.#epoch = epoch;
    this.wantsEpoch = false;
  }

  // ---- the stream ----

  /** The next request to write to the current stream; it counts as sent from now on. */
  nextRequest(): PublishStreamRequest | undefined {
    const [sealed] = this.#queued;
    if (sealed === undefined) {
      return undefined;
    }
    if (sealed.request.remove.length > 0 && !this.knowsRemovals) {
      this.mustReopen = true;
      return undefined;
    }
    this.#queued.shift();
    this.#sent.push(sealed);
    Object.assign(sealed.request.publisher!, this.#epoch);
    return sealed.request;
  }

  /**
   * Settles the oldest sent request, or its part before a refusal that ended it ([2], [4]). The error, if there is one,
   * says why the stream can no longer be used; `retryDelay` judges it.
   */
  acknowledge(response: PublishStreamResponse): { ack: Ack; error?: SowError } {
    const [sealed] = this.#sent;
    if (sealed === undefined) {
      throw malformed("an answer to no request");
    }
    let error: SowError | undefined;
    let settled = sealed.records;
    const refusals: Refusal[] = [];
    for (const message of response.refusals) {
      const refusal = refusalOf(message, sealed.firstIndex + message.index);
      if (refusal.reason === ELSEWHERE) {
        settled = message.index;
        error = errorOfReason(refusal.message, { reason: ELSEWHERE, details: message.details });
        break;
      }
      if (RETRIED_REASONS.has(refusal.reason) || FATAL_REASONS.has(refusal.reason)) {
        settled = message.index;
        error = errorOfRefusal(refusal);
        break;
      }
      refusals.push(refusal);
    }
    const { applied, duplicates, lastVersion, lastSequence, lastDuplicateSequence, journalEpoch } = response;
    const { ttlsIgnored, removed } = response;
    if (applied + duplicates + refusals.length !== settled || settled > sealed.records) {
      throw malformed(`an answer for ${applied + duplicates + refusals.length} of ${settled} records`);
    }
    if (error === undefined) {
      this.#sent.shift();
      this.#sealedBytes -= sealed.bytes;
    } else if (settled > 0) {
      this.#trim(sealed, settled);
    }
    this.applied += applied;
    this.duplicates += duplicates;
    this.refused += refusals.length;
    this.#refusals.push(...refusals.slice(0, REFUSALS_KEPT_MAX - this.#refusals.length));
    if (settled > 0) {
      this.#backoff.reset();
      this.#way?.arrived();
    }
    const last = lastSequence > lastDuplicateSequence ? lastSequence : lastDuplicateSequence;
    const bookmark = bookmarkOf(journalEpoch, last);
    const durability = durabilityName(response.durability);
    const ack = { applied, duplicates, refusals, lastVersion, lastSequence, durability, bookmark, ttlsIgnored, removed };
    return error === undefined ? { ack } : { ack, error };
  }

  /** Takes the settled records off the front of a request. */
  #trim(sealed: Sealed, settled: number): void {
    const { request } = sealed;
    const bytes = request.payload
      .slice(0, settled)
      .reduce((sum, payload, index) => sum + bytesOf({ payload, key: request.key[index], lifetime: undefined }), 0);
    for (const column of [request.payload, request.key, request.lifetimeKind, request.lifetimeMicros, request.remove]) {
      column.splice(0, settled);
    }
    request.publisher!.firstSequence += BigInt(settled);
    sealed.firstIndex += settled;
    sealed.records -= settled;
    sealed.bytes -= bytes;
    this.#sealedBytes -= bytes;
  }

  /** The stream is gone: its unacknowledged requests are queued again, in order ([1]). */
  rewind(): void {
    this.#queued = [...this.#sent, ...this.#queued];
    this.#sent = [];
  }

  /** Some requests are sealed and not yet acknowledged. */
  get hasRequests(): boolean {
    return this.#queued.length > 0 || this.#sent.length > 0;
  }

  /** Records settled by the server: applied, duplicate or refused. */
  get acknowledged(): number {
    return this.applied + this.duplicates + this.refused;
  }

  /** Records that were handed over and are not yet settled, including buffered ones. */
  get unacknowledged(): number {
    return this.#next + this.#pending.length - this.acknowledged;
  }

  // ---- failures ----

  /**
   * Milliseconds to wait before the stream is opened again; throws when the time to retry is over. `nowMs` is a monotonic
   * clock, `jitter` a random number in [0, 1). The time to retry begins with the first failure since the last record was
   * settled. It is `retryForMs`, or `connectTimeoutMs` while the server was never reached.
   */
  retryDelay(error: SowError, when: { nowMs: number; jitter: number }): number {
    if (this.mustReopen) {
      this.mustReopen = false;
      return 0;
    }
    const way = this.#way;
    if (way === undefined) {
      return this.#delay(error, false, { ...when, backoff: this.#backoff });
    }
    let differs = false;
    if (error.reason === ELSEWHERE) {
      this.#beginAnew();
      if (way.leads(error)) {
        return 0;
      }
      differs = way.differs;
    }
    const told = way.told(error);
    if (differs) {
      way.beginAgain();
    }
    return this.#delay(told, differs, { ...when, backoff: this.#backoff });
  }

  /** As `retryDelay`, after a question that belongs to no stream, in the cell of the topic. `backoff`: of the question. */
  askingDelay(error: SowError, when: { nowMs: number; jitter: number; backoff: Backoff }): number {
    return this.#delay(error, "denied_by" in error.details, when); // two cells contradict each other (rule C13)
  }

  #delay(
    error: SowError,
    passes: boolean,
    { nowMs, jitter, backoff }: { nowMs: number; jitter: number; backoff: Backoff },
  ): number {
    const { reason } = error;
    const { retryForMs, connectTimeoutMs, elsewhere } = this.#options;
    if (!(passes || RETRIED_REASONS.has(reason) || CUT_REASONS.has(reason) || (elsewhere && LOSSES.has(reason)))) {
      throw this.failure(error);
    }
    const neverReached = reason === "UNREACHABLE" && this.acknowledged === 0;
    const limitMs = neverReached ? Math.min(connectTimeoutMs, retryForMs) : retryForMs;
    const delay = backoff.delay(error, { nowMs, jitter, limitMs });
    if (delay === undefined) {
      throw this.failure(error);
    }
    return delay;
  }

  /**
   * Begins an epoch of which the unsettled records are the first: the cell that has refused them takes them for decided (rule
   * P4), and it may become theirs again ([6]).
   */
  #beginAnew(): void {
    if (this.#opens) {
      this.wantsEpoch = true;
    } else {
      this.#epoch = { publisherEpoch: this.#epoch.publisherEpoch + 1n, publisherToken: randomToken() };
    }
    this.#before = this.acknowledged;
    for (const { request, firstIndex } of this.#queued) {
      request.publisher!.firstSequence = BigInt(firstIndex - this.#before + 1);
    }
  }

  /** The error as the program gets it, with the numbers of acknowledged and unacknowledged records. */
  failure(error: SowError): SowError {
    const { acknowledged, unacknowledged, refused } = this;
    const text = `${error.text}; ${acknowledged} records were acknowledged, ${unacknowledged} were not`;
    return errorLike(error, text, {
      acknowledged: String(acknowledged),
      unacknowledged: String(unacknowledged),
      refused: String(refused),
    });
  }

  /** The error for the refusals since the last call, if there were any. */
  takeRefusals(): PublishFailed | undefined {
    const [first, ...others] = this.#refusals;
    if (first === undefined) {
      return undefined;
    }
    const failed = new PublishFailed([first, ...others], this.refused - this.#refusedReported);
    this.#refusedReported = this.refused;
    this.#refusals = [];
    return failed;
  }
}

const NO_EPOCH: Epoch = { publisherEpoch: 0n, publisherToken: 0n };
const ABSENT: LifetimeColumn = { kind: LifetimeKind.UNSPECIFIED, micros: 0n };

/** The bytes of a record in a request. A character of a key is at most three bytes for each unit of its text. */
function bytesOf({ payload, key }: Row): number {
  return payload.length + 3 * (key?.length ?? 0);
}

/** Opens the stream of a publisher; `removes`: to a server that knows removals. */
export type OpenStream = (removes: boolean) => Promise<Duplex<PublishStreamRequest, PublishStreamResponse>>;

export interface PublisherHooks {
  /** Milliseconds that a record may wait for others to share its request. */
  readonly lingerMs: number;
  /** Asks for the form of the topic's payloads; `isOld`: what the client remembers does not count. undefined: JSON. */
  readonly form?: ((isOld: boolean) => Promise<PayloadForm>) | undefined;
  /** Begins an epoch of the publisher's id, where the core wants one. */
  readonly nextEpoch?: (() => Promise<Epoch>) | undefined;
  readonly onAck?: ((ack: Ack) => void) | undefined;
  readonly onRefusal?: ((refusal: Refusal) => void) | undefined;
}

const ANSWERS = "the answers to the publisher";

/**
 * A buffered, pipelined, ordered stream of publishes. Made by `Client.publisher`.
 *
 * `publish` resolves when the record is taken, `flush` when all records so far are settled. Without `onRefusal`, `flush`
 * and `close` throw PublishFailed for the records that were refused. After a break it connects again, and the server
 * applies each record once.
 */
export class Publisher {
  readonly #core: PublishCore;
  readonly #openStream: OpenStream;
  readonly #hooks: PublisherHooks;
  #linger: NodeJS.Timeout | undefined;
  #running = false;
  #closing = false;
  #failure: unknown;
  #call: Duplex<PublishStreamRequest, PublishStreamResponse> | undefined;
  #wake: (() => void)[] = []; // of all who wait for progress
  #form: PayloadForm | undefined; // of the topic's payloads; undefined: it is to be asked for
  #formIsOld = false; // the topic may have been made anew, with another type
  #entering: Promise<void> | undefined; // the last record that waits for the form, or for a record before it

  constructor(core: PublishCore, openStream: OpenStream, hooks: PublisherHooks) {
    this.#core = core;
    this.#openStream = openStream;
    this.#hooks = hooks;
    this.#form = hooks.form === undefined ? JSON_FORM : undefined;
  }

  /** Records that were applied so far. */
  get applied(): number {
    return this.#core.applied;
  }

  /** Records that an earlier attempt had applied. */
  get duplicates(): number {
    return this.#core.duplicates;
  }

  /** Records that were refused so far. */
  get refused(): number {
    return this.#core.refused;
  }

  /** Takes one record; `ttl` or `expireAt` overrides the publisher's own. Await it: it waits while too many are under way. */
  async publish(data: Document, { key, ttl, expireAt }: { key?: Key; ttl?: Ttl; expireAt?: Moment } = {}): Promise<void> {
    this.#check();
    await this.#take(data, {
      key: key === undefined ? undefined : recordKey(key),
      lifetime: lifetimeColumn(ttl, expireAt),
    });
  }

  /**
   * Takes a removal: the live record of `key`, or of the key fields of `data`, is deleted, in its place among the records
   * (rule P11). Without a live record it changes nothing. Sent again after a break, it never removes a later record.
   */
  async remove(key: Key | undefined, { data }: { data?: Document } = {}): Promise<void> {
    this.#check();
    if ((key === undefined) === (data === undefined)) {
      throw invalid("key", "give a key, or data that has the key fields: exactly one of both");
    }
    await this.#take(data ?? new Uint8Array(), {
      key: key === undefined ? undefined : recordKey(key),
      lifetime: undefined,
      removes: true,
    });
  }

  async #take(data: Document, row: Omit<Row, "payload" | "encodedAs">): Promise<void> {
    const before = this.#entering;
    if (before === undefined && (this.#form !== undefined || !needsForm(data))) {
      const form = this.#form ?? JSON_FORM;
      this.#core.append({ ...row, payload: encode(data, form), encodedAs: encodedAs(data, form) });
    } else {
      // In the order of the calls: a text, which needs no form, must not overtake an object.
      const entered = this.#enter(before, async () => {
        const form = needsForm(data) ? await this.#knownForm() : JSON_FORM;
        this.#check();
        this.#core.append({ ...row, payload: encode(data, form), encodedAs: encodedAs(data, form) });
      });
      this.#entering = entered;
      try {
        await entered;
      } finally {
        this.#entering = this.#entering === entered ? undefined : this.#entering;
      }
    }
    if (this.#core.isFull) {
      await this.#sealAll();
    } else {
      this.#linger ??= setTimeout(() => {
        this.#linger = undefined;
        this.#sealAll().catch(() => undefined); // the next call throws it
      }, this.#hooks.lingerMs);
    }
  }

  /** Resolves once all records so far are settled. Throws PublishFailed for refusals since the last flush. */
  async flush(): Promise<void> {
    this.#check();
    await this.#entering?.catch(() => undefined); // its own caller gets the error
    await this.#sealAll();
    while (this.#core.unacknowledged > 0) {
      await this.#progress();
    }
    const failed = this.#core.takeRefusals();
    if (failed !== undefined && this.#hooks.onRefusal === undefined) {
      throw failed;
    }
  }

  /** Flushes and ends the stream. Throws as `flush` does. */
  async close(): Promise<void> {
    try {
      if (!this.#closing) {
        await this.flush();
      }
    } finally {
      this.abort();
    }
  }

  /** Ends the stream at once. Unacknowledged records may or may not have been applied. */
  abort(): void {
    this.#closing = true;
    clearTimeout(this.#linger);
    const call = this.#call;
    if (call !== undefined && this.#core.unacknowledged === 0) {
      call.end();
      setTimeout(() => call.cancel(), END_MS).unref();
    } else {
      call?.cancel();
    }
    this.#wakeAll();
  }

  #check(): void {
    if (this.#failure !== undefined) {
      throw this.#failure;
    }
    if (this.#closing) {
      throw closed("publisher");
    }
  }

  async #enter(before: Promise<void> | undefined, append: () => Promise<void>): Promise<void> {
    await before?.catch(() => undefined);
    await append();
  }

  /** The form of the topic's payloads. Where the server is not there, it waits as long as for a stream. */
  async #knownForm(): Promise<PayloadForm> {
    const backoff = new Backoff();
    while (this.#form === undefined) {
      const isOld = this.#formIsOld;
      this.#formIsOld = false;
      backoff.begin(performance.now());
      try {
        this.#form = await this.#hooks.form!(isOld);
      } catch (error) {
        if (!(error instanceof SowError)) {
          throw error;
        }
        await this.#woken(this.#core.askingDelay(error, { nowMs: performance.now(), jitter: Math.random(), backoff }));
        this.#check();
      }
    }
    return this.#form;
  }

  async #sealAll(): Promise<void> {
    clearTimeout(this.#linger);
    this.#linger = undefined;
    while (this.#core.pending > 0) {
      if (this.#core.hasRoom) {
        this.#core.seal();
        this.#start();
      } else {
        await this.#progress();
      }
    }
  }

  /** Resolves at the next answer; throws once the publisher has failed or is closed. */
  async #progress(): Promise<void> {
    this.#check();
    await new Promise<void>((resolve) => this.#wake.push(resolve));
    this.#check();
  }

  #wakeAll(): void {
    const waiting = this.#wake;
    this.#wake = [];
    waiting.forEach((wake) => wake());
  }

  #start(): void {
    if (!this.#running) {
      this.#running = true;
      void this.#run();
    }
    this.#wakeAll();
  }

  /** Sends until everything is settled, over as many streams as that takes. */
  async #run(): Promise<void> {
    try {
      while (!this.#closing) {
        if (!this.#core.hasRequests) {
          await this.#woken();
          continue;
        }
        const error = await this.#streamOnce();
        this.#core.rewind();
        if (this.#core.hasRequests && !this.#closing) {
          await this.#woken(this.#core.retryDelay(error, { nowMs: performance.now(), jitter: Math.random() }));
        }
      }
    } catch (error) {
      this.#failure = error; // also a callback's; the program's next call throws it
    } finally {
      this.#call = undefined;
      this.#wakeAll();
    }
  }

  /** Waits for work, or for a time that only the end of the publisher cuts short. */
  async #woken(ms?: number): Promise<void> {
    const end = ms === undefined ? undefined : performance.now() + ms;
    do {
      let timer: NodeJS.Timeout | undefined;
      await new Promise<void>((resolve) => {
        this.#wake.push(resolve);
        timer = end === undefined ? undefined : setTimeout(resolve, end - performance.now());
      });
      clearTimeout(timer);
    } while (end !== undefined && performance.now() < end && !this.#closing);
  }

  async #streamOnce(): Promise<SowError> {
    let call: Duplex<PublishStreamRequest, PublishStreamResponse>;
    try {
      if (this.#core.wantsEpoch) {
        this.#core.opened(await this.#hooks.nextEpoch!());
      }
      const { removes } = this.#core;
      call = this.#call = await this.#openStream(removes);
      this.#core.knowsRemovals = removes;
    } catch (error) {
      return streamError(error, ANSWERS);
    }
    if (this.#closing) {
      call.cancel(); // `abort` came before the call was known
    }
    let open = true;
    void this.#write(call, () => open);
    try {
      for (;;) {
        const { done, value } = await call.next();
        if (done) {
          return cut(ANSWERS);
        }
        const { ack, error } = this.#core.acknowledge(value);
        this.#wakeAll();
        this.#deliver(ack); // in the same turn, so that a flush sees its error
        if (error !== undefined) {
          return error;
        }
      }
    } catch (error) {
      if (!(error instanceof SowError)) {
        throw error; // of a callback
      }
      return error;
    } finally {
      open = false;
      this.#wakeAll();
      call.cancel();
      this.#call = undefined;
    }
  }

  async #write(call: Duplex<PublishStreamRequest, PublishStreamResponse>, isOpen: () => boolean): Promise<void> {
    while (isOpen() && !this.#closing) {
      const request = this.#core.nextRequest();
      if (this.#core.mustReopen) {
        call.end();
        return;
      }
      if (request === undefined) {
        await new Promise<void>((resolve) => this.#wake.push(resolve));
      } else {
        await call.write(request);
      }
    }
  }

  #deliver(ack: Ack): void {
    if (this.#hooks.form !== undefined && ack.refusals.some(({ reason }) => reason === "PAYLOAD_MALFORMED")) {
      this.#form = undefined;
      this.#formIsOld = true;
    }
    try {
      this.#hooks.onAck?.(ack);
      ack.refusals.forEach((refusal) => this.#hooks.onRefusal?.(refusal));
    } catch (error) {
      this.#failure = error;
      throw error;
    }
  }
}
