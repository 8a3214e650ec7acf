/** The client: what a program calls. `requests` makes the requests, `Transport` the calls. */

import { randomBytes } from "node:crypto";
import {
  create,
  type DescMessage,
  type DescMethodUnary,
  type MessageInitShape,
  type MessageShape,
} from "@bufbuild/protobuf";
import { checkMessage, list, milliseconds } from "./arguments.js";
import { Cells, type Place, topicOf, type Way } from "./cells.js";
import { DEFAULT_SERVER, fromEnvironment, type Tls, type Token } from "./channel.js";
import { cut, invalid, malformed, type Refusal, SowError } from "./errors.js";
import { Forms } from "./forms.js";
import { AccessService, type Session } from "./gen/sow/v1/access_pb.js";
import { type ActiveSubscription, AdminService, type Durable, type Topic } from "./gen/sow/v1/admin_pb.js";
import { type GetLoadResponse, LoadService } from "./gen/sow/v1/load_pb.js";
import {
  type PublishRequest,
  type PublishResponse,
  PublishStreamRequestSchema,
  type QueryRequest,
  type SowDeleteResponse,
  SowService,
} from "./gen/sow/v1/sow_pb.js";
import { ErrorReason } from "./gen/sow/v1/types_pb.js";
import { JoinedCore } from "./joined.js";
import { type CellCalls, JoinedSubscription, Parts } from "./joining.js";
import { type Key, recordKey, recordKeys } from "./keys.js";
import { needed, REMOVALS } from "./needs.js";
import { type Document, encode, encodedAs, JSON_FORM, needsForm } from "./payloads.js";
import { randomToken } from "./positions.js";
import { PublishCore, Publisher } from "./publisher.js";
import { QueryResult } from "./query.js";
import { type Deleted, type JsonObject, onlyOutcome, outcomes, type Published, recordOf, type StoredRecord } from "./records.js";
import {
  type CountOptions,
  createViewRequest,
  type DeleteOptions,
  deleteRequest,
  type DeltaOptions,
  fitting,
  type LiveResultOptions,
  liveResultRequest,
  projection,
  type PublisherOptions,
  type PublishManyOptions,
  type PublishOptions,
  publishRequest,
  type QueryOptions,
  queryRequest,
  type ReadOptions,
  RECORDS_PER_REQUEST_MAX,
  startsOfCells,
  streamDefaults,
  type SubscribeOptions,
  subscribeRequest,
  type Topics,
  type TouchOptions,
  touchRequest,
  type TransactionOptions,
  unsetOf,
  type ViewOptions,
} from "./requests.js";
import { LiveResult } from "./results.js";
import type { Instance } from "./search.js";
import { type FollowingOptions, type OpenSubscription, RETRY_FOR_MS, Subscription } from "./subscription.js";
import { Transaction } from "./transaction.js";
import { type Frames, type OnFailover, RECONNECT_MS, type Repeats, Transport } from "./transport.js";

export interface ClientOptions {
  /** TLS to the server, with `{}` for the authorities that Node trusts; without it: plain text. */
  readonly tls?: Tls;
  /** Shown with each call. It never goes to another machine in plain text. */
  readonly token?: Token;
  /** Bounds each call that has one answer. 30 s. */
  readonly timeoutMs?: number;
  /**
   * Bounds the wait for a connection. Without it that is 5 s, and the first call does not wait where the server refuses,
   * or all of several do.
   */
  readonly connectTimeoutMs?: number;
  /** With several addresses: called once for each move. Reads may be older from then on (rule F3). */
  readonly onFailover?: OnFailover;
}

/** An entry of a list over all cells, with the name of its cell; "" where there is one server. */
export type InCell<Item> = Item & { readonly cell: string };

interface ListOptions {
  /** Only those of this topic. */
  readonly topic?: string;
}

/** A subscription to a topic, or to all topics that match a pattern. */
export type Followed<T = JsonObject> = Subscription<T> | JoinedSubscription<T>;

type SnapshotOptions = Omit<SubscribeOptions, "start">;

/**
 * The calls. As it is, it is one of `Client.cells`: it uses the connections of that client, ends with it, and stays in its
 * cell.
 */
export class CellClient {
  readonly #cells: Cells<Transport>;
  readonly #connectTimeoutMs: number;
  readonly #forms: Forms;
  readonly #parts = new Map<Place<Transport>, CellClient>();

  /** Made by `Client`. */
  protected constructor(cells: Cells<Transport>, connectTimeoutMs: number) {
    this.#cells = cells;
    this.#connectTimeoutMs = connectTimeoutMs;
    this.#forms = new Forms((name) => this.#unary(AdminService.method.describeTopic, { name }, "reads"));
  }

  /**
   * The instance in use; undefined before the first call, and where the client has one address. Of several cells it is that
   * of the client's own.
   */
  get instance(): Instance | undefined {
    return this.#cells.home.transport.instance;
  }

  // ---- several cells ----

  /**
   * All cells of the name space, as the server names them: a client of each, by its name (rule C19). Where there are none,
   * "" has this client. Each of the others stays in its cell: its `topics` are those of that cell, and it throws
   * TOPIC_ELSEWHERE for a topic of another one.
   */
  async cells(): Promise<ReadonlyMap<string, CellClient>> {
    if (this.#cells.isOne) {
      return new Map([[this.#cells.home.cell, this]]);
    }
    return new Map([...(await this.#places())].map(([cell, place]) => [cell, this.#part(cell, place)]));
  }

  #part(cell: string, place: Place<Transport>): CellClient {
    const made = cell === "" ? this : this.#parts.get(place);
    if (made !== undefined) {
      return made;
    }
    const part = new CellClient(new Cells(place.transport, undefined, cell), this.#connectTimeoutMs);
    this.#parts.set(place, part);
    return part;
  }

  /**
   * All topics of all cells, by name. It is whole: if a cell does not answer, it throws its error, with the name of the cell
   * (rule C19).
   */
  async topics({ withStatistics = false }: { withStatistics?: boolean } = {}): Promise<InCell<Topic>[]> {
    const answers = await this.#everywhere(AdminService.method.listTopics, { withStatistics });
    return joined(answers, ({ topics }) => topics, ({ name }) => [name]);
  }

  /** The durable subscriptions of a topic, or of all topics of all cells, by topic and name; as `topics` (rule C19). */
  async durables({ topic = "", withFigures = false }: ListOptions & { withFigures?: boolean } = {}): Promise<InCell<Durable>[]> {
    const answers = await this.#everywhere(AdminService.method.listDurables, { topic, withFigures });
    return joined(answers, ({ durables }) => durables, (durable) => [durable.topic, durable.name]);
  }

  /**
   * The loads of a topic, or of all topics of all cells, also those that ended within the last day, in the order of their
   * begin; as `topics` (rule C19). A call about one of them is made in its cell.
   */
  async loads({ topic = "" }: ListOptions = {}): Promise<InCell<GetLoadResponse>[]> {
    const answers = await this.#everywhere(LoadService.method.listLoads, { topic });
    return joined(answers, ({ loads }) => loads, ({ openTimeMicros }) => [openTimeMicros]);
  }

  /**
   * The subscriptions to a topic, or all in all cells, that are under way, in the order of their begin; as `topics` (rule
   * C19). An id is of its cell: `(await client.cells()).get(one.cell)!.call(AdminService.method.endSubscription, { id })`.
   */
  async subscriptions({ topic = "" }: ListOptions = {}): Promise<InCell<ActiveSubscription>[]> {
    const answers = await this.#everywhere(AdminService.method.listSubscriptions, { topic });
    return joined(answers, ({ subscriptions }) => subscriptions, ({ sinceMicros }) => [sinceMicros]);
  }

  /** The callers that have calls under way, in all cells, in the order of their begin; as `topics` (rule C19). */
  async sessions(): Promise<InCell<Session>[]> {
    const answers = await this.#everywhere(AccessService.method.listSessions, {});
    return joined(answers, ({ sessions }) => sessions, ({ sinceMicros }) => [sinceMicros]);
  }

  async #places(): Promise<ReadonlyMap<string, Place<Transport>>> {
    try {
      return this.#cells.placed(await this.#unary(AdminService.method.getPlacement, {}, "reads"));
    } catch (error) {
      if (error instanceof SowError && error.reason === "UNIMPLEMENTED") {
        return this.#cells.placed(undefined); // it is too old to have one
      }
      throw error;
    }
  }

  /**
   * The answers of all cells to a request that changes nothing, by their names, or the error of the first that has not
   * answered. A request with a topic goes to its cell alone.
   */
  async #everywhere<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    init: MessageInitShape<I>,
  ): Promise<(readonly [cell: string, answer: MessageShape<O>])[]> {
    const { home, isOne } = this.#cells;
    const request = create(method.input, init) as MessageInitShape<I>;
    const topic = topicOf(method.input, request as MessageShape<I>);
    const along = this.#cells.way(topic);
    const own = this.#unary(method, request, "reads", { along });
    if (isOne || topic !== "") {
      const answer = await own;
      const isNamed = isOne || along.place !== home;
      return [[isNamed ? along.place.cell : nameOf(home, await this.#places()), answer]];
    }
    own.catch(() => undefined); // it is awaited in its turn
    const places = [...(await this.#places())];
    return await Promise.all(
      places.map(async ([cell, place]) => {
        const answer = place === home ? own : this.#unary(method, request, "reads", { along: this.#cells.at(place) });
        return [cell, await answer] as const;
      }),
    );
  }

  // ---- writing ----

  /** Publishes one record (rule P1). Throws the error of a refusal, such as InvalidArgument or ConditionFailed. */
  async publish(topic: string, data: Document, options: PublishOptions = {}): Promise<Published> {
    return onlyOutcome(await this.#publish(await this.#single(topic, data, options)));
  }

  /** Merges fields into the live record of a key; without one it is a publish (rule P2). */
  async deltaPublish(topic: string, data: Document, { unset, ...options }: DeltaOptions = {}): Promise<Published> {
    const request = await this.#single(topic, data, options);
    request.delta = true;
    request.unsetPaths = unsetOf(unset);
    return onlyOutcome(await this.#publish(request));
  }

  /**
   * Publishes documents in order and returns the outcome of each (rule P4). Many documents take several requests, unless
   * they are atomic. For a long stream a `publisher` is several times faster.
   */
  async publishMany(
    topic: string,
    documents: Iterable<Document>,
    { keys, atomic = false, ...options }: PublishManyOptions = {},
  ): Promise<(Published | Refusal)[]> {
    const form = await this.#forms.of(topic);
    const given = list(documents, "documents", "documents");
    const payloads = given.map((document) => encode(document, form));
    const encoded = given.map((document) => encodedAs(document, form)).find((name) => name !== "") ?? "";
    const texts = keys === undefined ? undefined : recordKeys(keys);
    if (texts !== undefined && texts.length !== payloads.length) {
      throw invalid("keys", `there are ${texts.length} for ${payloads.length} documents`);
    }
    const results: (Published | Refusal)[] = [];
    while (results.length < payloads.length) {
      const firstIndex = results.length;
      const last = results.at(-1);
      if (last?.refused && PASSING_REASONS.has(last.reason)) {
        results.push({ refused: true, index: firstIndex, ...NOT_SENT });
        continue;
      }
      const count = atomic ? payloads.length : fitting(payloads, firstIndex);
      const end = firstIndex + count;
      const request = publishRequest(topic, payloads.slice(firstIndex, end), options, texts?.slice(firstIndex, end));
      request.atomic = atomic;
      request.encodedAs = encoded;
      results.push(...outcomes(await this.#publish(request), count, { firstIndex, atomic }));
    }
    return results;
  }

  /**
   * Puts and removals that are applied together, or not at all: at most 1,000, of one topic (rules P4, P11). So a record
   * moves from one key to another, and nobody sees both or none of them:
   *
   *     const change = client.transaction("orders");
   *     change.remove("new-7");
   *     change.publish({ id: "filled-7", price: 9.5 });
   *     await change.commit();
   */
  transaction(topic: string, options: TransactionOptions = {}): Transaction {
    return new Transaction(topic, options, {
      form: () => this.#forms.of(topic),
      send: async (request) => outcomes(await this.#publish(request), request.records.length, { atomic: true }),
    });
  }

  /** A buffered, pipelined, ordered stream of publishes. */
  publisher(topic: string, options: PublisherOptions = {}): Publisher {
    const { batchRecords = 1_000, maxInFlight = 16, publisherId, onAck, onRefusal } = options;
    const lingerMs = milliseconds(options.lingerMs ?? 20, "lingerMs");
    const retryForMs = milliseconds(options.retryForMs ?? 30_000, "retryForMs");
    const connectTimeoutMs = this.#connectTimeoutMs;
    const defaults = streamDefaults(topic, options);
    checkMessage(PublishStreamRequestSchema, defaults);
    const needs = needed(PublishStreamRequestSchema, defaults);
    const way = this.#cells.way(topic);
    const pace = {
      ...{ batchRecords, maxInFlight, retryForMs, connectTimeoutMs },
      get elsewhere() {
        return way.place.transport.isOfMany;
      },
    };
    const core = new PublishCore(
      defaults,
      pace,
      publisherId ?? `publisher-${randomBytes(8).toString("hex")}`,
      publisherId === undefined ? { publisherEpoch: 1n, publisherToken: randomToken() } : undefined,
      way,
    );
    const nextEpoch = async () => {
      const { openPublisher } = SowService.method;
      const request = { publisherId: publisherId! };
      const { publisherEpoch, publisherToken } = await way.place.transport.unary(openPublisher, request, "unsent");
      return { publisherEpoch, publisherToken };
    };
    return new Publisher(
      core,
      (removes) =>
        way.place.transport.duplex(
          SowService.method.publishStream,
          "the answers to the publisher",
          RECONNECT_MS,
          removes ? REMOVALS : needs,
        ),
      {
        lingerMs,
        form: (isOld) => {
          if (isOld) {
            this.#forms.forget(topic);
          }
          return this.#forms.of(topic);
        },
        nextEpoch,
        onAck,
        onRefusal,
      },
    );
  }

  /** Gives a live record a new lifetime (rule P8); without one given, the one that the topic has for "absent". */
  async touch(topic: string, key: Key, options: TouchOptions = {}): Promise<Published> {
    return onlyOutcome(await this.#unary(SowService.method.touch, touchRequest(topic, key, options), "unsent"));
  }

  /** Removes the lifetime of a live record (rule P8). */
  async persist(topic: string, key: Key): Promise<Published> {
    return await this.touch(topic, key, { ttl: "never" });
  }

  /**
   * Deletes records by keys, by filter, by document, or all (rules D1, D2). When its connection breaks, it throws: it may
   * have deleted a part.
   */
  async delete(topic: string, options: DeleteOptions): Promise<Deleted> {
    const what = "the progress of the delete";
    const payload = options.data === undefined ? undefined : await this.#forms.encoded(topic, options.data);
    const request = deleteRequest(topic, options, payload);
    const way = this.#cells.way(topic);
    for (let begun = false; ; ) {
      let frames: Frames<SowDeleteResponse> | undefined;
      try {
        frames = await way.place.transport.stream(SowService.method.sowDelete, request, what);
        for (;;) {
          const { done, value } = await frames.next();
          if (done) {
            throw cut(what);
          }
          begun = true;
          if (value.done) {
            const { matched, deleted, lastSequence, absentFields } = value;
            return { matched, deleted, lastSequence, absentFields };
          }
        }
      } catch (error) {
        if (payload !== undefined) {
          this.#forms.forget(topic); // it may have been made anew, with another type
        }
        await way.follow(error, begun);
      } finally {
        frames?.cancel();
      }
    }
  }

  // ---- reading ----

  /** The live record of a key; null when there is none. */
  async get<T = JsonObject>(topic: string, key: Key, options: ReadOptions = {}): Promise<StoredRecord<T> | null> {
    const [record] = await this.getMany<T>(topic, [recordKey(key)], options);
    return record ?? null;
  }

  /** The live records of keys, in their order; keys without one are left out. */
  async getMany<T = JsonObject>(topic: string, keys: Iterable<Key>, options: ReadOptions = {}): Promise<StoredRecord<T>[]> {
    const every = recordKeys(keys);
    const select = projection(options);
    const { minPosition = "" } = options;
    const found: StoredRecord<T>[] = [];
    for (let first = 0; first < every.length; first += RECORDS_PER_REQUEST_MAX) {
      const chunk = every.slice(first, first + RECORDS_PER_REQUEST_MAX);
      const request = { topic, keys: chunk, minPosition, ...(select === undefined ? {} : { select }) };
      const { records } = await this.#unary(SowService.method.get, request, "reads");
      found.push(...records.map((record) => recordOf<T>(record)));
    }
    return found;
  }

  /** The live records of a topic that match `filter`, from one instant (rules Q1, Q2). */
  query<T = JsonObject>(topic: string, filter = "", options: QueryOptions = {}): QueryResult<T> {
    return this.#queried<T>(queryRequest(topic, filter, options));
  }

  /** The number of live records of a topic, or of those that match `filter`. */
  async count(
    topic: string,
    filter = "",
    { onAbsentFields, ...options }: CountOptions = {},
  ): Promise<bigint> {
    const result = this.#queried({ ...queryRequest(topic, filter, options), countOnly: true });
    if ((await result.all()).length > 0) {
      throw malformed("records, where only their number was asked for");
    }
    const { matched, absentFields } = result.footer!;
    if (absentFields.length > 0) {
      onAbsentFields?.(absentFields);
    }
    return matched;
  }

  #queried<T>(request: QueryRequest): QueryResult<T> {
    const way = this.#cells.way(request.topic);
    const open = () => way.place.transport.stream(SowService.method.query, request, QUERY);
    return new QueryResult<T>(request.topic, open, way);
  }

  // ---- following ----

  /**
   * The changes of a topic, or of all that match a pattern, from now or from `start` on (rules S1 to S7). Resolves once it is
   * established. A pattern has the topics of all cells (rule C21).
   */
  async subscribe<T = JsonObject>(topic: string, options?: SubscribeOptions): Promise<Subscription<T>>;
  async subscribe<T = JsonObject>(topics: Topics, options?: SubscribeOptions): Promise<Followed<T>>;
  async subscribe<T>(topics: Topics, options: SubscribeOptions = {}): Promise<Followed<T>> {
    return await this.#subscribe<T>(topics, options, false);
  }

  /**
   * First the records that match, then every change after them, without a gap or a repeat. Of a pattern, over several cells,
   * "snapshot_end" comes once those of all cells are in, and a "resync" names the topic whose records are to be forgotten.
   */
  async sowAndSubscribe<T = JsonObject>(topic: string, options?: SnapshotOptions): Promise<Subscription<T>>;
  async sowAndSubscribe<T = JsonObject>(topics: Topics, options?: SnapshotOptions): Promise<Followed<T>>;
  async sowAndSubscribe<T>(topics: Topics, options: SnapshotOptions = {}): Promise<Followed<T>> {
    return await this.#subscribe<T>(topics, options, true);
  }

  /**
   * The list that a query finds, kept right by the server: in the order of `orderBy` the first `topN` records behind the
   * first `skipN`. Resolves once the list is there. With `groupBy` or `aggregate` it is the list of the results of groups
   * (rules S10, S11, S13).
   *
   *     const best = await client.liveResult("orders", "/open = true", { orderBy: "/price DESC", topN: 20 });
   *     for await (const change of best) { if (change.bookmark !== null) show(best.list()); }
   */
  async liveResult<T = JsonObject>(
    topic: string,
    filter = "",
    options: LiveResultOptions = {},
  ): Promise<LiveResult<T>> {
    const request = liveResultRequest(topic, filter, options);
    const way = this.#cells.way(topic);
    return await new LiveResult<T>(request, this.#subscribing(way), this.#following(way, options)).opened();
  }

  async #subscribe<T>(topics: Topics, options: SubscribeOptions, sow: boolean): Promise<Followed<T>> {
    const isJoined = typeof topics !== "string" && !this.#cells.isOne;
    const starts = isJoined ? startsOfCells(options.start) : undefined;
    const { start, ...others } = options;
    const request = subscribeRequest(topics, starts === undefined ? options : others, sow);
    const way = this.#cells.way(request.topic);
    const following = this.#following(way, options);
    if (!isJoined) {
      return await new Subscription<T>(request, this.#subscribing(way), following).opened();
    }
    const { retryForMs, connectTimeoutMs, onInterruption } = following;
    const core = new JoinedCore<T>(request, starts, { retryForMs, connectTimeoutMs, onInterruption });
    return await new JoinedSubscription<T>(core, new Parts(core, this.#cellCalls(), following)).opened();
  }

  #cellCalls(): CellCalls<Place<Transport>> {
    const at = (place: Place<Transport>) => this.#cells.at(place);
    return {
      places: async () => {
        const all = await this.#places();
        return { home: nameOf(this.#cells.home, all), all };
      },
      version: async (place) =>
        (await this.#unary(AdminService.method.getPlacement, {}, "reads", { along: at(place) })).version,
      open: (place, request, withinMs) => this.#subscribing(at(place))(request, withinMs),
      isOfMany: ({ transport }) => transport.isOfMany,
    };
  }

  #subscribing(way: Way<Transport>): OpenSubscription {
    const { subscribe } = SowService.method;
    return (request, withinMs) =>
      way.place.transport.stream(subscribe, request, "the subscription", undefined, withinMs);
  }

  #following(
    way: Way<Transport>,
    { retryForMs, onInterruption }: Pick<SubscribeOptions, "retryForMs" | "onInterruption">,
  ): FollowingOptions {
    return {
      retryForMs: milliseconds(retryForMs ?? RETRY_FOR_MS, "retryForMs"),
      connectTimeoutMs: this.#connectTimeoutMs,
      onInterruption,
      way,
      get elsewhere() {
        return way.place.transport.isOfMany;
      },
    };
  }

  // ---- everything else ----

  /**
   * Creates a view: a topic whose records follow from those of `source`, in each commit (rules V1 to V6). Until it is
   * built, reads of it throw Unavailable with VIEW_BUILDING.
   *
   *     await client.createView("positions", { source: "orders", groupBy: ["/account"], select: { qty: "SUM(/qty)" } });
   */
  async createView(name: string, options: ViewOptions): Promise<void> {
    await this.call(AdminService.method.createTopic, createViewRequest(name, options));
  }

  /**
   * Makes any call of the contract that has one answer, with the types of `sow-client/contract`:
   *
   *     await client.call(AdminService.method.createTopic, { name: "orders", settings: { key: ["/id"] } });
   *
   * It is made again if it changes nothing, or, with one address, if it was certainly not sent. With a topic it goes to the
   * cell of that topic.
   */
  async call<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageInitShape<I>,
  ): Promise<MessageShape<O>> {
    const isRead = READS.has(method.name);
    const ofMany = isRead ? "reads" : "never"; // at another instance it may mean something else
    return await this.#unary(method, request, isRead ? "reads" : "unsent", { ofMany });
  }

  /**
   * Makes a call in the cell of its topic, or `along` a way. `ofMany`: how it is made again where its cell has several
   * instances.
   */
  async #unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    init: MessageInitShape<I>,
    repeats: Repeats,
    { ofMany = repeats, along }: { ofMany?: Repeats; along?: Way<Transport> } = {},
  ): Promise<MessageShape<O>> {
    const request = create(method.input, init);
    const way = along ?? this.#cells.way(topicOf(method.input, request));
    for (;;) {
      const { transport } = way.place;
      try {
        return await transport.unary(method, request as MessageInitShape<I>, transport.isOfMany ? ofMany : repeats);
      } catch (error) {
        await way.follow(error);
      }
    }
  }

  async #single(topic: string, data: Document, { key, ...options }: PublishOptions): Promise<PublishRequest> {
    const form = needsForm(data) ? await this.#forms.of(topic) : JSON_FORM;
    const request = publishRequest(topic, [encode(data, form)], options, key === undefined ? undefined : [key]);
    request.encodedAs = encodedAs(data, form);
    return request;
  }

  async #publish(request: PublishRequest): Promise<PublishResponse> {
    // Another instance does not know whether the condition held when the lost one decided.
    const isConditional = request.records.some((record) => record.condition !== undefined);
    const way = this.#cells.way(request.topic);
    for (;;) {
      const { transport, positions } = way.place;
      const position = positions.take();
      request.publisher = position;
      try {
        const repeats = isConditional && transport.isOfMany ? "unsent" : "again";
        const response = await transport.unary(SowService.method.publish, request, repeats);
        if (response.results.some(({ refusal }) => refusal?.reason === ErrorReason.PAYLOAD_MALFORMED)) {
          this.#forms.forget(request.topic);
        }
        return response;
      } catch (error) {
        await way.follow(error);
      } finally {
        positions.giveBack(position, request.records.length);
      }
    }
  }
}

/**
 * A client of one server, or of several instances that replicate to each other, or of one of several cells: then it follows
 * a topic to its cell (rule C10). Close it: an open one keeps Node running.
 */
export class Client extends CellClient {
  readonly #all: Cells<Transport>;

  /**
   * `server` is HOST or HOST:PORT, or a list of instances: "a:7450,b:7450" or an array. The client uses one of them at a
   * time, the first that serves, and goes on at the next when that is lost (rule F1).
   */
  constructor(server: string | readonly string[] = DEFAULT_SERVER, options: ClientOptions = {}) {
    const { tls, token, onFailover } = options;
    const timeoutMs = milliseconds(options.timeoutMs ?? 30_000, "timeoutMs");
    const connectTimeoutMs = milliseconds(options.connectTimeoutMs ?? 5_000, "connectTimeoutMs");
    const isPatient = options.connectTimeoutMs !== undefined;
    const opened = (servers: string | readonly string[]): Transport =>
      new Transport({ server: servers, tls, token, timeoutMs, connectTimeoutMs, isPatient, onFailover });
    const cells = new Cells(opened(server), opened);
    super(cells, connectTimeoutMs);
    this.#all = cells;
  }

  /**
   * A client as the environment says: SOW_SERVER, SOW_TOKEN_FILE, SOW_TLS_CA, SOW_TLS_CERT, SOW_TLS_KEY,
   * SOW_TLS_SERVER_NAME, as for the command `sow`.
   */
  static fromEnvironment(options: Omit<ClientOptions, "tls" | "token"> = {}): Client {
    const { server, ...credentials } = fromEnvironment(process.env);
    return new Client(server, { ...credentials, ...options });
  }

  /** Closes the connections to all cells; calls in progress end. */
  close(): void {
    this.#all.close().forEach((transport) => transport.close());
  }
}

function nameOf<P>(place: P, all: ReadonlyMap<string, P>): string {
  return [...all].find(([, one]) => one === place)?.[0] ?? "";
}

/** One list of those of all cells. Each entry gets its cell, and `order` has that of several cells. */
function joined<Answer, Item extends object>(
  answers: readonly (readonly [cell: string, answer: Answer])[],
  items: (answer: Answer) => readonly Item[],
  order: (item: Item) => readonly (string | bigint)[],
): InCell<Item>[] {
  const found = answers.flatMap(([cell, answer]) => items(answer).map((item) => Object.assign(item, { cell })));
  if (answers.length === 1) {
    return found;
  }
  return found.sort((one, other) => {
    const others = order(other);
    const [mine, theirs] = order(one).map((part, index) => [part, others[index]!]).find(([a, b]) => a !== b) ?? [0, 0];
    return mine! < theirs! ? -1 : mine! > theirs! ? 1 : 0;
  });
}

const QUERY = "the answer to the query";

/** Calls that change nothing. */
const READS: ReadonlySet<string> = new Set([
  "CheckAccess",
  "DescribeDurable",
  "DescribeTopic",
  "Get",
  "GetPlacement",
  "GetPolicy",
  "GetReplicationStatus",
  "GetStatus",
  "ListDurables",
  "ListLoads",
  "ListPolicies",
  "ListSessions",
  "ListSubscriptions",
  "ListTopics",
  "WhoAmI",
]);

/** Reasons that may pass: the refused record and all after it in the request were not applied (rule P6). */
const PASSING_REASONS: ReadonlySet<string> = new Set([
  "OVERLOADED",
  "WRITE_STALLED",
  "DISK_FULL",
  "STORE_FAILED",
  "STOPPING",
  "STREAM_BROKEN",
  "BACKLOG_QUOTA_EXCEEDED",
]);
const NOT_SENT = {
  reason: "STREAM_BROKEN",
  message: "an earlier record was refused for a passing reason; this one was not sent",
  currentVersion: 0n,
};
