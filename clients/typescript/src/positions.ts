/** Positions of publishes: they make a retry safe (rule P6). */

import { randomBytes } from "node:crypto";
import { create } from "@bufbuild/protobuf";
import { type PublisherPosition, PublisherPositionSchema } from "./gen/sow/v1/types_pb.js";

/** A token for an epoch that no instance has given (rule F11). */
export function randomToken(): bigint {
  return (randomBytes(8).readBigUInt64BE() >> 2n) + 1n;
}

/**
 * Gives each request of single publishes the position that makes its retry safe (rule P6).
 *
 * The server regards a sequence at or below its highest one as a retry. Two requests under way must not share a publisher
 * id: the slower one would be dropped as a duplicate. So each request borrows an id.
 */
export class PositionPool {
  readonly #name = `client-${randomBytes(8).toString("hex")}`;
  readonly #idle: PublisherPosition[] = [];
  #made = 0;

  take(): PublisherPosition {
    return (
      this.#idle.pop() ??
      create(PublisherPositionSchema, {
        publisherId: `${this.#name}-${++this.#made}`,
        publisherEpoch: 1n,
        publisherToken: randomToken(),
        firstSequence: 1n,
      })
    );
  }

  /** The call with this many records has ended, well or not; its sequences are not used again. */
  giveBack(position: PublisherPosition, records: number): void {
    position.firstSequence += BigInt(records);
    this.#idle.push(position);
  }
}
