/** The fields of fix and nvfix payloads, read as the server reads them (rule K2). No I/O. */

// The tag of a data field, by the tag of its length: FIX 4.0 to 5.0SP2, as `sow.flat_fields` has them.
const DATA_OF: ReadonlyMap<string, string> = new Map(
  [
    [90, 91], [93, 89], [95, 96], [212, 213], [348, 349], [350, 351], [352, 353], [354, 355], [356, 357], [358, 359],
    [360, 361], [362, 363], [364, 365], [445, 446], [618, 619], [621, 622], [1184, 1185], [1277, 1278], [1280, 1281],
    [1282, 1283], [1397, 1398], [1401, 1402], [1403, 1404], [1468, 1469],
  ].map(([length, data]) => [String(length), String(data)]),
);
const EQUALS = 0x3d;
const LENGTH = /^[0-9]{1,9}$/;

/**
 * The fields by their names. Of a repeated name the first one counts. With `tags`, the payload is fix: a data field may
 * hold the separator, if the field right before it is its length, and 055 is tag 55.
 */
export function fieldsOf(payload: Uint8Array, separator: string, tags: boolean): { [name: string]: string } {
  const between = separator.charCodeAt(0);
  const bytes = Buffer.from(payload.buffer, payload.byteOffset, payload.byteLength);
  const found = new Map<string, string>();
  let due = { tag: "", size: -1 };
  for (let at = 0; at < bytes.length; ) {
    const next = bytes.indexOf(between, at);
    let end = next < 0 ? bytes.length : next;
    const equals = bytes.subarray(at, end).indexOf(EQUALS);
    const start = at + equals + 1;
    let name = equals > 0 ? bytes.toString("utf8", at, start - 1) : "";
    if (tags && name !== "") {
      name = name.replace(/^0+(?=.)/, "");
      const close = start + due.size;
      if (name === due.tag && due.size >= 0 && (close === bytes.length || bytes[close] === between)) {
        end = close;
      }
    }
    due = { tag: "", size: -1 };
    if (name !== "") {
      const value = bytes.toString("utf8", start, end);
      const data = tags ? DATA_OF.get(name) : undefined;
      if (data !== undefined && LENGTH.test(value)) {
        due = { tag: data, size: Number(value) };
      }
      if (!found.has(name)) {
        found.set(name, value);
      }
    }
    at = end + 1;
  }
  return Object.fromEntries(found);
}
