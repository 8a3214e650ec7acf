package sow.spark;

import java.util.Arrays;
import java.util.List;
import org.apache.spark.sql.Row;

/** A row of the input. Each of its columns is read once. */
record Given(
    String op,
    byte[] payload,
    String key,
    String ttl,
    Long expireTime,
    String mode,
    String onlyIf,
    Long onlyIfVersion,
    long[] order)
    implements Comparable<Given> {
  private static final byte[] NOTHING = {};

  static Given of(Row row) {
    return new Given(
        row.getString(0),
        row.getAs(1),
        row.getString(2),
        row.getString(3),
        row.getAs(4),
        row.getString(5),
        row.getString(6),
        row.getAs(7),
        row.isNullAt(8) ? new long[0] : numbers(row.getList(8)));
  }

  private static long[] numbers(List<Long> from) {
    long[] numbers = new long[from.size()];
    int at = 0;
    for (Long number : from) numbers[at++] = number == null ? Long.MIN_VALUE : number;
    return numbers;
  }

  /**
   * Sorts the rows of a batch. Rows of equal order are sorted by their content, so a batch that is repeated gives the
   * same changes.
   */
  @Override
  public int compareTo(Given other) {
    int found = Arrays.compare(order, other.order);
    if (found == 0) found = Arrays.compareUnsigned(some(payload), some(other.payload));
    Object[] told = told(), others = found == 0 ? other.told() : told;
    for (int i = 0; found == 0 && i < told.length; i++) found = text(told[i]).compareTo(text(others[i]));
    return found;
  }

  private Object[] told() {
    return new Object[] {op, ttl, expireTime, mode, onlyIf, onlyIfVersion};
  }

  private static byte[] some(byte[] payload) {
    return payload == null ? NOTHING : payload;
  }

  private static String text(Object value) {
    return value == null ? "" : value.toString();
  }
}
