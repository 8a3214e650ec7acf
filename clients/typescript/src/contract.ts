/** The generated messages and services of the contract, for `Client.call` and for programs that make calls themselves. */

export * from "./gen/sow/v1/access_pb.js";
export * from "./gen/sow/v1/admin_pb.js";
export * from "./gen/sow/v1/load_pb.js";
export * from "./gen/sow/v1/snapshot_pb.js";
export * from "./gen/sow/v1/sow_pb.js";
export * from "./gen/sow/v1/types_pb.js";
