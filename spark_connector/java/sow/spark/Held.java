package sow.spark;

import java.nio.ByteBuffer;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.RowFactory;
import org.apache.spark.sql.types.StructType;

/** What the state has under a key: a record, or, without a payload, the tombstone of one. */
final class Held {
  /** The last column is for later releases: Spark adds none to a state that has begun. */
  static final StructType SCHEMA =
      StructType.fromDDL(
          "payload BINARY, version BIGINT NOT NULL, publish_time BIGINT NOT NULL, expire_time BIGINT, ord BINARY,"
              + " timer BIGINT, more BINARY");

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
        new Held(row.getAs(0), row.getLong(1), row.getLong(2), row.getAs(3), numbers(row.getAs(4)));
    held.timer = row.getAs(5);
    return held;
  }

  /** As the state has it. Without `ordered`, where late rows are applied, nobody asks for the order. */
  Row row(boolean ordered) {
    byte[] numbers = null;
    if (ordered) {
      numbers = new byte[8 * order.length];
      ByteBuffer.wrap(numbers).asLongBuffer().put(order);
    }
    return RowFactory.create(payload, version, publishTime, expireTime, numbers, timer, null);
  }

  private static long[] numbers(byte[] from) {
    long[] numbers = new long[from == null ? 0 : from.length / 8];
    if (from != null) ByteBuffer.wrap(from).asLongBuffer().get(numbers);
    return numbers;
  }
}
