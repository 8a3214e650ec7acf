package sow.spark;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.RowFactory;

/** Owns what the state has under one key during one micro-batch. */
final class Key {
  static final String NONE = ""; // the group of rows without a key: no key is empty (rule K5)

  private static final long TTL_MAX = 3_653L * 86_400_000_000L;

  final List<Row> changes = new ArrayList<>();
  Held held;
  Long before; // the timer that the state has
  private final Settings settings;
  private final String key;
  private final long now;
  private final long batch;
  private long last;

  Key(Settings settings, String key, long nowMicros, long batch) {
    this.settings = settings;
    this.key = key;
    this.now = nowMicros;
    this.batch = batch;
  }

  void hold(Row row) {
    if (row == null) return;
    held = Held.of(row);
    before = held.timer;
    last = held.version;
  }

  boolean acts(Held one) {
    return one.payload == null || !settings.expiration.equals("disabled");
  }

  void expire() {
    if (held == null || !acts(held) || held.expireTime == null || now < held.expireTime) return;
    if (held.payload == null) {
      held = null;
      return;
    }
    change("expire", held.payload, held.version, held.publishTime, held.expireTime, null, null);
    bury(held.order);
  }

  void apply(Given row) {
    expire();
    try {
      applied(row);
    } catch (Refused refused) {
      refuse(row, refused);
    }
  }

  void refuseKeyless(Given row) {
    try {
      settings.keyOf(row.payload(), row.key());
    } catch (Refused refused) {
      refuse(row, refused);
    }
  }

  private void refuse(Given row, Refused refused) {
    Held record = record();
    long version = record == null ? 0 : record.version;
    change("refused", row.payload(), version, null, null, refused.reason, refused.getMessage());
  }

  private Held record() {
    return held == null || held.payload == null ? null : held;
  }

  private void applied(Given row) throws Refused {
    Held record = record();
    check(row);
    String op = row.op();
    Long stamp = op.equals("delete") ? null : stamp(row);
    if (op.equals("touch") && record == null) throw new Refused("RECORD_NOT_FOUND", "there is no such record");
    checkCondition(row, record);
    if (op.equals("delete")) {
      if (record != null) {
        change("delete", record.payload, next(), record.publishTime, record.expireTime, null, null);
      }
      if (record != null || settings.tombstones != null) bury(row.order());
      return;
    }
    String mode = row.mode();
    if (record != null && "KEEP".equals(mode)) {
      stamp = record.expireTime;
    } else if (record != null && "EXTEND".equals(mode)) {
      stamp = stamp == null || record.expireTime == null ? null : Long.valueOf(Math.max(stamp, record.expireTime));
    }
    byte[] payload;
    long publishTime = now;
    if (op.equals("touch")) {
      payload = record.payload;
      publishTime = record.publishTime;
    } else {
      payload = row.payload();
      if (op.equals("delta") && record != null) payload = Json.merged(record.payload, payload);
    }
    held = new Held(payload, next(), publishTime, stamp, row.order());
    change("put", payload, held.version, publishTime, stamp, null, null);
    expire(); // a ttl of 0 (rule L7)
  }

  /** Refuses a row that is wrong in itself, or late. */
  private void check(Given row) throws Refused {
    String op = row.op();
    if (!List.of("put", "delta", "touch", "delete").contains(op)) {
      throw new Refused("INVALID_ARGUMENT", "_op: '" + op + "' is none of put, delta, touch, delete");
    }
    String mode = row.mode();
    if (mode != null && !List.of("RESET", "KEEP", "EXTEND").contains(mode)) {
      throw new Refused("INVALID_ARGUMENT", "_ttl_mode: '" + mode + "' is none of RESET, KEEP, EXTEND");
    }
    if (row.payload() == null && (op.equals("put") || op.equals("delta"))) {
      throw new Refused("PAYLOAD_MALFORMED", "payload: a " + op + " needs one");
    }
    if (settings.tombstones != null && held != null && Arrays.compare(row.order(), held.order) < 0) {
      throw new Refused("STALE", "order: " + Arrays.toString(row.order()) + " is before " + Arrays.toString(held.order));
    }
  }

  /** Refuses a condition that does not hold (rule P3). */
  private static void checkCondition(Given row, Held record) throws Refused {
    String only = row.onlyIf();
    Long onlyVersion = row.onlyIfVersion();
    if (only != null && !only.equals("absent") && !only.equals("present")) {
      throw new Refused("INVALID_ARGUMENT", "_only_if: '" + only + "' is neither absent nor present");
    }
    if (only != null && onlyVersion != null) {
      throw new Refused("INVALID_ARGUMENT", "_only_if_version: a row has one condition, and _only_if is given");
    }
    boolean holds =
        only != null
            ? only.equals(record == null ? "absent" : "present")
            : onlyVersion == null || (record != null && record.version == onlyVersion);
    if (!holds) {
      String found = record == null ? "there is no record" : "the record has version " + record.version;
      throw new Refused("CONDITION_FAILED", found);
    }
  }

  /** The expire time that a row gives its record; null: never (rules L3 to L5, L18). */
  private Long stamp(Given row) throws Refused {
    String text = row.ttl();
    Long expireTime = row.expireTime();
    Long ttl = text == null && expireTime == null ? null : given(text, expireTime);
    if (settings.expiration.equals("enabled")) {
      if (text == null && expireTime == null) ttl = settings.defaultTtl;
      if (settings.maxTtl != null && (ttl == null || ttl > settings.maxTtl)) ttl = settings.maxTtl;
      if (ttl != null && settings.minTtl != null) ttl = Math.max(ttl, settings.minTtl);
    }
    return ttl == null ? null : Long.valueOf(now + ttl);
  }

  /** The lifetime that a row carries; null for "never". */
  private Long given(String text, Long expireTime) throws Refused {
    if (text != null && expireTime != null) {
      throw new Refused("INVALID_ARGUMENT", "_expire_time: a row has one lifetime, and _ttl is given");
    }
    Long ttl = text == null || text.equals("never") ? null : Long.valueOf(Durations.micros(text));
    if (settings.expiration.equals("reject")) {
      throw new Refused("LIFETIME_REJECTED", "_ttl: the topic refuses lifetimes of records (expiration = reject)");
    }
    if (expireTime != null) {
      ttl = expireTime - now;
      if (expireTime < 0) {
        throw new Refused("LIFETIME_NEGATIVE", "_expire_time: " + expireTime + " \u00b5s is negative");
      }
      if (-ttl > TTL_MAX) {
        throw new Refused("INVALID_ARGUMENT", "_expire_time: " + expireTime + " \u00b5s is more than ten years ago");
      }
    }
    if (ttl != null && ttl > TTL_MAX) {
      throw new Refused(
          "LIFETIME_TOO_LONG", "_ttl: " + ttl / 1_000_000 + " s ahead is more than the longest lifetime of ten years");
    }
    return ttl;
  }

  private long next() {
    last = Math.max(now, last + 1);
    return last;
  }

  private void bury(long[] order) {
    held = settings.tombstones == null ? null : new Held(null, last, now, now + settings.tombstones, order);
  }

  private void change(
      String op, byte[] payload, long version, Long publishTime, Long expireTime, String reason, String message) {
    changes.add(
        RowFactory.create(
            op, key.equals(NONE) ? null : key, payload, version, publishTime, expireTime, reason, message, batch, now));
  }
}
