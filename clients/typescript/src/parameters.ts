/**
 * The values of a filter's parameters. A value travels beside the filter with its type, and never inside its text: no
 * user's text changes what a filter means. No I/O.
 */

import { create } from "@bufbuild/protobuf";
import { kindOf, wellFormed } from "./arguments.js";
import { invalid } from "./errors.js";
import { type Parameter, ParameterSchema, type Scalar, ScalarListSchema, ScalarSchema } from "./gen/sow/v1/types_pb.js";

/** An integer that a number does not hold exactly is a bigint. */
export type ParameterScalar = string | number | bigint | boolean | null;

/** The values of the names in a filter: `{ name: user }` for `/Name = :name`; a list is for IN. */
export type Parameters = Readonly<Record<string, ParameterScalar | readonly ParameterScalar[]>>;

const INT64_MIN = -(2n ** 63n);
const INT64_MAX = 2n ** 63n - 1n;
const DIGITS_MAX = 4_300; // the server's limit

/** The parameters of a request. */
export function parameterValues(parameters: Parameters = {}): Record<string, Parameter> {
  if (typeof parameters !== "object" || parameters === null || Symbol.iterator in parameters) {
    throw invalid("parameters", `an object of names and values is needed, not a ${kindOf(parameters)}`);
  }
  return Object.fromEntries(
    Object.entries(parameters).map(([name, value]) => [wellFormed(name, "parameters"), message(`parameters.${name}`, value)]),
  );
}

function message(field: string, value: Parameters[string]): Parameter {
  if (Array.isArray(value)) {
    const items = value.map((item: ParameterScalar, index) => scalar(`${field}[${index}]`, item));
    return create(ParameterSchema, { value: { case: "list", value: create(ScalarListSchema, { items }) } });
  }
  return create(ParameterSchema, { value: { case: "scalar", value: scalar(field, value as ParameterScalar) } });
}

function scalar(field: string, value: ParameterScalar): Scalar {
  return create(ScalarSchema, { value: caseOf(field, value) });
}

function caseOf(field: string, value: ParameterScalar): Scalar["value"] {
  switch (typeof value) {
    case "string":
      return { case: "text", value: wellFormed(value, field) };
    case "boolean":
      return { case: "boolean", value };
    case "number":
      return Number.isSafeInteger(value) && !Object.is(value, -0)
        ? { case: "integer", value: BigInt(value) }
        : { case: "number", value };
    case "bigint": {
      if (value >= INT64_MIN && value <= INT64_MAX) {
        return { case: "integer", value };
      }
      const digits = value.toString();
      if (digits.length - Number(value < 0n) > DIGITS_MAX) {
        throw invalid(field, `has ${digits.length} digits, more than the limit of ${DIGITS_MAX}`);
      }
      return { case: "largeInteger", value: digits };
    }
    default:
      if (value === null) {
        return { case: "null", value: true };
      }
      throw invalid(field, `a ${typeof value} is no value of a filter; give a text, a number, a boolean, null, or a list`);
  }
}
