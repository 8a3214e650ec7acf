package sow.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.RowFactory;
import scala.jdk.javaapi.CollectionConverters;

/** Runs programs of tests.support.oracles.state_programs, a line each, and prints the changes of each batch by key. */
final class Programs {
  private static final ObjectMapper JSON = new ObjectMapper();

  public static void main(String[] arguments) throws Exception {
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      out.println(JSON.writeValueAsString(run(JSON.readTree(line))));
    }
    out.flush();
  }

  private static ArrayNode run(JsonNode program) throws Exception {
    ObjectNode told = ((ObjectNode) program.get("settings")).deepCopy();
    told.set("key", program.get("key"));
    Settings settings = new Settings(told.toString());
    Map<String, Held> states = new LinkedHashMap<>();
    ArrayNode batches = JSON.createArrayNode();
    for (JsonNode batch : program.get("batches")) {
      long now = batch.get("now").asLong();
      Map<String, List<JsonNode>> groups = new LinkedHashMap<>();
      for (JsonNode row : batch.get("rows")) {
        Given whole = row(row, null);
        String group = settings.keyOrNone(whole.payload(), whole.key());
        groups.computeIfAbsent(group, none -> new ArrayList<>()).add(row);
      }
      Set<String> keys = new LinkedHashSet<>(groups.keySet());
      keys.addAll(states.keySet());
      ObjectNode changes = batches.addObject();
      for (String key : keys) {
        Key one = new Key(settings, key, now, 0);
        Held held = states.get(key);
        one.hold(held == null ? null : held.row(settings.tombstones != null)); // as the state gives it
        List<JsonNode> rows = new ArrayList<>(groups.getOrDefault(key, List.of()));
        rows.sort(Comparator.comparing(each -> row(each, null)));
        for (JsonNode row : rows) {
          if (key.equals(Key.NONE)) {
            one.refuseKeyless(row(row, null));
          } else {
            one.expire();
            boolean live = one.held != null && one.held.payload != null;
            one.apply(row(row, live ? one.held.version : 0));
          }
        }
        one.expire();
        states.put(key, one.held);
        states.remove(Key.NONE);
        if (one.changes.isEmpty()) continue;
        ArrayNode some = changes.putArray(key);
        for (Row change : one.changes) {
          ArrayNode fields = some.addArray();
          fields.add(change.getString(0));
          byte[] payload = change.getAs(2);
          fields.add(payload == null ? null : new String(payload, StandardCharsets.UTF_8));
          fields.add(change.getLong(3));
          fields.add((Long) change.getAs(4));
          fields.add((Long) change.getAs(5));
          fields.add(change.isNullAt(6) ? "" : change.getString(6));
        }
      }
    }
    return batches;
  }

  private static Given row(JsonNode from, Long version) {
    List<Long> order = new ArrayList<>();
    from.get("ord").forEach(number -> order.add(number.asLong()));
    String payload = text(from, "payload");
    Long wanted = number(from, "only_if_version");
    Row row = RowFactory.create(
        text(from, "op"),
        payload == null ? null : payload.getBytes(StandardCharsets.UTF_8),
        text(from, "key"),
        text(from, "ttl"),
        number(from, "expire_time_micros"),
        text(from, "ttl_mode"),
        text(from, "only_if"),
        wanted != null && wanted == -1 ? version : wanted,
        CollectionConverters.asScala(order).toSeq());
    return Given.of(row);
  }

  private static String text(JsonNode from, String name) {
    return from.get(name).isNull() ? null : from.get(name).asText();
  }

  private static Long number(JsonNode from, String name) {
    return from.get(name).isNull() ? null : from.get(name).asLong();
  }
}
