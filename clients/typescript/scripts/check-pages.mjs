// Checks the types of every example in the pages: a block that begins with ```ts is a program of its own.

import { spawnSync } from "node:child_process";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const root = dirname(dirname(fileURLToPath(import.meta.url)));
const folder = join(root, "build/pages");
rmSync(folder, { recursive: true, force: true });
mkdirSync(folder, { recursive: true });
let programs = 0;
for (const page of ["README.md", "../../docs/languages.md"]) {
  for (const [, program] of readFileSync(join(root, page), "utf8").matchAll(/^```ts\n(.*?)^```/gms)) {
    writeFileSync(join(folder, `${page.split("/").at(-1)}-${++programs}.ts`), program);
  }
}
const options = {
  extends: "../../tsconfig.json",
  compilerOptions: {
    rootDir: "../..",
    noEmit: true,
    noUnusedLocals: false,
    paths: { "sow-client": ["../../src/index.ts"], "sow-client/contract": ["../../src/contract.ts"] },
  },
  include: ["*.ts"],
  exclude: [],
};
writeFileSync(join(folder, "tsconfig.json"), JSON.stringify(options));
const tsc = join(root, "node_modules/typescript/bin/tsc");
const { status } = spawnSync(process.execPath, [tsc, "-p", folder], { stdio: "inherit" });
console.log(`${programs} programs of the pages`);
process.exitCode = programs >= 4 ? status : 1;
