/** Statuses become errors by their reasons, and never by their texts (rule X1). */

import assert from "node:assert/strict";
import test from "node:test";
import { Metadata, type ServiceError, status } from "@grpc/grpc-js";
import { BinaryWriter } from "@bufbuild/protobuf/wire";
import * as errors from "../../src/errors.js";
import { ErrorReason } from "../../src/gen/sow/v1/types_pb.js";
import { Backoff, errorOfStatus, neverSent, streamError } from "../../src/statuses.js";

test("each reason of the contract has its class", () => {
  const reasons = Object.values(ErrorReason).filter((name) => typeof name === "string" && name !== "UNSPECIFIED");
  assert.deepEqual(Object.keys(errors.CLASS_OF_REASON).sort(), reasons.sort());
});

const text = (number: number, value: string) => (writer: BinaryWriter) => writer.tag(number, 2).string(value);
const part = (number: number, ...parts: Part[]) => (writer: BinaryWriter) => writer.tag(number, 2).bytes(message(...parts));
type Part = (writer: BinaryWriter) => BinaryWriter;

function message(...parts: Part[]): Uint8Array {
  const writer = new BinaryWriter();
  parts.forEach((each) => each(writer));
  return writer.finish();
}

function failed(code: status, details: string, ...anys: [string, Uint8Array][]): ServiceError {
  const metadata = new Metadata();
  if (anys.length > 0) {
    const rich = message(
      (writer) => writer.tag(1, 0).int32(code),
      text(2, details),
      ...anys.map(([name, value]) =>
        part(3, text(1, `type.googleapis.com/google.rpc.${name}`), (writer) => writer.tag(2, 2).bytes(value)),
      ),
    );
    metadata.set("grpc-status-details-bin", Buffer.from(rich));
  }
  return Object.assign(new Error(`${code}: ${details}`), { code, details, metadata });
}

const info = (reason: string, domain = "sow", ...metadata: [string, string][]): [string, Uint8Array] => [
  "ErrorInfo",
  message(text(1, reason), text(2, domain), ...metadata.map(([name, value]) => part(3, text(1, name), text(2, value)))),
];

test("ErrorInfo, BadRequest and RetryInfo are read", () => {
  const retry: [string, Uint8Array] = [
    "RetryInfo",
    message(part(1, (writer) => writer.tag(1, 0).int64(2), (writer) => writer.tag(2, 0).int32(500_000_000))),
  ];
  const bad: [string, Uint8Array] = ["BadRequest", message(part(1, text(1, "key"), text(2, "is missing")))];
  const error = errorOfStatus(
    failed(status.FAILED_PRECONDITION, "no", info("CONDITION_FAILED", "sow", ["current_version", "1769860800000001"]), retry, bad),
  );
  assert.ok(error instanceof errors.ConditionFailed && error instanceof errors.FailedPrecondition);
  assert.equal(error.name, "ConditionFailed");
  assert.equal(error.currentVersion, 1769860800000001n);
  assert.equal(error.retryAfterMs, 2_500);
  assert.equal(error.details["field"], "key");
  assert.equal(error.message, "no (CONDITION_FAILED)");
  assert.equal(error.text, "no");
});

test("the reasons of another domain, and damaged details, count as none", () => {
  const damaged = failed(status.NOT_FOUND, "x");
  damaged.metadata.set("grpc-status-details-bin", Buffer.from([0xff]));
  for (const error of [damaged, failed(status.NOT_FOUND, "x", info("TOPIC_NOT_FOUND", "elsewhere"))]) {
    assert.equal(errorOfStatus(error).reason, "NOT_FOUND");
  }
});

test("a reason of a newer server gets the class of its code", () => {
  const error = errorOfStatus(failed(status.NOT_FOUND, "x", info("NEW_REASON")));
  assert.ok(error instanceof errors.NotFound);
  assert.equal(error.reason, "NEW_REASON");
  assert.ok(errorOfStatus(failed(status.NOT_FOUND, "x", info("constructor"))) instanceof errors.NotFound);
});

test("statuses without a reason are those of the transport", () => {
  assert.equal(errorOfStatus(failed(status.UNAVAILABLE, "x")).reason, "UNREACHABLE");
  assert.equal(errorOfStatus(failed(status.UNIMPLEMENTED, "x")).reason, "UNIMPLEMENTED");
  const large = errorOfStatus(failed(status.RESOURCE_EXHAUSTED, "Received message larger than max (2 vs 1)"));
  assert.ok(large instanceof errors.InvalidArgument);
  assert.equal(large.reason, "REQUEST_TOO_LARGE");
  for (const code of [status.CANCELLED, status.UNKNOWN, status.INTERNAL]) {
    assert.equal(streamError(failed(code, "x"), "it").reason, "STREAM_CUT");
  }
  assert.equal(streamError(failed(status.INTERNAL, "x", info("INTERNAL")), "it").reason, "INTERNAL");
});

test("only a call without a connection was certainly not sent", () => {
  assert.ok(neverSent(failed(status.UNAVAILABLE, "No connection established. Last error: x")));
  assert.ok(!neverSent(failed(status.UNAVAILABLE, "Connection dropped")));
  assert.ok(!neverSent(failed(status.UNAVAILABLE, "No connection established", info("STOPPING"))));
});

test("the waits double up to a bound, obey the server, and end", () => {
  const backoff = new Backoff();
  const error = errors.cut("it");
  const waits = [0, 1, 2, 3, 4, 5, 6].map(() => backoff.delay(error, { nowMs: 0, jitter: 0, limitMs: 10_000 }));
  assert.deepEqual(waits, [50, 100, 200, 400, 800, 1_000, 1_000]);
  const told = new errors.Unavailable("x", { reason: "STOPPING", retryAfterMs: 3_000 });
  assert.equal(backoff.delay(told, { nowMs: 5_000, jitter: 0, limitMs: 10_000 }), 3_000);
  assert.equal(backoff.delay(told, { nowMs: 7_001, jitter: 0, limitMs: 10_000 }), undefined);
  backoff.reset();
  assert.equal(backoff.delay(error, { nowMs: 7_001, jitter: 0.5, limitMs: 10_000 }), 75);
});
