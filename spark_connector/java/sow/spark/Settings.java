package sow.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.io.Serializable;
import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.Row;

/** What the operator was told. Times are microseconds; null: none. */
final class Settings implements Serializable {
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

  String keyOrNone(Row row) {
    try {
      return keyOf(row);
    } catch (Refused refused) {
      return Key.NONE;
    }
  }

  /** The key of a row (rules K3 to K5). */
  String keyOf(Row row) throws Refused {
    byte[] payload = row.getAs(Key.PAYLOAD);
    if (payload != null && !key.isEmpty()) return Json.keyOf(payload, key);
    if (payload != null) Json.check(payload);
    String given = row.getString(Key.KEY);
    if (given == null || given.isEmpty()) {
      throw new Refused("KEY_REQUIRED", payload == null ? "_key: a row without a document needs one" : "_key: there is none");
    }
    return given;
  }
}
