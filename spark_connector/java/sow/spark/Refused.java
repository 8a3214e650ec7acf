package sow.spark;

/** A row is not applied. */
final class Refused extends Exception {
  final String reason;

  Refused(String reason, String message) {
    super(message, null, false, false); // without a stack: it is an answer
    this.reason = reason;
  }
}
