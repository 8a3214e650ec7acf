/**
 * Following the topics of a pattern in all cells: `joined` has the machine, and this its calls (rule C21).
 *
 *   [1]  Each part is carried by a loop of its own, which keeps its next frame at hand, and asks for another one only once
 *        all of it was handed out. All else waits in the flow control of gRPC: a slow program holds up every cell.
 *   [2]  Home is asked for its cells every `LOOK_MS`, and each cell for its placement.
 */

import { setTimeout as pause } from "node:timers/promises";
import { closed, InvalidArgument, SowError } from "./errors.js";
import type { SubscribeRequest, SubscribeResponse } from "./gen/sow/v1/sow_pb.js";
import { alone, came, gone, JoinedCore, type PartCore } from "./joined.js";
import type { Change, JsonObject } from "./records.js";
import type { Bookmarks } from "./requests.js";
import { type CoreOptions, Following, Reader, Subscription } from "./subscription.js";
import type { Frames } from "./transport.js";

/** How often home is asked for its cells: as often as cells look at each other (rule C7). */
export const LOOK_MS = 10_000;

/** The cells, as home names them: `home` is "", and has the only place, without a placement. */
export interface Places<P> {
  readonly home: string;
  readonly all: ReadonlyMap<string, P>;
}

/** The calls of a client that a joined subscription makes. `P`: the place of a cell. */
export interface CellCalls<P> {
  /** Asks home for the cells. */
  places(): Promise<Places<P>>;
  /** Asks a cell for the version of its placement. */
  version(place: P): Promise<bigint>;
  open(place: P, request: SubscribeRequest, withinMs: number): Promise<Frames<SubscribeResponse>>;
  /** There are other instances of that cell to go on at. */
  isOfMany(place: P): boolean;
}

/** The subscription of one part, which is carried on by hand. */
class Part<T> extends Following<Change<T>> {
  /** Takes in the next frame, or prepares for the next call. */
  async step(): Promise<void> {
    await this.advance();
  }

  /** As of every subscription. */
  override callAgain(): void {
    super.callAgain();
  }
}

/**
 * The changes of all topics that match a pattern, in all cells: a `Subscription` in each, joined (rule C21). Without cells
 * it is as any other. The changes of a topic come in their order. A cell that comes with another placement joins by itself.
 * When a cell is interrupted, the others go on, and `cells` says which one is missing.
 */
export class JoinedSubscription<T = JsonObject> extends Reader<Change<T>> {
  readonly #core: JoinedCore<T>;
  readonly #parts: Parts<T>;

  /** Made by `Client.subscribe` and `Client.sowAndSubscribe`. */
  constructor(core: JoinedCore<T>, parts: Parts<T>) {
    super();
    this.#core = core;
    this.#parts = parts;
  }

  /**
   * Resolves once it is established. A cell that does not answer is told as an interruption, and the others go on. If the
   * subscription begins now and without a snapshot, changes would be missing: then it throws Unavailable. The client has
   * called it already.
   */
  async opened(): Promise<this> {
    const [core, parts] = [this.#core, this.#parts];
    while (!core.stood && !(core.isSingle && core.home.stood)) {
      if (this.isClosed) {
        throw closed("subscription");
      }
      if (!parts.isJoined || core.isSingle) {
        await this.advance();
      } else {
        this.#check();
        await parts.changed.wait();
      }
    }
    this.#check();
    return this;
  }

  /**
   * Where another subscription may start to go on. Over several cells it has the cells with their bookmarks: give it as the
   * `start`. A cell that is not there begins with its earliest change. null while there is no such place.
   */
  get bookmark(): string | Bookmarks | null {
    return this.#core.bookmark;
  }

  /** The cells that it follows, each with the error of an interruption that lasts. None where there is one server. */
  get cells(): ReadonlyMap<string, SowError | null> {
    return this.#core.cells;
  }

  /** As that of any subscription, of all cells. */
  get covers(): boolean {
    return this.#core.covers;
  }

  /** As that of any subscription: true if it is so of any cell. */
  get behind(): boolean {
    return this.#core.behind;
  }

  override close(): void {
    super.close();
    this.#parts.close();
  }

  protected override take(): Change<T> | undefined {
    return this.#core.take();
  }

  protected override async advance(): Promise<void> {
    const [core, parts] = [this.#core, this.#parts];
    if (!parts.isJoined || core.isSingle) {
      try {
        await parts.home.step();
        parts.join();
      } catch (error) {
        this.close();
        throw error;
      }
      return;
    }
    parts.changed.notify(); // the frame before was handed out
    while (!this.isClosed && !core.nextFrame()) {
      this.#check();
      await parts.changed.wait();
      parts.join();
    }
  }

  /** Throws why it cannot go on. */
  #check(): void {
    const error = this.#parts.failure ?? this.#core.nothing;
    if (error !== undefined) {
      this.close();
      throw error;
    }
  }
}

/** Those who wait until something has changed. */
class Changed {
  #waiting: (() => void)[] = [];

  notify(): void {
    const waiting = this.#waiting;
    this.#waiting = [];
    waiting.forEach((wake) => wake());
  }

  async wait(): Promise<void> {
    await new Promise<void>((resolve) => this.#waiting.push(resolve));
  }
}

/** Owns the parts of a joined subscription: each is carried on by itself ([1]). */
export class Parts<T, P = unknown> {
  readonly changed = new Changed();
  readonly home: Part<T>;
  /** Why it cannot go on. */
  failure: unknown;
  readonly #core: JoinedCore<T>;
  readonly #calls: CellCalls<P>;
  readonly #options: CoreOptions;
  readonly #lookMs: number;
  readonly #closing = new AbortController();
  #found: Places<P> | undefined; // as home has named them last; undefined: it has not yet
  #joined: Places<P> | undefined; // those that have a part
  #running = new Map<PartCore<T>, Part<T>>();
  #isLooking = false;

  constructor(core: JoinedCore<T>, calls: CellCalls<P>, options: CoreOptions, lookMs = LOOK_MS) {
    this.#core = core;
    this.#calls = calls;
    this.#options = options;
    this.#lookMs = lookMs;
    this.home = this.#part(core.home);
  }

  /** The cells are known, and each has a part. */
  get isJoined(): boolean {
    return this.#joined !== undefined;
  }

  get #isOver(): boolean {
    return this.#closing.signal.aborted;
  }

  #place(part: PartCore<T>): P | undefined {
    return this.#found?.all.get(part.cell);
  }

  #part(core: PartCore<T>): Part<T> {
    const open = (request: SubscribeRequest, withinMs: number) => this.#open(core, request, withinMs);
    const isElsewhere = (): boolean => {
      const place = this.#place(core);
      return place !== undefined && this.#calls.isOfMany(place);
    };
    return new Part<T>(core, open, {
      ...this.#options,
      get elsewhere() {
        return isElsewhere();
      },
    });
  }

  async #open(part: PartCore<T>, request: SubscribeRequest, withinMs: number): Promise<Frames<SubscribeResponse>> {
    const isFirst = this.#found === undefined;
    if (isFirst) {
      const found = await this.#calls.places();
      this.#core.begin(found.home, request, found.all.keys());
      this.#found = found;
    } else if (part.placementIsOld) {
      await this.#look();
    }
    const place = this.#place(part);
    if (place === undefined) {
      throw gone(part.cell);
    }
    if (part.cell !== "" && part.placed(await this.#calls.version(place), request)) {
      await this.#goBack(part);
    }
    request.tellLeft = part.cell !== "";
    const call = await this.#calls.open(place, request, withinMs);
    if (!isFirst && part.cell === "" && (await this.#hasCells())) {
      call.cancel();
      part.isCell = true;
      throw came();
    }
    return call;
  }

  /** true if a server that had no placement has one now. */
  async #hasCells(): Promise<boolean> {
    return (await unlessRefused(this.#calls.places()))?.all.has("") === false;
  }

  /** Parts that an older one has overtaken go back, as that one has ended now. */
  async #goBack(than: PartCore<T>): Promise<void> {
    for (const part of this.#core.newer(than)) {
      await this.#lookAt(part);
      if (part.isToEnd) {
        this.#running.get(part)?.callAgain();
      }
    }
  }

  /** Each cell that has come gets a part. Without a placement there is that of home, which is carried on by its reader. */
  join(): void {
    if (this.#found === undefined || this.#found === this.#joined) {
      return;
    }
    this.#joined = this.#found;
    const come = this.#core.found(this.#found.all.keys());
    if (this.#core.isSingle || this.#isOver) {
      return;
    }
    for (const core of come) {
      const part = core === this.#core.home ? this.home : this.#part(core);
      this.#running.set(core, part);
      void this.#carry(core, part);
    }
    if (!this.#isLooking) {
      this.#isLooking = true;
      void this.#keepLooking();
    }
  }

  /** Keeps the next frame of a cell at hand. */
  async #carry(core: PartCore<T>, part: Part<T>): Promise<void> {
    try {
      while (!this.#isOver) {
        if (core.isNew) {
          await this.#check(core, part);
        }
        while (!core.isTaken && !this.#isOver) {
          await this.changed.wait();
        }
        if (core.isToEnd) {
          part.callAgain();
        }
        await part.step();
        this.changed.notify();
      }
    } catch (error) {
      await this.#ended(core, error).catch((failure: unknown) => this.#fail(failure));
    }
  }

  /** A part cannot go on. */
  async #ended(core: PartCore<T>, error: unknown): Promise<void> {
    this.#running.delete(core);
    if (!core.isOver) {
      this.#fail(error);
      return;
    }
    this.#core.drop(core);
    this.changed.notify();
    await this.#goBack(core);
  }

  /** Ends all parts. Frames that are at hand are handed out before the program is told why. */
  #fail(error: unknown): void {
    if (!this.#isOver) {
      this.failure = error;
      this.close();
    }
  }

  /** A call of a part has begun: its cell had the placement of before. */
  async #check(core: PartCore<T>, part: Part<T>): Promise<void> {
    const place = this.#place(core);
    const version = place === undefined ? undefined : await unlessRefused(this.#calls.version(place));
    if (version !== undefined && !core.began(version)) {
      part.callAgain();
    }
  }

  /** Looks for cells that have come ([2]). */
  async #keepLooking(): Promise<void> {
    try {
      for (;;) {
        await pause(this.#lookMs, undefined, { signal: this.#closing.signal, ref: false }).catch(() => undefined);
        if (this.#isOver) {
          return;
        }
        await this.#look();
        for (const core of this.#running.keys()) {
          await this.#lookAt(core);
        }
      }
    } catch (error) {
      this.#fail(error);
    }
  }

  /** Asks home for the cells, if it answers. */
  async #look(): Promise<void> {
    const found = await unlessRefused(this.#calls.places());
    if (found?.all.has("")) {
      throw alone();
    }
    if (found !== undefined && !this.#isOver) {
      this.#found = found;
      this.changed.notify();
    }
  }

  /** Asks a cell for its placement, if it answers. */
  async #lookAt(core: PartCore<T>): Promise<void> {
    const place = this.#place(core);
    if (place === undefined || this.#isOver) {
      return;
    }
    const version = await unlessRefused(this.#calls.version(place));
    if (version !== undefined && !core.knows(version)) {
      const position = await unlessRefused(this.#position(place));
      if (position !== undefined) {
        core.saw(version, position);
      }
    }
  }

  /** That of a cell now. */
  async #position(place: P): Promise<string | null> {
    const open = (asked: SubscribeRequest, withinMs: number) => this.#calls.open(place, asked, withinMs);
    const options = { ...this.#options, retryForMs: 0, onInterruption: undefined, elsewhere: false };
    const probe = new Subscription(this.#core.probe(), open, options);
    try {
      return (await probe.opened()).bookmark;
    } finally {
      probe.close();
    }
  }

  /** Ends all parts. */
  close(): void {
    this.#closing.abort();
    this.home.close();
    this.#running.forEach((part) => part.close());
    this.changed.notify();
  }
}

/** undefined: the call has failed. Throws where the client is closed, or does not go to a cell: topics would be missing. */
async function unlessRefused<Value>(call: Promise<Value>): Promise<Value | undefined> {
  try {
    return await call;
  } catch (error) {
    if (error instanceof SowError && error.reason !== "CLOSED" && !(error instanceof InvalidArgument)) {
      return undefined;
    }
    throw error;
  }
}
