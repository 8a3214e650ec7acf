/**
 * A client's way to its server, or to one of several: the channels, the calls, and the moves (rules F1 to F3).
 *
 *   [1]  A call to a server that is not there fails as Unavailable (UNREACHABLE) after `connectTimeoutMs`, not after the
 *        call's own deadline.
 *   [2]  A client with several addresses uses an instance that said that it serves, and keeps a call open there that
 *        tells when that ends. One search runs at a time; all who wait use its result.
 *   [3]  `onFailover` is called once for each move.
 *   [4]  A call is made again only where a repetition changes nothing, or where it certainly was not applied.
 *   [5]  A client that was given no `connectTimeoutMs`, and has not been connected yet, does not wait on where the server
 *        refuses twice. A server that says nothing has not refused.
 *   [6]  A request with a field that an older server would ignore is not sent to one (needs [1]).
 *   [7]  TOPIC_ELSEWHERE is thrown only if no attempt of the call may have been applied: else the caller would make the
 *        change once more, in the other cell.
 */

import { setTimeout as pause } from "node:timers/promises";
import { type ChannelInterface, Client as Stub, connectivityState } from "@grpc/grpc-js";
import {
  create,
  type DescMessage,
  type DescMethodBiDiStreaming,
  type DescMethodServerStreaming,
  type DescMethodUnary,
  fromBinary,
  type MessageInitShape,
  type MessageShape,
  toBinary,
} from "@bufbuild/protobuf";
import { checkMessage } from "./arguments.js";
import { ELSEWHERE } from "./cells.js";
import { addressesOf, Bearer, channelCredentials, channelOptions, type Tls, type Token } from "./channel.js";
import { AllRefused, closed, errorOfReason, invalid, NoAnswer, SowError, Unavailable } from "./errors.js";
import { AdminService } from "./gen/sow/v1/admin_pb.js";
import { needed, type Needed, tooOld, UNDESCRIBED } from "./needs.js";
import { type Instance, LOSSES, noServer, search } from "./search.js";
import {
  Backoff,
  callError,
  CUT_REASONS,
  errorOfStatus,
  MESSAGE_BYTES_MAX,
  neverSent,
  REFUSED_MS,
  streamError,
} from "./statuses.js";

/**
 * Whether a call that has failed is made again ([4]): as it only reads; as it is applied once however often it comes; if it
 * was not sent; never.
 */
export type Repeats = "reads" | "again" | "unsent" | "never";

/** Gets the instance that was left, the one now in use, and the reason, such as "UNREACHABLE". */
export type OnFailover = (left: Instance, used: Instance, reason: string) => void;

/** Publishers and subscriptions repeat their attempts, so each attempt waits only this long for a connection. */
export const RECONNECT_MS = 500;
const LOOK_AGAIN_MS = 1_000;
const ATTEMPTS_MAX = 5;
const PROBE_MS = 200;
const WATCH_MS_MAX = 60_000; // timers of Node end at once where they are longer than 24 days
const HEALTH_CHECK = { parent: { typeName: "grpc.health.v1.Health" }, name: "Check" } as const;
/** The request for the health of sow's service. An older server, which does not describe itself, answers it. */
const HEALTH_OF_SOW = Buffer.from("\n\x11sow.v1.SowService", "latin1");

/** The channel to one address, and what is known of the instance there. */
export class Line {
  readonly address: string;
  readonly stub: Stub;
  instance: Instance | undefined;
  /** The contract of the server of the present connection; 0: not known. */
  contract = 0;
  /** It has been connected. */
  wasConnected = false;
  /** Ends the call that tells when the instance no longer serves. */
  endWatch: (() => void) | undefined;
  /** The subscriptions here; each is ended by its function, and then begins again. */
  readonly followers = new Set<() => void>();

  constructor(address: string, stub: Stub) {
    this.address = address;
    this.stub = stub;
  }
}

/** A stream of answers. */
export interface Frames<Answer> {
  readonly line: Line;
  next(): Promise<IteratorResult<Answer, undefined>>;
  cancel(): void;
}

/** A stream in both directions. */
export interface Duplex<Request, Answer> extends Frames<Answer> {
  /** Resolves once another request may be written. Never rejects: the answers tell why a stream has ended. */
  write(request: Request): Promise<void>;
  end(): void;
}

export interface TransportOptions {
  readonly server: string | readonly string[];
  readonly tls: Tls | undefined;
  readonly token: Token | undefined;
  readonly timeoutMs: number;
  readonly connectTimeoutMs: number;
  /** The first call waits for `connectTimeoutMs` although the server refuses ([5]). */
  readonly isPatient: boolean;
  readonly onFailover: OnFailover | undefined;
}

/** Owns the lines of a client. */
export class Transport {
  readonly #options: TransportOptions;
  readonly #bearer: Bearer;
  readonly #lines: ReadonlyMap<string, Line>;
  readonly #closing = new AbortController();
  readonly #calls = new Set<{ cancel(): void }>(); // under way; closing a channel of gRPC does not end them
  #current: Line | undefined;
  #last: Line | undefined;
  #lost = "";
  #cluster = "";
  #searching: Promise<Line> | undefined;
  #lookAgainAt = 0;

  /** Throws InvalidArgument. */
  constructor(options: TransportOptions) {
    this.#options = options;
    const servers = addressesOf(options.server);
    this.#bearer = new Bearer(options.token, servers, options.tls);
    const credentials = channelCredentials(options.tls);
    const line = (server: string): Line =>
      new Line(server, new Stub(server, credentials, channelOptions(server, options.tls, servers.length > 1)));
    this.#lines = new Map(servers.map((server) => [server, line(server)]));
    this.#current = servers.length === 1 ? this.#lines.get(servers[0]!) : undefined;
  }

  get isClosed(): boolean {
    return this.#closing.signal.aborted;
  }

  /** The client has several addresses. */
  get isOfMany(): boolean {
    return this.#lines.size > 1;
  }

  /** The instance in use; undefined before the first call, and where the client has one address. */
  get instance(): Instance | undefined {
    return this.isOfMany ? this.#current?.instance : undefined;
  }

  /** Closes the channels; calls in progress end. */
  close(): void {
    this.#closing.abort();
    this.#calls.forEach((call) => call.cancel());
    for (const line of this.#lines.values()) {
      line.endWatch?.();
      line.stub.close();
    }
  }

  /** The line for a call, once the call can be made ([1]). `needs`: what its server has to know ([6]). */
  async line(withinMs = this.#options.connectTimeoutMs, needs?: Needed): Promise<Line> {
    const line = await this.#ready(Math.min(withinMs, this.#options.connectTimeoutMs));
    if (needs !== undefined) {
      const contract = line.contract || (await this.#contractAt(line));
      if (contract < needs.contract) {
        throw tooOld(needs, line.address, contract);
      }
    }
    return line;
  }

  async #ready(limitMs: number): Promise<Line> {
    this.#check();
    const line = this.#current;
    if (!this.isOfMany) {
      await this.#connected(line!, limitMs);
      return line!;
    }
    if (line !== undefined && (line.instance!.serving || performance.now() < this.#lookAgainAt)) {
      return line;
    }
    return await this.#found(limitMs);
  }

  /** The contract of the only server, asked for once for a connection: the next one may lead to an older server. */
  async #contractAt(line: Line): Promise<number> {
    const channel = line.stub.getChannel();
    channel.watchConnectivityState(connectivityState.READY, Infinity, () => {
      line.contract = 0;
    });
    const found = await this.#describe(line, this.#options.connectTimeoutMs);
    if (!(found instanceof SowError)) {
      line.contract = found.contract;
    } else if (found.reason !== "NO_SOW_SERVER") {
      throw found;
    } else {
      await this.#ask(line, HEALTH_CHECK, HEALTH_OF_SOW, this.#options.connectTimeoutMs).catch((error: unknown) => {
        throw CUT_REASONS.has(errorOfStatus(error).reason) ? callError(error) : found;
      });
      line.contract = UNDESCRIBED;
    }
    return line.contract;
  }

  /** Makes a call with one answer. */
  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    init: MessageInitShape<I>,
    repeats: Repeats,
  ): Promise<MessageShape<O>> {
    const request = create(method.input, init);
    const [bytes, needs] = [encoded(method.input, request), needed(method.input, request)];
    const backoff = new Backoff();
    backoff.begin(performance.now());
    let unknown: SowError | undefined; // why the outcome of an attempt is not known
    for (let attempt = 1; ; attempt++) {
      const line = await this.line(undefined, needs);
      try {
        return fromBinary(method.output, await this.#ask(line, method, bytes));
      } catch (error) {
        const translated = this.isClosed ? closed("client") : callError(error);
        this.doubt(line, translated);
        if (translated.reason === ELSEWHERE && unknown !== undefined) {
          throw unknown;
        }
        if (repeats !== "reads" && translated.reason !== "STOPPING" && !neverSent(error)) {
          unknown = translated;
        }
        const delayMs = backoff.delay(translated, {
          nowMs: performance.now(),
          jitter: Math.random(),
          limitMs: this.#options.timeoutMs,
        });
        if (attempt === ATTEMPTS_MAX || delayMs === undefined || !this.#mayRepeat(error, translated, repeats)) {
          throw translated;
        }
        await this.#sleep(delayMs);
      }
    }
  }

  /** Begins a call that is answered by a stream; it has no deadline. `what` names the answers in errors. */
  async stream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageShape<I>,
    what: string,
    line?: Line,
    withinMs?: number,
  ): Promise<Frames<MessageShape<O>>> {
    const bytes = encoded(method.input, request);
    const metadata = await this.#bearer.metadata();
    const chosen = line ?? (await this.line(withinMs, needed(method.input, request)));
    this.#check();
    const call = chosen.stub.makeServerStreamRequest(pathOf(method), asIs, asIs, bytes, metadata);
    return { line: chosen, ...this.#answers(chosen, call, method.output, what) };
  }

  /** Begins a stream in both directions. */
  async duplex<I extends DescMessage, O extends DescMessage>(
    method: DescMethodBiDiStreaming<I, O>,
    what: string,
    withinMs: number,
    needs: Needed | undefined,
  ): Promise<Duplex<MessageShape<I>, MessageShape<O>>> {
    const metadata = await this.#bearer.metadata();
    const line = await this.line(withinMs, needs);
    this.#check();
    const call = line.stub.makeBidiStreamRequest(pathOf(method), asIs, asIs, metadata);
    const over = new Promise<void>((resolve) => {
      for (const event of ["error", "end", "close"]) {
        call.once(event, () => resolve());
      }
    });
    return {
      line,
      ...this.#answers(line, call, method.output, what),
      write: async (request) => {
        if (!call.write(toBinary(method.input, request))) {
          await Promise.race([over, new Promise<void>((resolve) => call.once("drain", () => resolve()))]);
        }
      },
      end: () => call.end(),
    };
  }

  /** A call has failed: if its instance may be lost, the next call looks for one. */
  doubt(line: Line, error: SowError): void {
    if (this.isOfMany && this.#current === line && LOSSES.has(error.reason)) {
      this.#current = undefined;
      this.#lost = error.reason;
    }
  }

  #check(): void {
    if (this.isClosed) {
      throw closed("client");
    }
  }

  #mayRepeat(error: unknown, translated: SowError, repeats: Repeats): boolean {
    if (this.isClosed || repeats === "never") {
      return false;
    }
    const { reason } = translated;
    if (neverSent(error) || (reason === "STOPPING" && this.isOfMany)) {
      return true; // nothing of it was applied
    }
    return repeats !== "unsent" && (AGAIN_REASONS.has(reason) || (this.isOfMany && LOSSES.has(reason)));
  }

  async #ask(line: Line, method: Path, bytes: Uint8Array, withinMs = this.#options.timeoutMs): Promise<Uint8Array> {
    const metadata = await this.#bearer.metadata();
    this.#check();
    return await new Promise((resolve, reject) => {
      const options = { deadline: Date.now() + withinMs };
      const call = line.stub.makeUnaryRequest(pathOf(method), asIs, asIs, bytes, metadata, options, (error, answer) => {
        this.#calls.delete(call);
        error === null ? resolve(answer!) : reject(error);
      });
      this.#calls.add(call);
    });
  }

  #answers<O extends DescMessage>(
    line: Line,
    call: AsyncIterable<Buffer> & { cancel(): void; on(event: "error" | "status", heard: () => void): unknown },
    output: O,
    what: string,
  ): Pick<Frames<MessageShape<O>>, "next" | "cancel"> {
    call.on("error", () => undefined); // the iterator throws it; an error after its end is nobody's
    call.on("status", () => this.#calls.delete(call)); // the last event of every call
    this.#calls.add(call);
    const answers = call[Symbol.asyncIterator]();
    const next = async (): Promise<IteratorResult<MessageShape<O>, undefined>> => {
      try {
        const result = await answers.next();
        return result.done ? { done: true, value: undefined } : { done: false, value: fromBinary(output, result.value) };
      } catch (error) {
        call.cancel();
        const translated = this.isClosed ? closed("client") : streamError(error, what);
        this.doubt(line, translated);
        throw translated;
      }
    };
    return { next, cancel: () => call.cancel() };
  }

  async #connected(line: Line, limitMs: number): Promise<void> {
    const channel = line.stub.getChannel();
    const began = performance.now();
    const mayEnd = !this.#options.isPatient && !line.wasConnected;
    for (;;) {
      this.#check();
      const state = channel.getConnectivityState(true);
      if (state === connectivityState.READY) {
        line.wasConnected = true;
        return;
      }
      const waitedMs = performance.now() - began;
      if (waitedMs >= limitMs) {
        throw this.#unreachable(line, limitMs, (await this.#causeAt(line)) ?? "it does not answer");
      }
      let withinMs = Math.min(limitMs - waitedMs, WATCH_MS_MAX);
      if (mayEnd && state === connectivityState.TRANSIENT_FAILURE) {
        if (waitedMs >= REFUSED_MS) {
          const cause = await this.#causeAt(line);
          this.#check();
          if (cause !== undefined) {
            throw this.#unreachable(line, undefined, cause);
          }
        } else {
          withinMs = Math.min(withinMs, REFUSED_MS - waitedMs);
        }
      }
      await changed(channel, state, withinMs);
    }
  }

  /** Why there is no connection, which gRPC tells only to a call; undefined: it has not failed, or is made by now. */
  async #causeAt(line: Line): Promise<string | undefined> {
    try {
      await this.#ask(line, AdminService.method.getStatus, new Uint8Array(0), PROBE_MS);
    } catch (error) {
      const { reason, text } = errorOfStatus(error);
      return reason === "UNREACHABLE" ? causeIn(text) : undefined;
    }
    return undefined;
  }

  /** `limitMs`: undefined where nobody waits longer, as the server has refused. */
  #unreachable({ address }: Line, limitMs: number | undefined, why: string): SowError {
    if (this.isClosed) {
      return closed("client");
    }
    return limitMs === undefined
      ? new AllRefused(`cannot connect to ${address}: ${why}`, { reason: "UNREACHABLE" })
      : new Unavailable(`cannot connect to ${address} within ${limitMs / 1_000} s: ${why}`, { reason: "UNREACHABLE" });
  }

  async #sleep(ms: number): Promise<void> {
    await pause(ms, undefined, { signal: this.#closing.signal }).catch(() => {
      throw closed("client");
    });
  }

  // ---- several addresses ----

  /** The result of the search under way, or of a new one. A search that others began may end sooner than this call gives up. */
  async #found(limitMs: number): Promise<Line> {
    const giveUp = performance.now() + limitMs;
    for (;;) {
      const isOwn = this.#searching === undefined;
      this.#searching ??= this.#find(giveUp - performance.now()).finally(() => {
        this.#searching = undefined;
      });
      try {
        return await this.#searching;
      } catch (error) {
        const { reason } = errorOfStatus(error);
        if (isOwn || reason !== "UNREACHABLE" || performance.now() >= giveUp) {
          throw this.isClosed ? closed("client") : error;
        }
      }
    }
  }

  async #find(limitMs: number): Promise<Line> {
    const last = this.#last;
    const others = [...this.#lines.keys()].filter((address) => address !== last?.address);
    const found = await search({
      addresses: last === undefined ? others : [last.address, ...others],
      limitMs,
      cluster: this.#cluster,
      isPatient: this.#options.isPatient || last !== undefined,
      clock: { now: () => performance.now(), sleep: (ms) => this.#sleep(ms) },
      ask: (address, withinMs) => this.#describe(this.#lines.get(address)!, withinMs),
    });
    return this.#use(this.#lines.get(found.address)!, found);
  }

  async #describe(line: Line, withinMs: number): Promise<Instance | SowError> {
    const { address } = line;
    const request = create(AdminService.method.describeInstance.input);
    const frames = await this.stream(AdminService.method.describeInstance, request, "the description", line);
    let silent = false;
    const patience = setTimeout(() => {
      silent = true;
      frames.cancel();
    }, withinMs);
    try {
      const { done, value } = await frames.next();
      if (done) {
        return noServer(address);
      }
      const { name, id, journalEpoch, cluster, serving, serverVersion, contract } = value;
      return { address, name, id, journalEpoch, cluster, serving, serverVersion, contract: contract || UNDESCRIBED };
    } catch (error) {
      const translated = errorOfStatus(error);
      if (["UNIMPLEMENTED", "NOT_FOUND"].includes(translated.reason)) {
        return noServer(address);
      }
      if (CUT_REASONS.has(translated.reason)) {
        const parts = { reason: "UNREACHABLE", cause: error };
        return silent
          ? new NoAnswer(`${address}: no answer within ${withinMs} ms`, parts)
          : new Unavailable(`${address}: ${causeIn(translated.text)}`, parts);
      }
      if (LOSSES.has(translated.reason)) {
        return errorOfReason(`${address}: ${translated.text}`, { reason: translated.reason, cause: error });
      }
      throw translated; // the instance refuses this caller, or has too many
    } finally {
      clearTimeout(patience);
      frames.cancel();
    }
  }

  #use(line: Line, instance: Instance): Line {
    const left = this.#last;
    line.instance = instance;
    line.contract = instance.contract;
    this.#cluster ||= instance.cluster;
    this.#current = this.#last = line;
    this.#lookAgainAt = performance.now() + LOOK_AGAIN_MS;
    if (line.endWatch === undefined) {
      void this.#watch(line);
    }
    if (left !== undefined && left !== line) {
      left.endWatch?.();
      left.followers.forEach((end) => end());
      this.#options.onFailover?.(left.instance!, instance, this.#lost);
    }
    return line;
  }

  /** Waits until the instance of a line no longer serves. */
  async #watch(line: Line): Promise<void> {
    const ended = new AbortController();
    let frames: Frames<unknown> | undefined;
    const end = (): void => {
      ended.abort();
      frames?.cancel();
      if (line.endWatch === end) {
        line.endWatch = undefined;
      }
    };
    line.endWatch = end;
    while (!ended.signal.aborted) {
      const reason = await this.#awaitLoss(line, (begun) => {
        frames = begun;
      });
      if (ended.signal.aborted) {
        return;
      }
      if (reason === undefined) {
        await pause(LOOK_AGAIN_MS, undefined, { signal: ended.signal, ref: false }).catch(() => undefined);
        continue; // refused for now; the next call tells more
      }
      end();
      if (this.#current === line) {
        this.#current = undefined;
        this.#lost = reason;
      }
      line.followers.forEach((endCall) => endCall());
      return;
    }
  }

  async #awaitLoss(line: Line, begun: (frames: Frames<unknown>) => void): Promise<string | undefined> {
    const method = AdminService.method.describeInstance;
    try {
      const frames = await this.stream(method, create(method.input, { watch: true }), "the watch", line);
      begun(frames);
      for (;;) {
        const { done, value } = await frames.next();
        if (done) {
          return "STOPPING";
        }
        if (!value.serving && line.instance?.serving) {
          frames.cancel();
          return "NOT_SERVING";
        }
      }
    } catch (error) {
      const { reason } = errorOfStatus(error);
      return CUT_REASONS.has(reason) ? "UNREACHABLE" : LOSSES.has(reason) ? reason : undefined;
    }
  }
}

/** A call with such an error may be made again, because the fault may pass. */
const AGAIN_REASONS: ReadonlySet<string> = new Set([...CUT_REASONS, "STOPPING", "ACCESS_CHANGED"]);

/** The cause in a text of gRPC. */
function causeIn(text: string): string {
  return /Last error: (?:Error: )?(.*?)\. Resolution note/s.exec(text)?.[1] ?? text;
}

interface Path {
  readonly parent: { readonly typeName: string };
  readonly name: string;
}

function pathOf(method: Path): string {
  return `/${method.parent.typeName}/${method.name}`;
}

function asIs(bytes: Uint8Array): Buffer {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}

/** Resolves once the state is another one, or after some time. */
async function changed(channel: ChannelInterface, state: connectivityState, withinMs: number): Promise<void> {
  await new Promise<void>((resolve) => channel.watchConnectivityState(state, Date.now() + Math.max(1, withinMs), () => resolve()));
}

/** The bytes of a request. A request above the size limit is refused before it is sent: programs would retry gRPC's own
 * RESOURCE_EXHAUSTED. */
function encoded<Desc extends DescMessage>(schema: Desc, message: MessageShape<Desc>): Uint8Array {
  checkMessage(schema, message);
  const bytes = toBinary(schema, message);
  if (bytes.length > MESSAGE_BYTES_MAX) {
    const fault = `${bytes.length} bytes exceed the limit of ${MESSAGE_BYTES_MAX} bytes per message`;
    throw invalid("request", fault, "REQUEST_TOO_LARGE");
  }
  return bytes;
}
