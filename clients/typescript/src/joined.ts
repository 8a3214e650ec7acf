/**
 * Following topics of several cells as one subscription (rule C21), as the Python client does. No I/O, no clock.
 *
 * A pattern may match topics of all cells. The subscription to it has a part for each cell, and a part is a
 * `SubscriptionCore` of its own: it has a position, calls again after a break, and tells why it cannot go on.
 *
 *   [1]  One frame of each part is at hand. Parts take turns, so no cell keeps the others waiting. Changes of one topic
 *        come from one part, in their order.
 *   [2]  The bookmark has the cells, each with the position after its changes that were handed out, and the version of its
 *        placement. With another version, topics may have left the cell before all their changes were told.
 *   [3]  A cell without a topic that matches is asked again every `EMPTY_MS`. Its first topic is followed from its first
 *        change.
 *   [4]  "snapshot_end" is told once no cell owes its snapshot. A "resync" of one cell names each topic that was shown
 *        from there. A topic that another cell shows from now on is told as a "resync", too.
 *   [5]  A topic that moves is shown by two parts in turn. The cell that it leaves ends the call once it has sent all
 *        changes of it. If that part hands out changes of the topic after the newer part, the newer one goes back to its
 *        first change of it once the older one has ended: so the last state of a record comes last. Its own call is not ended
 *        for that while its cell may still owe changes of a topic that has left there, as where two topics swap their cells.
 *        Under snapshots the changes of the older part are left out.
 *        That end is a frame, `topics_left`: gRPC for Node drops what was not read yet when a call ends with an error.
 *   [6]  Without a placement there is one part, and all is as if that were the subscription itself.
 */

import { clone, create } from "@bufbuild/protobuf";
import { marksOf, prefixOf } from "./changes.js";
import { AllRefused, errorLike, invalid, ResyncRequired, SowError, Unavailable } from "./errors.js";
import { type SubscribeRequest, SubscribeRequestSchema, type SubscribeResponse } from "./gen/sow/v1/sow_pb.js";
import type { Change, JsonObject } from "./records.js";
import type { Bookmarks } from "./requests.js";
import { type CoreOptions, SubscriptionCore } from "./subscription.js";

export const EMPTY_MS = 1_000;
const NOTHING = "PATTERN_MATCHES_NOTHING";
const GONE = "CELL_GONE";
/** In front of the version of the placement, at the end of a bookmark of a cell ([2]). */
const PLACED = ";p=";
const ANY = -1n;

/** The part of one cell. */
export class PartCore<T = JsonObject> extends SubscriptionCore<T> {
  /** "" until the placement is known, and where there is none ([6]). */
  cell = "";
  /** No topic there matches ([3]); undefined: one does, as far as is known. */
  empty: SowError | undefined;
  /** That has just begun, and its topics are to be forgotten. */
  hasEmptied = false;
  /** Why it waits for its cell; null: it does not. */
  interruption: SowError | null = null;
  /** The cell has left the placement. */
  isOver = false;
  /** There was no placement as it began, and now there is one. */
  isCell = false;
  /** It has ended as it does with another placement: home is asked before the next call. */
  placementIsOld = false;
  /** The placement of its cell, as its present call began; 0: it was not asked. */
  version = 0n;
  /** An older part has handed out changes of a topic after this one ([5]). */
  isOvertaken = false;
  /** The position before its first change of a topic that it has taken over ([5]). */
  backTo: string | undefined;
  readonly #hears: (interruption: SowError | null) => void;
  #calls = 0;
  #beganAt: string | undefined; // its position at the begin with this placement; "": the earliest change
  #seen = { version: 0n, call: 0, after: "" }; // the version while a call went on, the number of that call, a position
  #goesBack = false;
  #leftAt = 0n; // with this placement the cell has ended the call, and had sent everything of topics that have left
  #heardOf = 0n; // this placement has ended a call
  #checked = 0; // the number of the call whose begin was checked
  #owesNothing = 0; // the number of the call of which nothing is lost if it is ended
  #hadNone = false; // no topic of the cell matched before the present call

  constructor(request: SubscribeRequest, options: CoreOptions, hears: (interruption: SowError | null) => void) {
    super(clone(SubscribeRequestSchema, request), options);
    this.#hears = hears;
  }

  /**
   * Its cell is known. `start`: the bookmark of that cell; "": its earliest change; undefined: as the program has said for
   * all cells. `first`: the request of its first call, if it is made already, and not sent.
   */
  begin(cell: string, start: string | undefined, first?: SubscribeRequest): void {
    this.cell = cell;
    if (start === undefined) {
      return;
    }
    const at = start.lastIndexOf(PLACED);
    const version = at > 0 ? versionIn(start.slice(at + PLACED.length)) : undefined;
    const position = version === undefined ? start : start.slice(0, at);
    this.version = version ?? this.version;
    for (const one of first === undefined ? [this.asked] : [this.asked, first]) {
      one.start = position === "" ? { case: "earliest", value: true } : { case: "bookmark", value: position };
    }
    this.position = position;
    this.prefix = prefixOf(position);
    this.marks = marksOf(position);
  }

  /**
   * The placement of its cell, before a call is made. true: it is another one than before. Throws ResyncRequired.
   */
  placed(told: bigint, call: SubscribeRequest): boolean {
    this.#calls += 1;
    const version = told > this.#heardOf ? told : this.#heardOf; // a cell names it to others a little after it uses it
    const before = this.version;
    this.version = version;
    this.#hadNone = this.#leftAt === ANY;
    const isInOrder = this.#hadNone || this.#leftAt === version;
    this.#goBack(call);
    if (version === before) {
      return false;
    }
    this.isOvertaken = false;
    this.backTo = undefined;
    this.#beganAt = this.position || (call.start.case === "earliest" ? "" : undefined);
    if (before === 0n) {
      return false;
    }
    if (this.asked.sow) {
      this.snapshot = call.sow = true;
      call.start = { case: undefined };
    } else if (!isInOrder) {
      throw resync("it has another placement since it was followed last: changes of topics that have left may be missing");
    }
    return true;
  }

  /** Its call has begun, and the cell is to be asked for its placement once more: see `began`. */
  get isNew(): boolean {
    return this.#checked !== this.#calls && (this.standing || this.empty !== undefined);
  }

  /**
   * The cell has this placement after the begin of a call. false: it has come about that time. Topics may have left before
   * it, and the next call tells so.
   */
  began(version: bigint): boolean {
    this.#checked = this.#calls;
    if (version <= this.version || this.#hadNone) {
      return true; // it tells all of a topic that has come, and its end tells of one that leaves
    }
    this.#leftAt = 0n;
    return false;
  }

  /**
   * The cell has this placement now. false: `saw` is to tell of it. Nothing of the call is lost where it has reached a
   * position from after the begin of that placement: topics that have left would be handed over before.
   */
  knows(version: bigint): boolean {
    this.#owesNothing = 0;
    if (version > this.version && this.standing) {
      const { version: seen, call, after } = this.#seen;
      if (seen !== version || call !== this.#calls) {
        return false;
      }
      if (!isBehind(after, this.bookmark ?? "")) {
        return true;
      }
      this.version = version;
    }
    this.#owesNothing = this.#calls;
    return true;
  }

  /** The cell has had this placement at a position. */
  saw(version: bigint, position: string | null): void {
    this.#seen = { version, call: this.#calls, after: position ?? "" };
  }

  /** The next call begins before its first change of a topic that it has taken over ([5]). */
  goBack(): void {
    this.isOvertaken = false;
    this.#goesBack = true;
  }

  /**
   * Its call is to be ended, as it goes back, and its cell owes no change of a topic that has left: that would be passed over.
   */
  get isToEnd(): boolean {
    if (!this.#goesBack || !this.standing) {
      return false;
    }
    if (this.#seen.call === this.#calls) {
      this.knows(this.#seen.version);
    }
    return this.#owesNothing === this.#calls;
  }

  #goBack(call: SubscribeRequest): void {
    if (!this.#goesBack) {
      return;
    }
    this.#goesBack = false;
    this.sequence = this.repeated = 0n;
    this.position = this.#before;
    this.backTo = undefined;
    call.start = this.position === "" ? { case: "earliest", value: true } : { case: "bookmark", value: this.position };
  }

  get #before(): string {
    return this.backTo ?? this.#beganAt ?? "";
  }

  /** The place where another subscription goes on ([2]); "": its earliest change; undefined: there is none. */
  get resumesAt(): string | undefined {
    const position = this.isOvertaken || this.#goesBack ? this.#before : this.bookmark;
    if (position === null) {
      return this.#beginsAtEarliest ? "" : undefined;
    }
    return position !== "" && this.version !== 0n ? `${position}${PLACED}${this.version}` : position;
  }

  /** It has no position, and would begin with the earliest change in another subscription, too. */
  get #beginsAtEarliest(): boolean {
    return this.empty !== undefined || this.asked.start.case === "earliest";
  }

  /** It follows its cell, or has told why it does not yet. */
  get isSettled(): boolean {
    return this.stood || this.empty !== undefined || this.interruption !== null;
  }

  /** A cell that is down keeps no other one waiting, if nothing is missed until it is there. */
  protected override get lasts(): boolean {
    const { sow, start } = this.asked;
    return this.stood || this.empty !== undefined || (this.cell !== "" && (sow || start.case !== undefined));
  }

  protected override tell(interruption: SowError | null): void {
    this.interruption = interruption;
    this.#hears(interruption);
  }

  /** The changes of the current frame, of which none was handed out. */
  handOut(joined: (changes: readonly Change<T>[]) => readonly Change<T>[]): void {
    this.show(joined(this.changes));
  }

  override feed(response: SubscribeResponse): void {
    if (response.frame.case === "topicsLeft") {
      this.settle();
      throw left(response.frame.value.placementVersion);
    }
    super.feed(response);
    this.empty = undefined;
    this.#beganAt ??= this.after || this.position;
  }

  override request(nowMs: number): SubscribeRequest {
    const request = super.request(nowMs);
    if (this.empty !== undefined) {
      this.behind = false;
      if (!request.sow && (request.start.case === undefined || request.start.case === "earliest")) {
        request.start = { case: "earliest", value: true };
      }
    }
    return request;
  }

  override ended(error: SowError, how: { nowMs: number; jitter: number; elsewhere?: boolean }): number {
    if (this.isCell) {
      throw this.failure(error);
    }
    if (this.cell === "") {
      return super.ended(error, how);
    }
    const { reason, details } = error;
    const placed = reason === "ACCESS_CHANGED" ? versionIn(details["placement_version"] ?? "") : undefined;
    if (placed !== undefined && placed > this.#heardOf) {
      this.#heardOf = placed;
    }
    if (this.standing) {
      this.#leftAt = placed !== undefined && details["complete"] === "true" ? this.#heardOf : 0n;
    }
    if (this.#goesBack && this.standing) {
      return 0; // that call is over; one that fails before it stands is as any other
    }
    if (reason === NOTHING) {
      this.#leftAt = ANY; // it has no topic that could have left
      this.backoff.reset();
      this.hasEmptied ||= this.empty === undefined;
      this.empty = error;
      this.behind = false;
      this.snapshot = this.asked.sow;
      if (this.interrupted) {
        this.interrupted = false;
        this.tell(null);
      }
      return EMPTY_MS;
    }
    this.isOver = reason === GONE;
    this.placementIsOld = reason === "ACCESS_CHANGED";
    return super.ended(this.#named(error), how);
  }

  /**
   * The error with the name of the cell. A cell that refuses is waited for as one that is not reached, where the others go on
   * meanwhile. One that accepts calls and says nothing is not reached either.
   */
  #named(error: SowError): SowError {
    const { cell } = this;
    const named = "cell" in error.details ? error : errorLike(error, `the cell ${cell}: ${error.text}`, { cell });
    if (named.reason !== "DEADLINE_EXCEEDED" && !(this.lasts && named instanceof AllRefused)) {
      return named;
    }
    const { details, retryAfterMs, cause } = named;
    return new Unavailable(named.text, { reason: "UNREACHABLE", details, retryAfterMs, cause });
  }
}

/** Owns the parts, and the order in which their frames are handed out. */
export class JoinedCore<T = JsonObject> {
  readonly home: PartCore<T>;
  /** The part of each cell; undefined: the cells are not known yet. Without a placement home's alone, under "". */
  parts: ReadonlyMap<string, PartCore<T>> | undefined;
  readonly #request: SubscribeRequest;
  readonly #starts: Bookmarks | undefined;
  readonly #options: CoreOptions;
  #turns: PartCore<T>[] = []; // those that have waited longest for their turn come first
  readonly #shownBy = new Map<string, { part: PartCore<T>; version: bigint }>(); // the newest part that shows a topic
  readonly #left = new Map<PartCore<T>, Map<string, bigint>>(); // topics that another part shows; the version of this one
  readonly #complete = new Set<PartCore<T>>(); // the parts whose snapshot was handed out
  #vanished: string[] = []; // topics that are to be forgotten, as their cell has none any more
  #marks: Change<T>[] = []; // that are to be handed out, and that no frame brings
  #current: PartCore<T> | undefined; // whose frame is being handed out

  /** `starts`: the bookmarks of the cells, as `bookmark` gives them. */
  constructor(request: SubscribeRequest, starts: Bookmarks | undefined, options: CoreOptions) {
    this.#request = request;
    this.#starts = starts;
    this.#options = options;
    this.home = this.#part();
  }

  #part(): PartCore<T> {
    return new PartCore<T>(this.#request, this.#options, (interruption) => this.#hear(interruption));
  }

  /** Tells the error of each interruption, and null once no cell is interrupted any more. */
  #hear(interruption: SowError | null): void {
    if (interruption !== null || this.#turns.every((part) => part.interruption === null)) {
      this.#options.onInterruption?.(interruption);
    }
  }

  // ---- cells ----

  /**
   * The name of home is known, and "" without a placement, and so are those of all cells. `first`: as for `PartCore.begin`.
   * Throws InvalidArgument where the start does not fit it, and ResyncRequired.
   */
  begin(home: string, first: SubscribeRequest, cells: Iterable<string> = []): void {
    if (home === "" && this.#starts !== undefined) {
      throw invalid("start", "has the bookmarks of cells, and this server has no placement: give the one of it");
    }
    if (home !== "" && this.#request.start.case === "bookmark") {
      throw invalid("start", "is the bookmark of one cell, and there are several: give the mapping that `bookmark` gives");
    }
    const known = new Set(cells);
    const [lost] = Object.keys(this.#starts ?? {}).filter((cell) => home !== "" && !known.has(cell)).sort();
    if (lost !== undefined) {
      throw resync(`start: there is no cell ${JSON.stringify(lost)} any more: its last changes may be missing`);
    }
    this.home.begin(home, this.#startOf(home), first);
  }

  #startOf(cell: string): string | undefined {
    if (this.#starts === undefined) {
      return undefined;
    }
    return Object.hasOwn(this.#starts, cell) ? this.#starts[cell] : "";
  }

  /** These are the cells, home among them. Returns the parts of those that have come. */
  found(cells: Iterable<string>): PartCore<T>[] {
    const isFirst = this.parts === undefined;
    const parts = new Map(this.parts ?? [[this.home.cell, this.home]]);
    const come = isFirst ? [this.home] : [];
    for (const cell of cells) {
      if (!parts.has(cell)) {
        const part = this.#part();
        // A topic may have come there before anyone has told of that cell.
        const isLate = !isFirst && !this.#request.sow;
        part.begin(cell, isLate ? "" : this.#startOf(cell));
        parts.set(cell, part);
        come.push(part);
      }
    }
    this.#turns.push(...come);
    this.parts = parts;
    return come;
  }

  /** The request of a subscription that begins now, for the position of a cell. */
  probe(): SubscribeRequest {
    return create(SubscribeRequestSchema, { topicPattern: this.#request.topicPattern });
  }

  /** There is no placement ([6]). */
  get isSingle(): boolean {
    return this.parts?.has("") === true;
  }

  /** Each cell is followed, or has told why it is not yet. */
  get stood(): boolean {
    return this.parts !== undefined && this.#turns.every((part) => part.isSettled);
  }

  /** The error of a pattern that has never matched a topic, in any cell; undefined: it has, or it is not known. */
  get nothing(): SowError | undefined {
    const isKnown = this.#turns.every((part) => !part.stood && part.empty !== undefined);
    return isKnown ? this.#turns[0]?.empty : undefined;
  }

  /** The cells, each with the error of an interruption that lasts. */
  get cells(): ReadonlyMap<string, SowError | null> {
    const parts = this.isSingle ? [] : [...(this.parts?.values() ?? [])];
    return new Map(parts.map((part) => [part.cell, part.interruption]));
  }

  /** The cell has left the placement, and the part has ended. */
  drop(part: PartCore<T>): void {
    this.parts = new Map([...(this.parts ?? [])].filter(([, one]) => one !== part));
    this.#turns = this.#turns.filter((one) => one !== part);
    this.#complete.delete(part);
    this.#left.delete(part);
    this.#vanished.push(...this.#topicsOf(part));
    if (part.interruption !== null) {
      this.#hear(null); // nobody waits for it any more
    }
  }

  // ---- changes ----

  /** The next change that is at hand; undefined: see `nextFrame`. */
  take(): Change<T> | undefined {
    const part = this.isSingle ? this.home : this.#current;
    const change = this.#marks.shift() ?? part?.take();
    if (part?.isTaken) {
      this.#current = undefined; // its next frame is to be taken up first
    }
    return change;
  }

  /**
   * Hands out the frame of a part, or marks that follow from the cells; false: none is at hand. The frame before must have
   * been handed out.
   */
  nextFrame(): boolean {
    this.#marks = this.#marksOfCells();
    if (this.#marks.length > 0) {
      return true;
    }
    const part = this.#turns.find(({ isTaken }) => !isTaken);
    if (part === undefined) {
      return false;
    }
    this.#turns.push(...this.#turns.splice(this.#turns.indexOf(part), 1));
    const position = part.bookmark ?? "";
    part.handOut((changes) => this.#joined(part, changes.map((change) => ({ ...change, cell: part.cell })), position));
    this.#current = part.isTaken ? undefined : part;
    return true;
  }

  #marksOfCells(): Change<T>[] {
    if (!this.#request.sow) {
      return [];
    }
    const topics = this.#vanished;
    this.#vanished = [];
    let hasEnded = false;
    for (const part of this.#turns) {
      if (part.hasEmptied) {
        part.hasEmptied = false;
        topics.push(...this.#topicsOf(part));
        hasEnded ||= !this.#complete.has(part);
        this.#complete.add(part);
      }
    }
    return [...topics.map((topic) => resyncOf<T>(topic)), ...(hasEnded || topics.length > 0 ? this.#end() : [])];
  }

  /** The changes of a frame, which are all of one topic, or a mark ([4], [5]). `position`: that before them. */
  #joined(part: PartCore<T>, changes: readonly Change<T>[], position: string): readonly Change<T>[] {
    const { op, topic } = changes[0]!;
    if (op === "resync") {
      this.#complete.delete(part);
      return this.#topicsOf(part).map((one) => resyncOf<T>(one));
    }
    if (op === "snapshot_end") {
      this.#complete.add(part);
      return this.#end();
    }
    const shown = this.#shownBy.get(topic);
    if (shown === undefined || shown.part === part) {
      this.#shownBy.set(topic, { part, version: part.version });
      return changes;
    }
    const { part: before, version } = shown;
    if (version > part.version || this.#left.get(part)?.get(topic) === part.version) {
      before.isOvertaken = true;
      return this.#request.sow ? [] : changes;
    }
    this.#shownBy.set(topic, { part, version: part.version });
    const left = this.#left.get(before) ?? new Map<string, bigint>();
    this.#left.set(before, left.set(topic, version));
    part.backTo ??= position;
    return this.#request.sow ? [resyncOf(topic), ...changes] : changes;
  }

  /**
   * A part begins with another placement, or has ended. Returns those that now go back ([5]): the call of each is to be ended,
   * once it `isToEnd`.
   */
  newer(than: PartCore<T>): PartCore<T>[] {
    const back = this.#turns.filter((one) => one !== than && one.isOvertaken && !this.#request.sow);
    back.forEach((one) => one.goBack());
    return back;
  }

  #topicsOf(part: PartCore<T>): string[] {
    const topics = [...this.#shownBy].filter(([, shown]) => shown.part === part).map(([topic]) => topic);
    topics.forEach((topic) => this.#shownBy.delete(topic));
    return topics;
  }

  #end(): Change<T>[] {
    return this.#turns.every((part) => this.#complete.has(part))
      ? [{ op: "snapshot_end", reason: null, topic: "", bookmark: null, absentFields: [] }]
      : [];
  }

  // ---- where it stands ----

  /** The position after the last change that was handed out; null: there is none to continue from. */
  get bookmark(): string | Bookmarks | null {
    if (this.parts === undefined) {
      const { start } = this.#request;
      return this.#starts ?? (start.case === "bookmark" ? start.value : null);
    }
    if (this.isSingle) {
      return this.home.bookmark;
    }
    const places = [...this.parts].map(([cell, { resumesAt }]) => [cell, resumesAt] as const);
    const known = places.filter((place): place is [string, string] => place[1] !== undefined && place[1] !== "");
    return known.length === 0 || places.some(([, at]) => at === undefined) ? null : Object.fromEntries(known);
  }

  get covers(): boolean {
    return this.#turns.every((part) => part.covers);
  }

  get behind(): boolean {
    return this.parts === undefined || this.#turns.some((part) => part.behind);
  }
}

/** The error of a subscription that began without a placement, and would miss the topics of other cells. */
export function came(): SowError {
  return resync("the server has become one of several cells: subscribe again");
}

/** The error of a subscription to several cells whose home knows of none any more. */
export function alone(): SowError {
  return resync("the server has no placement any more: subscribe again");
}

/** The error of a call in a cell that has left the placement. */
export function gone(cell: string): SowError {
  return new SowError(`the cell ${cell} has left the placement`, { reason: GONE, details: { cell } });
}

/** The error of a call that has ended once all changes of the topics that have left were handed out. */
function left(version: bigint): SowError {
  const details = { complete: "true", placement_version: String(version) };
  return new Unavailable("topics of the pattern have left this cell; call again", { reason: "ACCESS_CHANGED", details });
}

function resync(message: string): SowError {
  return new ResyncRequired(message, { reason: "RESYNC_REQUIRED" });
}

function resyncOf<T>(topic: string): Change<T> {
  return { op: "resync", reason: null, topic, bookmark: null };
}

function versionIn(text: string): bigint | undefined {
  return /^[0-9]+$/.test(text) ? BigInt(text) : undefined;
}

/** true if a bookmark is known to be at or before another one. */
function isBehind(one: string, other: string): boolean {
  const [plain, reached] = [one, other].map((bookmark) => bookmark.split(";", 1)[0]!) as [string, string];
  const [prefix, until] = [prefixOf(plain), prefixOf(reached)];
  return plain !== "" && prefix === until && BigInt(plain.slice(prefix.length)) <= BigInt(reached.slice(until.length));
}
