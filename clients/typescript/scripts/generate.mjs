// Writes src/gen from the published descriptors of the contract, and needs no protoc for that.
//
//     node scripts/generate.mjs            write the stubs
//     node scripts/generate.mjs --check    write nothing; exit 1 and name the files that differ

import { spawnSync } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import {
  CodeGeneratorRequestSchema,
  CodeGeneratorResponseSchema,
  FileDescriptorSetSchema,
} from "@bufbuild/protobuf/wkt";

const root = dirname(dirname(fileURLToPath(import.meta.url)));
const contract = fromBinary(
  FileDescriptorSetSchema,
  readFileSync(join(root, "../../proto/sow/v1/descriptors.binpb")),
);
const request = create(CodeGeneratorRequestSchema, {
  fileToGenerate: contract.file.map((file) => file.name).filter((name) => name.startsWith("sow/v1/")),
  parameter: "target=ts,import_extension=js",
  protoFile: contract.file,
});
const plugin = spawnSync(process.execPath, [join(root, "node_modules/@bufbuild/protoc-gen-es/bin/protoc-gen-es")], {
  input: toBinary(CodeGeneratorRequestSchema, request),
  maxBuffer: 64 * 1024 * 1024,
});
if (plugin.status !== 0) {
  throw new Error(`protoc-gen-es failed: ${plugin.stderr.toString()}`);
}
const response = fromBinary(CodeGeneratorResponseSchema, plugin.stdout);
if (response.error) {
  throw new Error(response.error);
}

let differing = 0;
for (const { name, content } of response.file) {
  const path = join(root, "src/gen", name);
  let present = "";
  try {
    present = readFileSync(path, "utf8");
  } catch {
    // it is new
  }
  if (present === content) {
    continue;
  }
  differing += 1;
  if (process.argv.includes("--check")) {
    console.error(`differs from what the contract generates: src/gen/${name}`);
  } else {
    mkdirSync(dirname(path), { recursive: true });
    writeFileSync(path, content);
  }
}
if (process.argv.includes("--check") && differing) {
  console.error("run `make proto`");
}
console.log(`${response.file.length} files, ${differing} ${process.argv.includes("--check") ? "differ" : "changed"}`);
process.exitCode = process.argv.includes("--check") && differing ? 1 : 0;
