package sow.spark;

import java.util.ArrayList;
import java.util.List;
import java.util.function.BiFunction;
import org.apache.spark.sql.Column;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Encoders;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.api.java.UDF2;
import org.apache.spark.sql.functions;
import org.apache.spark.sql.streaming.ExpiredTimerInfo;
import org.apache.spark.sql.streaming.OutputMode;
import org.apache.spark.sql.streaming.StatefulProcessor;
import org.apache.spark.sql.streaming.TTLConfig;
import org.apache.spark.sql.streaming.TimeMode;
import org.apache.spark.sql.streaming.TimerValues;
import org.apache.spark.sql.streaming.ValueState;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import scala.collection.Iterator;
import scala.jdk.javaapi.CollectionConverters;

/**
 * The last value of each key, with its lifetime, in Spark's state store: the engine `jvm`. `sow_spark.state_fold` does the
 * same in Python and says what holds; rows come in and go out as `sow_spark.state` names their columns.
 */
public final class StateOfTheWorld implements BiFunction<Dataset<Row>, String, Dataset<Row>> {
  private static final StructType CHANGE =
      StructType.fromDDL(
          "_op STRING NOT NULL, _key STRING, payload BINARY, _version BIGINT NOT NULL, _publish_time BIGINT,"
              + " _expire_time BIGINT, _reason STRING, _message STRING, _batch BIGINT, _now BIGINT NOT NULL");

  @Override
  public Dataset<Row> apply(Dataset<Row> rows, String json) {
    Settings settings = new Settings(json);
    UDF2<byte[], String, String> read = settings::keyOrNone;
    Column key = functions.udf(read, DataTypes.StringType).apply(rows.col("payload"), rows.col("key"));
    Dataset<Row> keyed = rows.withColumn("plain_key", functions.coalesce(rows.col("plain_key"), key));
    return keyed
        .groupBy("plain_key")
        .as(Encoders.STRING(), Encoders.row(keyed.schema()))
        .transformWithState(
            new Processor(settings), TimeMode.ProcessingTime(), OutputMode.Append(), Encoders.row(CHANGE));
  }

  private static final class Processor extends StatefulProcessor<String, Row, Row> {
    private final Settings settings;
    private transient ValueState<Row> state;

    Processor(Settings settings) {
      this.settings = settings;
    }

    @Override
    public void init(OutputMode outputMode, TimeMode timeMode) {
      state = getHandle().getValueState("record", Encoders.row(Held.SCHEMA), TTLConfig.NONE());
    }

    @Override
    public Iterator<Row> handleInputRows(String key, Iterator<Row> input, TimerValues timerValues) {
      List<Given> rows = new ArrayList<>();
      input.foreach(row -> rows.add(Given.of(row)));
      Key one = key(key, timerValues);
      if (key.equals(Key.NONE)) {
        for (Given row : rows) one.refuseKeyless(row);
        return CollectionConverters.asScala(one.changes.iterator());
      }
      if (rows.size() > 1) rows.sort(null);
      one.hold(state.get());
      for (Given row : rows) one.apply(row);
      keep(one);
      return CollectionConverters.asScala(one.changes.iterator());
    }

    @Override
    public Iterator<Row> handleExpiredTimer(String key, TimerValues timerValues, ExpiredTimerInfo expiredTimerInfo) {
      Key one = key(key, timerValues);
      one.hold(state.get());
      if (one.held != null) one.held.timer = null; // it has just gone off
      one.before = null;
      one.expire();
      keep(one);
      return CollectionConverters.asScala(one.changes.iterator());
    }

    private Key key(String key, TimerValues timerValues) {
      long now = timerValues.getCurrentProcessingTimeInMs() * 1_000;
      return new Key(settings, key, now, getHandle().getQueryInfo().getBatchId());
    }

    /** Writes what a key has now. A timer moves only where its record may fall due before it. */
    private void keep(Key one) {
      Held held = one.held;
      Long timer = one.before;
      Long due = held == null || !one.acts(held) || held.expireTime == null ? null : (held.expireTime + 999) / 1_000;
      if (timer != null && (due == null || due < timer)) {
        getHandle().deleteTimer(timer);
        timer = null;
      }
      if (timer == null && due != null) {
        getHandle().registerTimer(due);
        timer = due;
      }
      if (held == null) {
        state.clear();
      } else {
        held.timer = timer;
        state.update(held.row(settings.tombstones != null));
      }
    }
  }
}
