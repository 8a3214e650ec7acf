/** Durations and lifetimes: arguments into whole microseconds (rules L1, L2). Nothing is rounded but below a microsecond. */

import { create } from "@bufbuild/protobuf";
import { invalid } from "./errors.js";
import { type Lifetime, LifetimeKind, LifetimeSchema } from "./gen/sow/v1/types_pb.js";

/**
 * A duration: text such as "30s" or "1h30m" (units ns, us, ms, s, m, h, d, w), or microseconds as a bigint. A number is
 * refused, because nobody can tell its unit.
 */
export type Duration = string | bigint;

/** A lifetime: a duration, or "never". */
export type Ttl = Duration | "never";

/** A point in time: a Date, or microseconds since the epoch as a bigint. */
export type Moment = Date | bigint;

/** The largest int64. In columns it stands for "never". */
export const INT64_MAX = (1n << 63n) - 1n;

const NANOS: Readonly<Record<string, bigint>> = {
  ns: 1n,
  us: 1_000n,
  "µs": 1_000n, // micro sign
  "μs": 1_000n, // Greek mu
  ms: 1_000_000n,
  s: 1_000_000_000n,
  m: 60_000_000_000n,
  h: 3_600_000_000_000n,
  d: 86_400_000_000_000n,
  w: 604_800_000_000_000n,
};
/** In March 1973. Seconds and milliseconds of our time are less. The server judges by its own clock (rule L18). */
const MICROS_MIN = 10n ** 14n;
const TEXT_LENGTH_MAX = 100; // bounds the work; no sensible duration comes near it

/** The microseconds of a duration. Throws InvalidArgument that names `field`. */
export function micros(duration: Duration, field: string): bigint {
  if (typeof duration === "bigint") {
    if (duration < 0n) {
      throw invalid(field, `${duration} is negative`, "LIFETIME_NEGATIVE");
    }
    return checked(duration, String(duration), field);
  }
  if (typeof duration !== "string") {
    throw invalid(field, `a ${typeof duration} is no duration; write for example "30s"`);
  }
  return checked(microsOfText(duration, field), JSON.stringify(duration), field);
}

/** The microseconds of a moment. Throws InvalidArgument that names `field`. */
export function momentMicros(moment: Moment, field: string): bigint {
  if (moment instanceof Date) {
    const millis = moment.getTime();
    if (Number.isNaN(millis)) {
      throw invalid(field, "is no date");
    }
    return BigInt(millis) * 1_000n;
  }
  if (typeof moment !== "bigint") {
    throw invalid(field, `a ${typeof moment} is no point in time; give a Date or microseconds as a bigint`);
  }
  if (moment >= 0n && moment < MICROS_MIN) {
    throw invalid(
      field,
      `${moment} is more than ten years ago; it counts microseconds since 1970, not seconds or milliseconds; a Date` +
        `${field === "expireAt" ? ", or ttl for a time from now," : ""} has no such doubt`,
    );
  }
  return checked(moment, String(moment), field);
}

/** A Date; JavaScript's dates have milliseconds, so the microseconds below are cut off. */
export function dateOf(microsSinceEpoch: bigint): Date {
  return new Date(Number(microsSinceEpoch / 1_000n));
}

/** A lifetime as the columns of a stream carry it. */
export interface LifetimeColumn {
  readonly kind: LifetimeKind;
  readonly micros: bigint;
}

/** The lifetime that two arguments name; undefined when neither is given. */
export function lifetimeColumn(ttl: Ttl | undefined, expireAt: Moment | undefined): LifetimeColumn | undefined {
  if (ttl !== undefined && expireAt !== undefined) {
    throw invalid("expireAt", "give ttl or expireAt, not both");
  }
  if (ttl === "never") {
    return { kind: LifetimeKind.NEVER, micros: 0n };
  }
  if (ttl !== undefined) {
    return { kind: LifetimeKind.TTL, micros: micros(ttl, "ttl") };
  }
  if (expireAt === undefined) {
    return undefined;
  }
  const at = momentMicros(expireAt, "expireAt");
  if (at < 0n) {
    throw invalid("expireAt", "is before 1970", "LIFETIME_NEGATIVE");
  }
  if (expireAt instanceof Date && at < MICROS_MIN) {
    const shown = expireAt.toISOString();
    throw invalid("expireAt", `${shown} is more than ten years ago; a Date counts milliseconds since 1970, not seconds`);
  }
  return { kind: LifetimeKind.EXPIRE_TIME, micros: at };
}

/** As `lifetimeColumn`, as a message. */
export function lifetimeMessage(ttl: Ttl | undefined, expireAt: Moment | undefined): Lifetime | undefined {
  const column = lifetimeColumn(ttl, expireAt);
  switch (column?.kind) {
    case undefined:
      return undefined;
    case LifetimeKind.TTL:
      return create(LifetimeSchema, { lifetime: { case: "ttlMicros", value: column!.micros } });
    case LifetimeKind.EXPIRE_TIME:
      return create(LifetimeSchema, { lifetime: { case: "expireTimeMicros", value: column!.micros } });
    default:
      return create(LifetimeSchema, { lifetime: { case: "never", value: true } });
  }
}

function microsOfText(text: string, field: string): bigint {
  if (text.length > TEXT_LENGTH_MAX || !/^(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:ns|us|µs|μs|ms|s|m|h|d|w))+$/.test(text)) {
    throw invalid(field, `${JSON.stringify(text.slice(0, 40))} is no duration; write for example "30s" or "1h30m"`);
  }
  let sum = 0n; // in nanoseconds times 10^scale
  let scale = 0n;
  for (const [, whole = "", fraction = "", unit = ""] of text.matchAll(/([0-9]*)(?:\.([0-9]*))?([a-zµμ]+)/g)) {
    const digits = BigInt(fraction.length);
    if (digits > scale) {
      sum *= 10n ** (digits - scale);
      scale = digits;
    }
    sum += BigInt(whole + fraction) * (NANOS[unit] ?? 0n) * 10n ** (scale - digits);
  }
  return sum / (1_000n * 10n ** scale);
}

function checked(value: bigint, shown: string, field: string): bigint {
  if (value > INT64_MAX) {
    throw invalid(field, `${shown} is too long: more than ${INT64_MAX} microseconds`);
  }
  return value;
}
