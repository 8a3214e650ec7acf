/**
 * The cells of a client: where the calls of a topic go, and which cells there are (rules C10 to C14, C19). No I/O.
 *
 * The cell of the addresses that the program has given is the client's home. It names the cell and the addresses of a
 * topic that lives elsewhere, in the error TOPIC_ELSEWHERE of a call of which nothing was applied.
 *
 *   [1]  For a topic nothing is asked, made or remembered before the first such error: a client of one server pays one
 *        look-up in an empty map for a call.
 *   [2]  Only home's word about addresses counts, so credentials go to addresses of the program and of its home alone.
 *        Another cell's word is a doubt: what is remembered of the topic is forgotten, and home is asked again.
 *   [3]  A call asks home at most `ASKED_MAX` times. If home names a cell again that has denied it in the same call, the
 *        call begins again after each of `PAUSES_MS`. Then it ends, and its error has the words of both.
 *   [4]  The cells of a client differ in their transports, and in the positions of their publishes (rule P6). All else,
 *        such as TLS, the token and the timeouts, is the client's.
 *   [5]  Calls over all cells ask home for its placement, beside home's own answer: a client of one server waits for no more
 *        than that. A placement may change at any time, so each such call asks.
 */

import { setTimeout as pause } from "node:timers/promises";
import { type DescMessage, type MessageShape, ScalarType } from "@bufbuild/protobuf";
import { addressesOf, isHostAndPort } from "./channel.js";
import { closed, errorLike, InvalidArgument, SowError } from "./errors.js";
import type { GetPlacementResponse } from "./gen/sow/v1/admin_pb.js";
import { PositionPool } from "./positions.js";
import { LOSSES } from "./search.js";

export const ELSEWHERE = "TOPIC_ELSEWHERE";
/**
 * Milliseconds after which a call is made again that two cells have denied, each in favour of the other: so it is while a topic
 * moves from one to the other.
 */
export const PAUSES_MS: readonly number[] = [20, 50, 100, ...Array<number>(10).fill(200)];
/** How often one call is told by home that its topic lives elsewhere. */
const ASKED_MAX = 2;
/** Topics whose cell a client remembers; of more, the oldest are forgotten. */
const KEPT_MAX = 10_000;
/** Answers of a cell after which home is asked; if it was not reached, with the next call: the topic may have moved. */
const DOUBTS: ReadonlySet<string> = new Set([ELSEWHERE, "TOPIC_NOT_FOUND", "UNREACHABLE"]);

/** A cell as a client uses it ([4]). */
export class Place<T> {
  /** Its name, as home has told it; "" of home. */
  readonly cell: string;
  readonly transport: T;
  readonly positions = new PositionPool();

  constructor(cell: string, transport: T) {
    this.cell = cell;
    this.transport = transport;
  }
}

/** Owns what a client knows of cells, and the transports to those that are not its home. */
export class Cells<T> {
  readonly home: Place<T>;
  readonly #opened: ((servers: string) => T) | undefined;
  readonly #places = new Map<string, Place<T>>(); // by cell and addresses
  readonly #of = new Map<string, Place<T>>(); // of each topic that is not at home
  #isClosed = false;

  /**
   * `opened` makes the transport to addresses; it throws InvalidArgument where the token may not go there. undefined: the
   * client stays at home, whose name is `cell`.
   */
  constructor(home: T, opened: ((servers: string) => T) | undefined, cell = "") {
    this.home = new Place(cell, home);
    this.#opened = opened;
  }

  /** It stays at home. */
  get isOne(): boolean {
    return this.#opened === undefined;
  }

  /** The way of a call. `topic`: "" for one that has none, which stays at home. */
  way(topic: string): Way<T> {
    return new Way(this, topic, this.#of.get(topic) ?? this.home);
  }

  /**
   * Remembers where home says that a topic lives; undefined: its answer names no address that a client may use. Throws
   * InvalidArgument as `opened`, and Cancelled (CLOSED).
   */
  learn(topic: string, error: SowError): Place<T> | undefined {
    const { cell = "", servers = "" } = error.details;
    const place = this.#place(cell, servers);
    if (place === undefined) {
      return undefined;
    }
    this.#of.set(topic, place);
    for (const [oldest] of this.#of) {
      if (this.#of.size <= KEPT_MAX) {
        break;
      }
      this.#of.delete(oldest);
    }
    return place;
  }

  /** The place of a cell, as home names it. */
  #place(cell: string, servers: string): Place<T> | undefined {
    if (this.#opened === undefined || cell === "" || !servers.split(",").every(isHostAndPort)) {
      return undefined;
    }
    if (this.#isClosed) {
      throw closed("client"); // nobody would close the transport
    }
    const key = `${cell} ${addressesOf(servers).join(",")}`;
    let place = this.#places.get(key);
    if (place === undefined) {
      place = new Place(cell, this.#opened(servers));
      this.#places.set(key, place);
    }
    return place;
  }

  /**
   * All cells by their names, as home tells them; undefined: it knows of none ([5]). Throws InvalidArgument, with the cell in
   * its details, where the client cannot go to one of them; and Cancelled (CLOSED).
   */
  placed(told: GetPlacementResponse | undefined): ReadonlyMap<string, Place<T>> {
    const { cell = "", cells = [] } = told ?? {};
    const found = new Map<string, Place<T>>();
    if (cell === "" || cells.length === 0) {
      return found.set(cell, this.home); // without cells: the caller has no identity (rule C8)
    }
    for (const { name, servers } of cells) {
      found.set(name, name === cell ? this.home : this.#there(name, servers.join(",")));
    }
    return found;
  }

  #there(cell: string, servers: string): Place<T> {
    let place: Place<T> | undefined;
    let why = `${JSON.stringify(servers)} is no list of HOST:PORT`;
    try {
      place = this.#place(cell, servers);
    } catch (refused) {
      if (!(refused instanceof InvalidArgument)) {
        throw refused;
      }
      why = refused.text;
    }
    if (place === undefined) {
      const message = `the cell ${cell}: this client does not go there: ${why}`;
      throw new InvalidArgument(message, { reason: "INVALID_ARGUMENT", details: { cell } });
    }
    return place;
  }

  /** The way of a call that has no topic, in a certain cell. */
  at(place: Place<T>): Way<T> {
    return new Way(this, "", place);
  }

  /** The cell has denied the topic, or was not reached: the next call asks home. */
  forget(topic: string, place: Place<T>): void {
    if (this.#of.get(topic) === place) {
      this.#of.delete(topic);
    }
  }

  /** No transport is opened from now on. Returns those to close, home's last. */
  close(): T[] {
    this.#isClosed = true;
    return [...this.#places.values(), this.home].map(({ transport }) => transport);
  }
}

/** A `Way`, as the machines of streams see it. */
export interface Led {
  leads(error: SowError): boolean;
  goes(error: SowError): Promise<boolean>;
  told(error: SowError): SowError;
  readonly differs: boolean;
  arrived(): void;
  beginAgain(): void;
}

/** The way of one call to the cell of its topic, or of one stream that is made again and again. */
export class Way<T> implements Led {
  /** Where the next call is made. */
  place: Place<T>;
  readonly #cells: Cells<T>;
  readonly #topic: string;
  #asked = 0; // how often home has named another cell
  #paused = 0; // how often the call has begun again
  #home = ""; // the name of home, as it has said
  #denied: { readonly place: Place<T>; readonly named: string } | undefined; // a cell, and the other one that it names
  #missing: { readonly place: Place<T>; readonly error: SowError } | undefined; // a cell that has no such topic
  #refused = ""; // why the client does not go where home says

  constructor(cells: Cells<T>, topic: string, place: Place<T>) {
    this.#cells = cells;
    this.#topic = topic;
    this.place = place;
  }

  /** True: nothing of the call was applied, and it is to be made again at once, at `place`. */
  leads(error: SowError): boolean {
    const { place } = this;
    if (this.#topic === "" || this.#isOfAnother(error)) {
      return false;
    }
    if (place === this.#cells.home) {
      return error.reason === ELSEWHERE && this.#leadsFromHome(error);
    }
    if (!DOUBTS.has(error.reason)) {
      return false;
    }
    this.#cells.forget(this.#topic, place);
    if (error.reason === ELSEWHERE && this.#asked < ASKED_MAX) {
      this.#denied = { place, named: error.details["cell"] ?? "" };
    } else if (error.reason === "TOPIC_NOT_FOUND" && this.#asked === 0) {
      this.#missing = { place, error };
    } else {
      return false;
    }
    this.place = this.#cells.home;
    return true;
  }

  #leadsFromHome(error: SowError): boolean {
    this.#asked += 1;
    this.#home = error.details["from_cell"] ?? "";
    let found: Place<T> | undefined;
    try {
      found = this.#cells.learn(this.#topic, error);
    } catch (refused) {
      if (!(refused instanceof InvalidArgument)) {
        throw refused;
      }
      this.#refused = refused.text;
    }
    if (found === undefined) {
      return false;
    }
    if (this.#missing?.place === found) {
      this.place = found;
      return false;
    }
    if (this.#denied !== undefined && (this.#denied.place === found || this.#asked > ASKED_MAX)) {
      this.#cells.forget(this.#topic, found);
      return false;
    }
    this.place = found;
    this.#missing = undefined;
    return true;
  }

  /**
   * Resolves when the call is to be made again, at `place`. Throws the error, as `told`, if it is not. `begun`: a part of the
   * answer has come.
   */
  async follow(error: unknown, begun = false): Promise<void> {
    if (!(error instanceof SowError)) {
      throw error;
    }
    if (begun || !(await this.goes(error))) {
      throw this.told(error);
    }
  }

  /** As `leads`; where two cells contradict each other, true after a pause, and home is asked then. */
  async goes(error: SowError): Promise<boolean> {
    if (this.leads(error)) {
      return true;
    }
    const ms = error.reason === ELSEWHERE && this.differs ? PAUSES_MS[this.#paused] : undefined;
    if (ms === undefined) {
      return false;
    }
    this.#paused += 1;
    this.beginAgain();
    await pause(ms);
    return true;
  }

  /** It is about another topic of a call that has several. The cell of the first one decides. */
  #isOfAnother(error: SowError): boolean {
    return (error.details["topic"] ?? this.#topic) !== this.#topic;
  }

  /** The error as the program gets it: with the cells, where they matter. */
  told(given: SowError): SowError {
    if (this.#topic === "") {
      const { cell } = this.place; // of a call over all cells
      return cell === "" ? given : errorLike(given, `the cell ${cell}: ${given.text}`, { cell });
    }
    const error = given.reason === ELSEWHERE && this.#missing !== undefined ? this.#missing.error : given;
    const { reason, text } = error;
    if ((LOSSES.has(reason) || reason === "TOPIC_NOT_FOUND") && this.place !== this.#cells.home) {
      const { cell } = this.place;
      return errorLike(error, `the cell ${cell}, where ${this.#topic} lives: ${text}`, { cell });
    }
    if (reason !== ELSEWHERE) {
      return error;
    }
    if (this.#isOfAnother(error)) {
      return errorLike(error, `${text}; the topics of one call must live in one cell`);
    }
    if (this.#refused !== "") {
      return errorLike(error, `${text}; this client does not go there: ${this.#refused}`);
    }
    if (this.#denied !== undefined) {
      const { place, named } = this.#denied;
      return errorLike(
        error,
        `${this.#topic}: the cell ${this.#home} says that it lives in the cell ${place.cell}, and the cell ${place.cell} ` +
          `says that it lives in the cell ${named}: their placements differ`,
        { denied_by: place.cell },
      );
    }
    return error;
  }

  /** The placements of two cells differ, as they do while a new one is being loaded. */
  get differs(): boolean {
    return this.#denied !== undefined;
  }

  /** A call has got on at `place`: the way there is over. */
  arrived(): void {
    if (this.#asked > 0 || this.#denied !== undefined) {
      this.#begin();
    }
  }

  /** After a while the call is made once more: home is asked. */
  beginAgain(): void {
    this.#begin();
    this.place = this.#cells.home;
  }

  #begin(): void {
    this.#asked = 0;
    this.#home = this.#refused = "";
    this.#denied = this.#missing = undefined;
  }
}

/** Requests about a topic that every cell answers. */
const AT_HOME: ReadonlySet<string> = new Set(["sow.v1.GetPlacementRequest", "sow.v1.CheckAccessRequest"]);
/** Requests whose `name` is a topic. */
const BY_NAME: ReadonlySet<string> = new Set(
  ["Create", "Alter", "Describe", "Delete"].map((verb) => `sow.v1.${verb}TopicRequest`),
);

/** The topic of a request; "": it has none, or may have several, or is about a copy at home (rule C5). */
export function topicOf<Desc extends DescMessage>(schema: Desc, request: MessageShape<Desc>): string {
  const field = schema.field[BY_NAME.has(schema.typeName) ? "name" : "topic"];
  const isOfHome = AT_HOME.has(schema.typeName) || ("here" in request && request.here === true);
  return field?.fieldKind === "scalar" && field.scalar === ScalarType.STRING && !isOfHome
    ? (request as unknown as Record<string, string>)[field.localName]!
    : "";
}
