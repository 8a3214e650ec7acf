package sow.spark;

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonParseException;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonToken;
import com.fasterxml.jackson.core.StreamReadConstraints;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.math.MathContext;
import java.math.RoundingMode;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** JSON documents as the rules of sow read them: checked (K2), with keys (K4, K5), and merged (P2). */
final class Json {
  static final int NESTING_MAX = 256;
  static final int LEVELS_MAX = 32;
  static final int PAYLOAD_BYTES_MAX = 1 << 20;
  static final int DIGITS_MAX = 4300; // of an integer under a key field, as in Python
  private static final String NOT_SCALAR = new String();
  private static final byte[] NULL = "null".getBytes(StandardCharsets.US_ASCII);
  private static final JsonFactory FACTORY =
      JsonFactory.builder()
          .streamReadConstraints(
              StreamReadConstraints.builder()
                  .maxNestingDepth(NESTING_MAX)
                  .maxNumberLength(Integer.MAX_VALUE)
                  .maxStringLength(Integer.MAX_VALUE)
                  .maxNameLength(Integer.MAX_VALUE)
                  .build())
          .build();

  private Json() {}

  /** The key of a document, by the paths of its fields; checks the whole document. */
  static String keyOf(byte[] payload, List<List<String>> paths) throws Refused {
    String[] texts = read(payload, paths);
    StringBuilder key = new StringBuilder();
    for (int i = 0; i < texts.length; i++) {
      if (texts[i] == null) {
        throw new Refused("KEY_FIELD_MISSING", "key field " + text(paths.get(i)) + " is missing or null");
      }
      if (texts[i] == NOT_SCALAR) { // this very text, and no equal one
        throw new Refused(
            "KEY_FIELD_NOT_SCALAR", "key field " + text(paths.get(i)) + " is not a text, a number or a boolean");
      }
      key.append(i == 0 ? "" : "|").append(texts[i].replace("\\", "\\\\").replace("|", "\\|"));
    }
    if (key.length() == 0) {
      throw new Refused("KEY_REQUIRED", "key field " + text(paths.get(0)) + " is the empty text, which is no key");
    }
    return key.toString();
  }

  /** Checks a document without key fields. */
  static void check(byte[] payload) throws Refused {
    read(payload, List.of());
  }

  /** The canonical texts of fields of a document, which is checked as a whole. */
  private static String[] read(byte[] payload, List<List<String>> paths) throws Refused {
    checkSize(payload);
    String[] texts = new String[paths.size()];
    boolean escapes = false;
    boolean ascii = true;
    for (byte one : payload) {
      escapes |= one == '\\';
      ascii &= one > 0; // Jackson takes a zero near the start for UTF-16
    }
    try (JsonParser parser = FACTORY.createParser(payload)) {
      if (!ascii) checkText(payload);
      if (parser.nextToken() != JsonToken.START_OBJECT) {
        throw new Refused("PAYLOAD_MALFORMED", "payload: it is no object (byte 0)");
      }
      object(parser, paths, 0, texts, new boolean[paths.size()], escapes);
      if (parser.nextToken() != null) {
        throw new Refused("PAYLOAD_MALFORMED", "payload: something follows the object (byte " + at(parser) + ")");
      }
    } catch (IOException error) {
      throw malformed(error);
    }
    return texts;
  }

  private static void checkSize(byte[] payload) throws Refused {
    if (payload.length > PAYLOAD_BYTES_MAX) {
      throw new Refused(
          "PAYLOAD_TOO_LARGE",
          "payload: " + payload.length + " bytes, at most " + PAYLOAD_BYTES_MAX + " are taken");
    }
  }

  /** Refuses what is no UTF-8, as Jackson does not look at all of it, a byte order mark, and zeros. */
  private static void checkText(byte[] payload) throws IOException, Refused {
    if (payload[0] < 0) throw new Refused("PAYLOAD_MALFORMED", "payload: it is no object (byte 0)");
    for (int i = 0; i < payload.length; i++) {
      if (payload[i] == 0) throw new Refused("PAYLOAD_MALFORMED", "payload: it has a zero (byte " + i + ")");
    }
    StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(payload));
  }

  /** Reads an object to its end. `inside`: the paths whose first `depth` steps lead here are not false. */
  private static void object(
      JsonParser parser, List<List<String>> paths, int depth, String[] texts, boolean[] outside, boolean escapes)
      throws IOException, Refused {
    while (parser.nextToken() == JsonToken.FIELD_NAME) {
      String name = parser.currentName();
      if (escapes) surrogates(name, parser);
      JsonToken token = parser.nextToken();
      boolean[] below = null;
      boolean isKey = false;
      for (int i = 0; i < paths.size(); i++) {
        List<String> path = paths.get(i);
        if (outside[i] || path.size() <= depth || !path.get(depth).equals(name)) continue;
        texts[i] = null; // the last of a repeated name counts
        if (path.size() == depth + 1) {
          texts[i] = canonical(parser, token);
          isKey = true;
        } else if (token == JsonToken.START_OBJECT) {
          if (below == null) {
            below = new boolean[paths.size()];
            Arrays.fill(below, true);
          }
          below[i] = false;
        } else {
          isKey = true; // the key field below is missing, and a server reads this value all the same
        }
      }
      if (below != null) {
        object(parser, paths, depth + 1, texts, below, escapes);
      } else {
        value(parser, token, escapes, isKey);
      }
    }
  }

  /** Reads a value to its end. One under a key field has no numbers out of range. */
  private static void value(JsonParser parser, JsonToken token, boolean escapes, boolean isKey)
      throws IOException, Refused {
    int open = 0;
    for (JsonToken each = token; ; each = parser.nextToken()) {
      if (each == null) throw new Refused("PAYLOAD_MALFORMED", "payload: it ends too early (byte " + at(parser) + ")");
      if (each.isStructStart()) open++;
      else if (each.isStructEnd()) open--;
      else if (each == JsonToken.VALUE_STRING || each == JsonToken.FIELD_NAME) {
        if (escapes) surrogates(parser.getText(), parser); // Jackson reads texts lazily
      } else if (isKey
          && (each == JsonToken.VALUE_NUMBER_FLOAT
              ? Double.isInfinite(parser.getDoubleValue())
              : each == JsonToken.VALUE_NUMBER_INT && parser.getTextLength() > DIGITS_MAX)) {
        throw new Refused("PAYLOAD_MALFORMED", "payload: a key field has a number out of range");
      }
      if (open == 0) return;
    }
  }

  private static void surrogates(String text, JsonParser parser) throws Refused {
    for (int i = 0; i < text.length(); i++) {
      char one = text.charAt(i);
      if (!Character.isSurrogate(one)) continue;
      if (Character.isLowSurrogate(one) || i + 1 == text.length() || !Character.isLowSurrogate(text.charAt(i + 1))) {
        throw new Refused("PAYLOAD_MALFORMED", "payload: a text has half of a character (byte " + at(parser) + ")");
      }
      i++;
    }
  }

  /** The canonical text of a key field (rule K4); null for null. */
  private static String canonical(JsonParser parser, JsonToken token) throws IOException {
    switch (token) {
      case VALUE_STRING:
        return parser.getText();
      case VALUE_NUMBER_INT:
        return "-0".equals(parser.getText()) ? "0" : parser.getText();
      case VALUE_NUMBER_FLOAT:
        return number(parser.getDoubleValue());
      case VALUE_TRUE:
        return "true";
      case VALUE_FALSE:
        return "false";
      case VALUE_NULL:
        return null;
      default:
        return NOT_SCALAR;
    }
  }

  /** The shortest digits that read back as the float; `Double.toString` of Java 17 has longer ones at times. */
  private static String number(double value) {
    if (value == 0) return "0";
    if (Double.isInfinite(value)) return NOT_SCALAR; // refused as soon as it is read
    BigDecimal exact = new BigDecimal(value);
    BigDecimal shortest = exact;
    for (int digits = 1; digits <= 17; digits++) {
      shortest = exact.round(new MathContext(digits, RoundingMode.HALF_EVEN));
      if (shortest.doubleValue() == value) break;
    }
    if (value == Math.rint(value)) {
      BigInteger whole = Math.abs(value) <= 9007199254740992.0 ? exact.toBigInteger() : shortest.toBigInteger();
      return whole.toString();
    }
    shortest = shortest.stripTrailingZeros();
    int exponent = shortest.precision() - shortest.scale() - 1;
    if (exponent >= -4 && exponent < 16) return shortest.toPlainString();
    String digits = shortest.unscaledValue().abs().toString();
    return (value < 0 ? "-" : "")
        + digits.charAt(0)
        + (digits.length() > 1 ? "." + digits.substring(1) : "")
        + (exponent < 0 ? "e-" : "e+")
        + (Math.abs(exponent) < 10 ? "0" : "")
        + Math.abs(exponent);
  }

  /** The record that a delta makes (rule P2): untouched fields keep their bytes, and an untouched record all of them. */
  static byte[] merged(byte[] base, byte[] delta) throws Refused {
    try {
      Map<String, byte[]> fields = fields(base);
      byte[] made = merge(fields, fields(delta), 0) ? encoded(fields) : base;
      checkSize(made);
      return made;
    } catch (IOException error) {
      throw malformed(error);
    }
  }

  /** Changes `fields`; returns true if that made a difference. */
  private static boolean merge(Map<String, byte[]> fields, Map<String, byte[]> delta, int depth)
      throws IOException, Refused {
    if (depth >= LEVELS_MAX) {
      throw new Refused(
          "PAYLOAD_MALFORMED",
          "objects of a delta are merged down to " + LEVELS_MAX + " levels, and this one goes deeper");
    }
    boolean changed = false;
    for (Map.Entry<String, byte[]> one : delta.entrySet()) {
      byte[] given = one.getValue();
      byte[] before = fields.get(one.getKey());
      if (given[0] != '{') {
        if (Arrays.equals(given, NULL) || Arrays.equals(given, before)) continue;
      } else if (before != null && before[0] == '{') {
        Map<String, byte[]> inner = fields(before);
        if (!merge(inner, fields(given), depth + 1)) continue;
        given = encoded(inner);
      } else if (containsNull(given)) { // perhaps; a missing field stays missing
        Map<String, byte[]> inner = new LinkedHashMap<>();
        merge(inner, fields(given), depth + 1);
        given = encoded(inner);
      }
      fields.put(one.getKey(), given);
      changed = true;
    }
    return changed;
  }

  /** The fields of an object with the bytes of their values. */
  private static Map<String, byte[]> fields(byte[] payload) throws IOException {
    Map<String, byte[]> fields = new LinkedHashMap<>();
    try (JsonParser parser = FACTORY.createParser(payload)) {
      parser.nextToken();
      while (parser.nextToken() == JsonToken.FIELD_NAME) {
        String name = parser.currentName();
        parser.nextToken();
        int start = (int) parser.currentTokenLocation().getByteOffset();
        parser.skipChildren();
        if (parser.currentToken() == JsonToken.VALUE_STRING) parser.finishToken();
        int end = (int) parser.currentLocation().getByteOffset();
        fields.put(name, Arrays.copyOfRange(payload, start, end));
      }
    }
    return fields;
  }

  private static byte[] encoded(Map<String, byte[]> fields) throws IOException {
    ByteArrayOutputStream out = new ByteArrayOutputStream();
    out.write('{');
    for (Map.Entry<String, byte[]> one : fields.entrySet()) {
      if (out.size() > 1) out.write(',');
      out.write(quoted(one.getKey()));
      out.write(':');
      out.write(one.getValue());
    }
    out.write('}');
    return out.toByteArray();
  }

  private static byte[] quoted(String name) {
    char[] inner = com.fasterxml.jackson.core.io.JsonStringEncoder.getInstance().quoteAsString(name);
    return ('"' + new String(inner) + '"').getBytes(StandardCharsets.UTF_8);
  }

  private static boolean containsNull(byte[] payload) {
    for (int i = 0; i + 4 <= payload.length; i++) {
      if (payload[i] == 'n' && payload[i + 1] == 'u' && payload[i + 2] == 'l' && payload[i + 3] == 'l') return true;
    }
    return false;
  }

  private static Refused malformed(IOException error) {
    if (error instanceof JsonParseException parse) {
      return new Refused(
          "PAYLOAD_MALFORMED",
          "payload: " + parse.getOriginalMessage() + " (byte " + parse.getLocation().getByteOffset() + ")");
    }
    String message = error.getMessage().split("\n")[0];
    return new Refused("PAYLOAD_MALFORMED", "payload: " + message);
  }

  private static long at(JsonParser parser) {
    return parser.currentLocation().getByteOffset();
  }

  private static String text(List<String> path) {
    return "/" + String.join("/", path);
  }
}
