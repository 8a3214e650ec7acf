/** Puts and removals of one topic that are applied together, or not at all (rules P4, P11). */

import { closed, invalid, PublishFailed, type Refusal } from "./errors.js";
import type { PublishRequest } from "./gen/sow/v1/sow_pb.js";
import type { Key } from "./keys.js";
import { type Document, encode, encodedAs, type PayloadForm } from "./payloads.js";
import type { Published } from "./records.js";
import {
  atomicRequest,
  type AtomicRecord,
  atomicRecord,
  type ConditionOptions,
  type PutOptions,
  type TransactionOptions,
} from "./requests.js";

/** What a removal in a transaction may have besides a key. */
export interface RemovalOptions extends Omit<ConditionOptions, "onlyIfAbsent"> {
  /** In place of the key: a document that has the key fields of the topic. */
  readonly data?: Document;
}

/** How a transaction reaches the server. */
export interface Sending {
  form(): Promise<PayloadForm>;
  /** The outcome of each record, in their order. */
  send(request: PublishRequest): Promise<(Published | Refusal)[]>;
}

/**
 * Collects puts and removals. `commit` sends them as one request: all are applied in one commit, in their order, or none.
 * Made by `Client.transaction`. Without a commit nothing is sent.
 */
export class Transaction {
  readonly #topic: string;
  readonly #options: TransactionOptions;
  readonly #sending: Sending;
  readonly #changes: AtomicRecord[] = [];
  #ended = false;

  constructor(topic: string, options: TransactionOptions, sending: Sending) {
    this.#topic = topic;
    this.#options = options;
    this.#sending = sending;
  }

  /** Adds a record. */
  publish(data: Document, options: PutOptions = {}): void {
    this.#add(atomicRecord(data, options));
  }

  /**
   * Adds a removal of the live record of a key, or of the key of `data`. Without a live record it changes nothing; with
   * `onlyIfPresent` it is refused then, and so is the whole transaction.
   */
  remove(key: Key | undefined, { data, ...condition }: RemovalOptions = {}): void {
    if ((key === undefined) === (data === undefined)) {
      throw invalid("key", "give a key, or data that has the key fields: exactly one of both");
    }
    this.#add({ ...atomicRecord(data, { ...condition, ...(key === undefined ? {} : { key }) }), remove: true });
  }

  /** Sends all of it, once. The outcome of each put and removal, in their order; throws PublishFailed if one was refused. */
  async commit(): Promise<Published[]> {
    this.#check();
    this.#ended = true;
    if (this.#changes.length === 0) {
      return [];
    }
    const form = await this.#sending.form();
    const documents = this.#changes.map(({ data }) => data);
    const payloads = documents.map((data) => (data === undefined ? new Uint8Array() : encode(data, form)));
    const request = atomicRequest(this.#topic, this.#changes, payloads, this.#options);
    request.encodedAs =
      documents.map((data) => (data === undefined ? "" : encodedAs(data, form))).find((name) => name !== "") ?? "";
    const results = await this.#sending.send(request);
    const refused = results.filter((result) => result.refused);
    // The one because of which the others were refused comes first.
    const [first, ...others] = [
      ...refused.filter(({ reason }) => reason !== "ATOMIC_ABORTED"),
      ...refused.filter(({ reason }) => reason === "ATOMIC_ABORTED"),
    ];
    if (first !== undefined) {
      throw new PublishFailed([first, ...others], refused.length);
    }
    return results.filter((result) => !result.refused);
  }

  #add(change: AtomicRecord): void {
    this.#check();
    this.#changes.push(change);
  }

  #check(): void {
    if (this.#ended) {
      throw closed("transaction");
    }
  }
}
