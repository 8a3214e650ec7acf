/** Payloads of every message type: what the program gives into bytes, and bytes into values (rule K2). No I/O. */

import { kindOf, wellFormed } from "./arguments.js";
import { invalid } from "./errors.js";
import { fieldsOf, fieldsPayload } from "./fields.js";
import { MessageType } from "./gen/sow/v1/admin_pb.js";
import { parse, stringify } from "./json.js";
import { pack, unpack } from "./msgpack.js";

/**
 * A document to publish: an object is encoded in the message type of its topic, a text as UTF-8, and bytes are sent as
 * they are.
 *
 * In JSON a bigint is an integer of any length, a Uint8Array is base64, and a field that is undefined is left out.
 */
export type Document = object | string | Uint8Array;

/** The message type of a topic, or of a payload; empty from an older server. */
export type MessageTypeName = "json" | "msgpack" | "fix" | "nvfix" | "binary" | "";

/** How the payloads of a topic are written. */
export interface PayloadForm {
  readonly messageType: MessageTypeName;
  /** Between two fields of fix and nvfix. */
  readonly separator: string;
}

export const JSON_FORM: PayloadForm = { messageType: "json", separator: "\x01" };

/** The form that the settings of a topic name. */
export function formOf(type: MessageType, separator: string): PayloadForm {
  return { messageType: NAMES.get(type) ?? "", separator: separator || "\x01" };
}

const NAMES: ReadonlyMap<MessageType, MessageTypeName> = new Map([
  [MessageType.JSON, "json"],
  [MessageType.MSGPACK, "msgpack"],
  [MessageType.FIX, "fix"],
  [MessageType.NVFIX, "nvfix"],
  [MessageType.BINARY, "binary"],
]);

/** Whether the bytes of a document depend on the message type. */
export function needsForm(document: Document): boolean {
  return typeof document === "object" && document !== null && !(document instanceof Uint8Array);
}

/** How the bytes of a document were encoded, as a request names it; "": they are the program's own. */
export function encodedAs(document: Document, { messageType, separator }: PayloadForm): string {
  const type = messageType || "json";
  return !needsForm(document) ? "" : type === "fix" || type === "nvfix" ? type + separator : type;
}

/** The bytes of a document. Throws InvalidArgument (PAYLOAD_MALFORMED) for one that the message type cannot express. */
export function encode(document: Document, form: PayloadForm = JSON_FORM): Uint8Array {
  if (document instanceof Uint8Array) {
    return document;
  }
  if (typeof document === "string") {
    return Buffer.from(wellFormed(document, "data", "PAYLOAD_MALFORMED"));
  }
  if (!needsForm(document)) {
    throw invalid("data", `a ${kindOf(document)} is no document`, "PAYLOAD_MALFORMED");
  }
  switch (form.messageType) {
    case "msgpack":
      return pack(document);
    case "fix":
    case "nvfix":
      return fieldsPayload(document, form.separator, form.messageType === "fix");
    case "binary":
      throw invalid("data", "the topic is binary: give bytes", "PAYLOAD_MALFORMED");
    default:
      return Buffer.from(stringify(document));
  }
}

/** The value of a payload. Throws an error where it is none of its message type. */
export function decode(payload: Uint8Array, { messageType, separator }: PayloadForm): unknown {
  switch (messageType) {
    case "msgpack":
      return unpack(payload);
    case "fix":
    case "nvfix":
      return fieldsOf(payload, separator || "\x01", messageType === "fix");
    default:
      return parse(Buffer.from(payload.buffer, payload.byteOffset, payload.byteLength).toString());
  }
}
