/** The message types of topics to which objects are published: asked for once, and kept. */

import { InvalidArgument, NotFound, SowError } from "./errors.js";
import type { DescribeTopicResponse } from "./gen/sow/v1/admin_pb.js";
import { type Document, encode, formOf, JSON_FORM, needsForm, type PayloadForm } from "./payloads.js";

/** Reasons for which a server does not tell the message type of a topic. Then documents are JSON. */
const UNTOLD: ReadonlySet<string> = new Set(["PERMISSION_DENIED", "UNIMPLEMENTED"]);

/** Owns what is known of the topics' message types. */
export class Forms {
  readonly #describe: (topic: string) => Promise<DescribeTopicResponse>;
  readonly #known = new Map<string, PayloadForm>();

  constructor(describe: (topic: string) => Promise<DescribeTopicResponse>) {
    this.#describe = describe;
  }

  /** The bytes of a document for a topic. */
  async encoded(topic: string, document: Document): Promise<Uint8Array> {
    return encode(document, needsForm(document) ? await this.of(topic) : JSON_FORM);
  }

  /** The form of a topic. One that is not there is a json topic, once a publish makes it; so it is asked for again. */
  async of(topic: string): Promise<PayloadForm> {
    const known = this.#known.get(topic);
    if (known !== undefined) {
      return known;
    }
    let form = JSON_FORM;
    try {
      const { settings } = (await this.#describe(topic)).topic ?? {};
      form = settings === undefined ? JSON_FORM : formOf(settings.messageType, settings.fixSeparator);
    } catch (error) {
      if (error instanceof NotFound || error instanceof InvalidArgument) {
        return JSON_FORM;
      }
      if (!(error instanceof SowError && UNTOLD.has(error.reason))) {
        throw error;
      }
    }
    this.#known.set(topic, form);
    return form;
  }

  /** A record was refused as PAYLOAD_MALFORMED: the topic may have been made anew, with another type. */
  forget(topic: string): void {
    this.#known.delete(topic);
  }
}
