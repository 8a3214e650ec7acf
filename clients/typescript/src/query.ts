/** The answer to a query as the program reads it: header, then records, then footer (rule Q1). */

import { setTimeout as pause } from "node:timers/promises";
import type { Led } from "./cells.js";
import { cut, malformed, Unavailable } from "./errors.js";
import type { QueryResponse } from "./gen/sow/v1/sow_pb.js";
import { type JsonObject, recordsOf, type StoredRecord } from "./records.js";
import { streamError } from "./statuses.js";
import type { Frames } from "./transport.js";

const ATTEMPTS_MAX = 3; // of a query that breaks before its first record
const RETRY_MS = 200; // before the second attempt; it grows by this much with each attempt
const ANSWER = "the answer to the query";

/** The instant of an answer. */
export interface QueryHeader {
  /** The position in the journal at which the query was cut; a subscription may start there. */
  readonly bookmark: string;
  /** The one instant at which expiry was judged: microseconds since the epoch. */
  readonly asOfMicros: bigint;
}

/** The counts of an answer. */
export interface QueryFooter {
  /** Live records that matched. */
  readonly matched: bigint;
  /** Records sent. */
  readonly returned: bigint;
  /** Stored records read to find them. */
  readonly scanned: bigint;
  /** The token for the next page; "": this was the last page. */
  readonly nextPageToken: string;
  /**
   * Fields of the filter, the order and `select` in which no record that was read has a value: perhaps they are mistyped
   * (rule Q10).
   */
  readonly absentFields: readonly string[];
  /** With `groupBy` or `aggregate`: how many groups there are, before `having`, `skipN` and `topN` (rule Q12). */
  readonly groups: bigint;
  /** Records that matched and are in no group (rule Q12). */
  readonly ungrouped: bigint;
}

/**
 * The answer to a query, read once with `for await`, or whole with `all()`.
 *
 * The call is made when the first record is asked for, and repeated if it breaks before it. Leaving the loop ends the
 * call. It throws Unavailable (STREAM_CUT or UNREACHABLE) when the answer breaks off: a second call would show another
 * instant.
 */
export class QueryResult<T = JsonObject> implements AsyncIterable<StoredRecord<T>> {
  /** Known from the first record on. */
  header: QueryHeader | undefined;
  /** Known after the last record. */
  footer: QueryFooter | undefined;
  readonly #topic: string;
  readonly #open: () => Promise<Frames<QueryResponse>>;
  readonly #way: Led;

  /** Made by `Client.query`. `way`: to the cell of the topic. */
  constructor(topic: string, open: () => Promise<Frames<QueryResponse>>, way: Led) {
    this.#topic = topic;
    this.#open = open;
    this.#way = way;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<StoredRecord<T>, undefined> {
    for await (const batch of this.batches()) {
      yield* batch;
    }
  }

  /** All records. */
  async all(): Promise<StoredRecord<T>[]> {
    const records: StoredRecord<T>[] = [];
    for await (const batch of this.batches()) {
      records.push(...batch);
    }
    return records;
  }

  /** The same answer in batches. */
  async *batches(): AsyncGenerator<StoredRecord<T>[], undefined> {
    for (let attempt = 1; ; attempt++) {
      let begun = false;
      let frames: Frames<QueryResponse> | undefined;
      try {
        frames = await this.#open();
        for (let next = await frames.next(); !next.done; next = await frames.next()) {
          const batch = this.#take(next.value);
          if (batch !== undefined) {
            begun = true;
            yield batch;
          }
        }
        if (this.footer === undefined) {
          throw cut(ANSWER);
        }
        return;
      } catch (error) {
        const failed = streamError(error, ANSWER);
        if (!begun && (await this.#way.goes(failed))) {
          this.header = this.footer = undefined;
          attempt -= 1;
          continue;
        }
        const broken = this.#way.told(failed);
        // Whoever gets no connection has waited for one already.
        const passes = frames !== undefined && broken instanceof Unavailable && broken.reason !== "BEHIND";
        if (begun || !passes || attempt === ATTEMPTS_MAX) {
          throw begun && broken.reason === "UNREACHABLE" ? cut(`${ANSWER} (${broken.text})`, broken) : broken;
        }
        this.header = this.footer = undefined;
        await pause(RETRY_MS * attempt);
      } finally {
        frames?.cancel();
      }
    }
  }

  #take({ response }: QueryResponse): StoredRecord<T>[] | undefined {
    switch (response.case) {
      case "batch":
        if (this.header === undefined) {
          throw malformed("records before the header");
        }
        return recordsOf<T>(this.#topic, response.value);
      case "header": {
        const { bookmark, asOfMicros } = response.value;
        this.header = { bookmark, asOfMicros };
        return undefined;
      }
      case "footer": {
        const { matched, returned, scanned, nextPageToken, absentFields, groups, ungrouped } = response.value;
        this.footer = { matched, returned, scanned, nextPageToken, absentFields, groups, ungrouped };
        return undefined;
      }
      default:
        return undefined; // a kind of response that a newer server sends
    }
  }
}
