/** Statuses of gRPC into errors (rule X1), and when a failed call is tried again. No I/O, no clock. */

import { status as Code, type ServiceError } from "@grpc/grpc-js";
import { BinaryReader, WireType } from "@bufbuild/protobuf/wire";
import { AllRefused, cut, errorOfReason, InternalError, SowError, Unavailable } from "./errors.js";

/** The size limit of a message, in both directions, at both ends (rule K8). */
export const MESSAGE_BYTES_MAX = 20 * 1024 * 1024;

const DETAILS_KEY = "grpc-status-details-bin";
const ERROR_DOMAIN = "sow";

/** The error of a call with one answer. The client never cancels such a call, so CANCELLED comes from a server that stops. */
export function callError(error: unknown): SowError {
  const translated = errorOfStatus(error);
  if (translated.reason === "CANCELLED" && isStatus(error)) {
    return new Unavailable(`the server abandoned the call (${translated.text})`, { reason: "UNREACHABLE", cause: error });
  }
  return translated;
}

/** The error of a stream. Without a reason from the server the connection broke, whatever gRPC's code says. */
export function streamError(error: unknown, what: string): SowError {
  const translated = errorOfStatus(error);
  if (isStatus(error) && ["CANCELLED", "UNKNOWN", "INTERNAL"].includes(translated.reason) && !hasReason(error)) {
    return cut(`${what} (${translated.text})`, error);
  }
  return translated;
}

/** The error for the status with which a call ended. ErrorInfo decides its class; the text is only passed on. */
export function errorOfStatus(error: unknown): SowError {
  if (error instanceof SowError) {
    return error;
  }
  if (!isStatus(error)) {
    return new InternalError(`the call failed: ${String(error)}`, { reason: "INTERNAL", cause: error });
  }
  const code = Code[error.code] ?? "UNKNOWN";
  let text = error.details || code;
  const told = detailsOf(error);
  let reason = told.reason;
  if (reason === undefined) {
    if (error.code === Code.RESOURCE_EXHAUSTED && text.includes("message larger than max")) {
      // gRPC reports its own limit on messages, at either end, only by its text.
      return errorOfReason(`the request, or its answer, is too large: ${text}`, { reason: "REQUEST_TOO_LARGE", cause: error });
    }
    if (error.code === Code.UNIMPLEMENTED) {
      text = `the server does not know this call: it is no sow server, or an older one (${text})`;
    }
    reason = error.code === Code.UNAVAILABLE ? "UNREACHABLE" : code;
  }
  const { details, retryAfterMs } = told;
  return errorOfReason(text, { reason, details, retryAfterMs, cause: error }, code);
}

/** Whether the server gave a reason; without one the transport ended the call. */
export function hasReason(error: unknown): boolean {
  return isStatus(error) && detailsOf(error).reason !== undefined;
}

/**
 * Whether the call certainly never left: there was no connection. gRPC tells it by its text alone. With another text the
 * call counts as sent, which is the safe side.
 */
export function neverSent(error: unknown): boolean {
  return (
    isStatus(error) &&
    error.code === Code.UNAVAILABLE &&
    !hasReason(error) &&
    /^(?:No connection established|Name resolution failed)/.test(error.details)
  );
}

function isStatus(error: unknown): error is ServiceError {
  return error instanceof Error && "code" in error && typeof error.code === "number" && "metadata" in error;
}

interface Told {
  reason?: string;
  details: Record<string, string>;
  retryAfterMs?: number;
}

const NOTHING_TOLD: Told = { details: {} };

/** Reason, details and time to wait of a rich status; empty when there is none, or when it is damaged. */
function detailsOf(error: ServiceError): Told {
  const [encoded] = error.metadata.get(DETAILS_KEY);
  if (!(encoded instanceof Uint8Array)) {
    return NOTHING_TOLD;
  }
  try {
    return told(encoded);
  } catch {
    return NOTHING_TOLD;
  }
}

// The messages of google.rpc are read by hand: they are five fields, and are published by nobody for this library.

function told(encoded: Uint8Array): Told {
  const result: Told = { details: {} };
  for (const any of fieldsOf(encoded).filter(({ number }) => number === 3)) {
    const [type = "", value = NO_BYTES] = [textIn(any.bytes, 1), bytesIn(any.bytes, 2)];
    switch (type.slice(type.lastIndexOf("/") + 1)) {
      case "google.rpc.ErrorInfo":
        readErrorInfo(value, result);
        break;
      case "google.rpc.RetryInfo": {
        const delay = fieldsOf(bytesIn(value, 1) ?? NO_BYTES);
        const [seconds, nanos] = [1, 2].map((number) => Number(delay.find((field) => field.number === number)?.count ?? 0n));
        result.retryAfterMs = seconds! * 1_000 + nanos! / 1_000_000;
        break;
      }
      case "google.rpc.BadRequest":
        result.details["field"] ??= textIn(bytesIn(value, 1) ?? NO_BYTES, 1) ?? "";
        break;
    }
  }
  return result;
}

function readErrorInfo(info: Uint8Array, result: Told): void {
  if (textIn(info, 2) !== ERROR_DOMAIN) {
    return;
  }
  result.reason = textIn(info, 1) ?? "";
  for (const entry of fieldsOf(info).filter(({ number }) => number === 3)) {
    result.details[textIn(entry.bytes, 1) ?? ""] = textIn(entry.bytes, 2) ?? "";
  }
}

const NO_BYTES = new Uint8Array(0);

interface Field {
  readonly number: number;
  readonly bytes: Uint8Array;
  readonly count: bigint;
}

function fieldsOf(message: Uint8Array): Field[] {
  const reader = new BinaryReader(message);
  const fields: Field[] = [];
  while (reader.pos < reader.len) {
    const [number, type] = reader.tag();
    if (type === WireType.LengthDelimited) {
      fields.push({ number, bytes: reader.bytes(), count: 0n });
    } else if (type === WireType.Varint) {
      fields.push({ number, bytes: NO_BYTES, count: BigInt(reader.int64()) });
    } else {
      reader.skip(type, number);
    }
  }
  return fields;
}

function bytesIn(message: Uint8Array, number: number): Uint8Array | undefined {
  return fieldsOf(message).find((field) => field.number === number)?.bytes;
}

function textIn(message: Uint8Array, number: number): string | undefined {
  const found = bytesIn(message, number);
  return found === undefined ? undefined : new TextDecoder().decode(found);
}

/** In this time gRPC has tried to connect at least twice: its first pause is a tenth of a second. */
export const REFUSED_MS = 250;

/** The connection broke, or was never made. */
export const CUT_REASONS: ReadonlySet<string> = new Set(["UNREACHABLE", "STREAM_CUT"]);

/** Decides when to retry, and when to give up. Owns the count of consecutive failures. */
export class Backoff {
  static readonly FIRST_MS = 100;
  static readonly MAX_MS = 2_000;
  #failingSince: number | undefined;
  #attempts = 0;

  /** An attempt begins. The time to retry runs from the first of consecutive attempts. */
  begin(nowMs: number): void {
    this.#failingSince ??= nowMs;
  }

  /** The last attempt has made progress. */
  reset(): void {
    this.#failingSince = undefined;
    this.#attempts = 0;
  }

  /**
   * Milliseconds to wait before the next attempt; undefined when it would begin more than `limitMs` after the first, and
   * where every address has refused.
   * `nowMs` is a monotonic clock, `jitter` a random number in [0, 1).
   */
  delay(error: SowError, { nowMs, jitter, limitMs }: { nowMs: number; jitter: number; limitMs: number }): number | undefined {
    if (error instanceof AllRefused) {
      return undefined;
    }
    this.begin(nowMs);
    // Half fixed, half random: many clients that were cut off together must not come back together.
    const own = Math.min(Backoff.FIRST_MS * 2 ** this.#attempts, Backoff.MAX_MS) * (0.5 + 0.5 * jitter);
    const delay = Math.max(own, error.retryAfterMs ?? 0);
    this.#attempts = Math.min(this.#attempts + 1, 16);
    return nowMs + delay - this.#failingSince! > limitMs ? undefined : delay;
  }
}
