/** Frames of changes into changes with their bookmarks. No I/O, no clock. */

import { malformed } from "./errors.js";
import { type ChangeBatch, ChangeOp, ChangeReason } from "./gen/sow/v1/sow_pb.js";
import { type Change, recordsOf, type StoredRecord } from "./records.js";

/** The changes of a frame; `prefix` begins the bookmarks of single changes, and `marks` end them. */
export function changesOf<T>(batch: ChangeBatch, prefix: string, marks: string): Change<T>[] {
  const { topic, op, reason, isDelta, unsetPaths, atomic, more } = batch;
  const records = batch.records === undefined ? [] : recordsOf<T>(topic, batch.records);
  const optional = [reason, isDelta, unsetPaths].map((column) => column.length);
  if (op.length !== records.length || optional.some((length) => length !== 0 && length !== op.length)) {
    throw malformed("columns of unequal length");
  }
  return records.map((record, index) => {
    let bookmark: string | null = `${prefix}${record.sequence}${marks}`;
    if (atomic || more) {
      bookmark = !more && index === records.length - 1 ? batch.bookmark + marks : null;
    }
    const parts = { topic, bookmark, key: record.key };
    const why = reason[index] ?? ChangeReason.UNSPECIFIED;
    if (op[index] === ChangeOp.PUT) {
      return {
        ...parts,
        op: "put",
        reason: why === ChangeReason.TOUCHED ? "touched" : null,
        record,
        isDelta: isDelta[index] ?? false,
        unsetPaths: unsetPaths[index]?.paths ?? [],
      };
    }
    return removal(parts, op[index]!, why, record);
  });
}

function removal<T>(
  parts: { topic: string; bookmark: string | null; key: string },
  op: ChangeOp,
  reason: ChangeReason,
  record: StoredRecord<T>,
): Change<T> {
  switch (op) {
    case ChangeOp.DELETE:
      return { ...parts, op: "delete", reason: null, previous: record };
    case ChangeOp.EXPIRE:
      return { ...parts, op: "expire", reason: null, previous: record };
    case ChangeOp.OOF:
      switch (reason) {
        case ChangeReason.DELETED:
          return { ...parts, op: "oof", reason: "deleted", previous: record };
        case ChangeReason.EXPIRED:
          return { ...parts, op: "oof", reason: "expired", previous: record };
        case ChangeReason.MATCH:
          return { ...parts, op: "oof", reason: "match", record };
        case ChangeReason.NOT_PERMITTED:
          return { ...parts, op: "oof", reason: "not_permitted", record };
      }
  }
  throw malformed(`a change of the unknown kind ${op}, ${reason}`);
}

/** The epoch of a bookmark with the dot after it. */
export function prefixOf(bookmark: string): string {
  return bookmark.split(";", 1)[0]!.replace(/[0-9]+$/, "");
}

/** The positions of other instances that a bookmark tells, with the semicolon in front; "": none (rule F6). */
export function marksOf(bookmark: string): string {
  const at = bookmark.indexOf(";");
  return at < 0 ? "" : bookmark.slice(at);
}
