package sow.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.io.Serializable;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;

/** What the operator was told. Times are microseconds; null: none. */
final class Settings implements Serializable {
  private static final int KEY_BYTES_MAX = 1 << 10;
  final String expiration;
  final Long defaultTtl;
  final Long minTtl;
  final Long maxTtl;
  final Long tombstones;
  final ArrayList<List<String>> key = new ArrayList<>();

  Settings(String json) {
    JsonNode from;
    try {
      from = new ObjectMapper().readTree(json);
    } catch (IOException error) {
      throw new IllegalArgumentException(error);
    }
    expiration = from.get("expiration").asText();
    defaultTtl = micros(from, "default_ttl_micros");
    minTtl = micros(from, "min_ttl_micros");
    maxTtl = micros(from, "max_ttl_micros");
    tombstones = micros(from, "tombstones_micros");
    for (JsonNode path : from.get("key")) {
      ArrayList<String> steps = new ArrayList<>();
      path.forEach(step -> steps.add(step.asText()));
      key.add(steps);
    }
  }

  private static Long micros(JsonNode from, String name) {
    JsonNode value = from.get(name);
    return value == null || value.isNull() ? null : value.asLong();
  }

  String keyOrNone(byte[] payload, String given) {
    try {
      return keyOf(payload, given);
    } catch (Refused refused) {
      return Key.NONE;
    }
  }

  /** The key of a row (rules K3 to K5, K8). */
  String keyOf(byte[] payload, String given) throws Refused {
    String made = given;
    if (payload != null && !key.isEmpty()) {
      made = Json.keyOf(payload, key);
    } else {
      if (payload != null) Json.check(payload);
      if (made == null || made.isEmpty()) {
        String needed = payload == null ? "a row without a document needs one" : "there is none";
        throw new Refused("KEY_REQUIRED", "_key: " + needed);
      }
      int parts = parts(made);
      if (!key.isEmpty() && parts != key.size()) {
        throw new Refused(
            "INVALID_ARGUMENT", "_key: '" + made + "' has " + parts + " parts, and a key here has " + key.size());
      }
    }
    // A character takes three bytes at most.
    int size = made.length() <= KEY_BYTES_MAX / 3 ? 0 : made.getBytes(StandardCharsets.UTF_8).length;
    if (size > KEY_BYTES_MAX) {
      throw new Refused("KEY_TOO_LARGE", "key: " + size + " bytes, at most " + KEY_BYTES_MAX + " are taken");
    }
    return made;
  }

  private static int parts(String key) {
    int parts = 1;
    for (int i = 0; i < key.length(); i++) {
      if (key.charAt(i) == '\\') i++;
      else if (key.charAt(i) == '|') parts++;
    }
    return parts;
  }
}
