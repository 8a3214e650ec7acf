package sow.spark;

import java.math.BigDecimal;
import java.math.BigInteger;
import java.math.RoundingMode;
import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** The notation of durations (rule L1). */
final class Durations {
  private static final Pattern PART = Pattern.compile("([0-9]*)(?:\\.([0-9]*))?([^0-9.\\s+-]*)");
  private static final Map<String, Long> NANOS =
      Map.of(
          "ns", 1L,
          "us", 1_000L,
          "\u00b5s", 1_000L,
          "\u03bcs", 1_000L,
          "ms", 1_000_000L,
          "s", 1_000_000_000L,
          "m", 60_000_000_000L,
          "h", 3_600_000_000_000L,
          "d", 86_400_000_000_000L,
          "w", 604_800_000_000_000L);

  private Durations() {}

  /** The microseconds that a text names; a remainder below one is cut off, once. */
  static long micros(String text) throws Refused {
    if (text.startsWith("-")) throw new Refused("LIFETIME_NEGATIVE", "_ttl: duration '" + text + "' is negative");
    if (text.isEmpty() || text.length() > 100) throw wrong(text, 0);
    BigDecimal nanos = BigDecimal.ZERO;
    Matcher part = PART.matcher(text);
    int at = 0;
    while (at < text.length()) {
      part.region(at, text.length());
      boolean found = part.lookingAt();
      String fraction = !found || part.group(2) == null ? "" : part.group(2);
      Long unit = found ? NANOS.get(part.group(3)) : null;
      if (unit == null || (part.group(1) + fraction).isEmpty()) throw wrong(text, at);
      BigInteger digits = new BigInteger(part.group(1) + fraction);
      nanos = nanos.add(new BigDecimal(digits, fraction.length()).multiply(BigDecimal.valueOf(unit)));
      at = part.end();
    }
    BigInteger micros = nanos.divide(BigDecimal.valueOf(1_000), 0, RoundingMode.DOWN).toBigInteger();
    if (micros.bitLength() > 63) throw wrong(text, 0);
    return micros.longValue();
  }

  private static Refused wrong(String text, int at) {
    return new Refused("INVALID_ARGUMENT", "_ttl: '" + text + "' is no duration such as 30s or 1h30m, at " + at);
  }
}
