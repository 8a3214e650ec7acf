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
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** JSON documents as the rules of sow read them: checked (K2), with keys (K4, K5), and merged (P2). */
final class Json {
  static final int NESTING_MAX = 256;
  static final int LEVELS_MAX = 32;
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
    String[] texts = new String[paths.size()];
    try (JsonParser parser = FACTORY.createParser(payload)) {
      if (parser.nextToken() != JsonToken.START_OBJECT) {
        throw new Refused("PAYLOAD_MALFORMED", "payload: it is no object (byte 0)");
      }
      boolean escapes = contains(payload, (byte) '\\');
      object(parser, paths, 0, texts, new boolean[paths.size()], escapes);
      if (parser.nextToken() != null) {
        throw new Refused("PAYLOAD_MALFORMED", "payload: something follows the object (byte " + at(parser) + ")");
      }
    } catch (IOException error) {
      throw malformed(error);
    }
    StringBuilder key = new StringBuilder();
    for (int i = 0; i < texts.length; i++) {
      if (texts[i] == null) {
        throw new Refused("KEY_FIELD_MISSING", "key field " + text(paths.get(i)) + " is missing or null");
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
    try (JsonParser parser = FACTORY.createParser(payload)) {
      if (parser.nextToken() != JsonToken.START_OBJECT) {
        throw new Refused("PAYLOAD_MALFORMED", "payload: it is no object (byte 0)");
      }
      object(parser, List.of(), 0, new String[0], new boolean[0], contains(payload, (byte) '\\'));
      if (parser.nextToken() != null) {
        throw new Refused("PAYLOAD_MALFORMED", "payload: something follows the object (byte " + at(parser) + ")");
      }
    } catch (IOException error) {
      throw malformed(error);
    }
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
      for (int i = 0; i < paths.size(); i++) {
        List<String> path = paths.get(i);
        if (outside[i] || path.size() <= depth || !path.get(depth).equals(name)) continue;
        texts[i] = null; // the last of a repeated name counts
        if (path.size() == depth + 1) {
          texts[i] = canonical(parser, token, path);
        } else if (token == JsonToken.START_OBJECT) {
          if (below == null) {
            below = new boolean[paths.size()];
            Arrays.fill(below, true);
          }
          below[i] = false;
        }
      }
      if (below != null) {
        object(parser, paths, depth + 1, texts, below, escapes);
      } else {
        value(parser, token, escapes);
      }
    }
  }

  /** Reads a value to its end. */
  private static void value(JsonParser parser, JsonToken token, boolean escapes) throws IOException, Refused {
    int open = 0;
    for (JsonToken each = token; ; each = parser.nextToken()) {
      if (each == null) throw new Refused("PAYLOAD_MALFORMED", "payload: it ends too early (byte " + at(parser) + ")");
      if (each.isStructStart()) open++;
      else if (each.isStructEnd()) open--;
      else if (each == JsonToken.VALUE_STRING || each == JsonToken.FIELD_NAME) {
        // Jackson reads texts lazily: without this, a text that is no UTF-8 would pass.
        String text = parser.getText();
        if (escapes) surrogates(text, parser);
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
  private static String canonical(JsonParser parser, JsonToken token, List<String> path) throws IOException, Refused {
    switch (token) {
      case VALUE_STRING:
        return parser.getText();
      case VALUE_NUMBER_INT:
        return "-0".equals(parser.getText()) ? "0" : parser.getText();
      case VALUE_NUMBER_FLOAT:
        return number(Double.parseDouble(parser.getText()), path);
      case VALUE_TRUE:
        return "true";
      case VALUE_FALSE:
        return "false";
      case VALUE_NULL:
        return null;
      default:
        throw new Refused("KEY_FIELD_NOT_SCALAR", "key field " + text(path) + " is not a text, a number or a boolean");
    }
  }

  /** The shortest digits that read back as the float; `Double.toString` of Java 17 has longer ones at times. */
  static String number(double value, List<String> path) throws Refused {
    if (Double.isInfinite(value)) {
      throw new Refused("PAYLOAD_MALFORMED", "key field " + text(path) + " is a number out of range");
    }
    if (value == 0) return "0";
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

  /** The record that a delta makes (rule P2): untouched fields keep their bytes. */
  static byte[] merged(byte[] base, byte[] delta) throws Refused {
    try {
      Map<String, byte[]> fields = fields(base);
      merge(fields, fields(delta), 0);
      return encoded(fields);
    } catch (IOException error) {
      throw malformed(error);
    }
  }

  private static void merge(Map<String, byte[]> fields, Map<String, byte[]> delta, int depth)
      throws IOException, Refused {
    if (depth >= LEVELS_MAX) {
      throw new Refused(
          "PAYLOAD_MALFORMED",
          "objects of a delta are merged down to " + LEVELS_MAX + " levels, and this one goes deeper");
    }
    for (Map.Entry<String, byte[]> one : delta.entrySet()) {
      byte[] given = one.getValue();
      byte[] before = fields.get(one.getKey());
      if (Arrays.equals(given, NULL)) continue;
      boolean inside = before != null && before[0] == '{';
      if (given[0] != '{' || (!inside && !containsNull(given))) {
        fields.put(one.getKey(), given);
        continue;
      }
      Map<String, byte[]> inner = inside ? fields(before) : new LinkedHashMap<>();
      merge(inner, fields(given), depth + 1);
      fields.put(one.getKey(), encoded(inner));
    }
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

  private static boolean contains(byte[] payload, byte wanted) {
    for (byte one : payload) if (one == wanted) return true;
    return false;
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
