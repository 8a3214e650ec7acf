package sow.spark;

import java.util.Arrays;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.RowFactory;

/** What the state has under a key: a record, or, without a payload, the tombstone of one. */
final class Held {
  final byte[] payload;
  final long version;
  final long publishTime;
  final Long expireTime;
  final long[] order;
  Long timer;

  Held(byte[] payload, long version, long publishTime, Long expireTime, long[] order) {
    this.payload = payload;
    this.version = version;
    this.publishTime = publishTime;
    this.expireTime = expireTime;
    this.order = order;
  }

  static Held of(Row row) {
    Held held =
        new Held(row.getAs(0), row.getLong(1), row.getLong(2), row.getAs(3), numbers(row.getString(4)));
    held.timer = row.getAs(5);
    return held;
  }

  Row row() {
    String text = order.length == 0 ? null : Arrays.toString(order);
    return RowFactory.create(payload, version, publishTime, expireTime, text, timer);
  }

  private static long[] numbers(String text) {
    if (text == null) return new long[0];
    return Arrays.stream(text.substring(1, text.length() - 1).split(", ")).mapToLong(Long::parseLong).toArray();
  }
}
