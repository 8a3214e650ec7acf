/**
 * A real server in a process of its own: start it, end it in every way, start it again on the same port.
 *
 *   [1]  The process is ended, by its handle, whatever becomes of the test.
 *   [2]  Every wait has a bound, and running into it shows the log.
 */

import { type ChildProcess, execFile, execFileSync, spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

const ROOT = join(dirname(fileURLToPath(import.meta.url)), "../../../../..");
const PYTHON = process.env["SOW_TEST_PYTHON"] ?? join(ROOT, ".venv/bin/python");
const ENVIRONMENT = { ...process.env, PYTHONPATH: ["", "proto", "replication"].map((part) => join(ROOT, part)).join(":") };
const START_MS = 120_000; // long: where the machine is busy with other things, a start takes as long as it takes
const STOP_MS = 30_000;

/** Why no server can be started; false: it can. */
export const NO_SERVER = existsSync(PYTHON) ? false : `${PYTHON} is missing: make .venv/.installed makes it`;

interface Ending {
  after(end: () => void | Promise<void>): void;
}

/** Owns a server process, its folder, and its port, which a restart keeps. */
export class Server {
  readonly folder: string;
  readonly port: number;
  log = "";
  #process: ChildProcess | undefined;

  private constructor(folder: string, port: number) {
    this.folder = folder;
    this.port = port;
  }

  /** A server that is yet to be configured and started. The test ends it. */
  static async make(t: Ending): Promise<Server> {
    const server = new Server(mkdtempSync(join(tmpdir(), "sow-ts-")), await freePort());
    t.after(async () => {
      await server.kill();
      rmSync(server.folder, { recursive: true });
    });
    return server;
  }

  /** A running server. The test ends it. `prepare` gets its folder before it starts. */
  static async start(t: Ending, config = "[server]\ndynamic_topics = true\n", prepare?: (folder: string) => void): Promise<Server> {
    const server = await Server.make(t);
    server.configure(config);
    prepare?.(server.folder);
    await server.start();
    return server;
  }

  /** Writes the configuration for the next start. */
  configure(config: string): void {
    writeFileSync(join(this.folder, "sow.toml"), config, { mode: 0o600 }); // it may have a token
  }

  get address(): string {
    return `127.0.0.1:${this.port}`;
  }

  async start(): Promise<void> {
    const files = ["--config", join(this.folder, "sow.toml"), "--data-dir", join(this.folder, "data")];
    const child = spawn(PYTHON, ["-m", "sow_server", ...files, "--listen", this.address], {
      cwd: this.folder,
      env: ENVIRONMENT,
      stdio: ["ignore", "pipe", "pipe"],
    });
    this.#process = child;
    const start = this.log.length;
    await new Promise<void>((resolve, reject) => {
      const timer = setTimeout(() => reject(new Error(`not ready after ${START_MS} ms:\n${this.log}`)), START_MS);
      const heard = (chunk: Buffer): void => {
        this.log += chunk.toString();
        if (/"event": ?"ready"/.test(this.log.slice(start))) {
          clearTimeout(timer);
          resolve();
        }
      };
      child.stdout.on("data", heard);
      child.stderr.on("data", heard);
      child.once("exit", (code) => {
        clearTimeout(timer);
        reject(new Error(`it ended with ${code}:\n${this.log}`));
      });
    });
  }

  /** SIGTERM, and the end of the process. */
  async stop(): Promise<void> {
    await this.#end("SIGTERM");
  }

  /** SIGKILL, and the end of the process. */
  async kill(): Promise<void> {
    await this.#end("SIGKILL");
  }

  async #end(signal: NodeJS.Signals): Promise<void> {
    const child = this.#process;
    this.#process = undefined;
    if (child === undefined || child.exitCode !== null || child.signalCode !== null) {
      return;
    }
    const ended = once(child, "exit", { signal: AbortSignal.timeout(STOP_MS) });
    child.kill(signal);
    await ended;
  }
}

/** Runs a Python program with the tests' own modules, in a folder. */
export function python(program: string, folder: string): void {
  execFileSync(PYTHON, ["-c", program], { cwd: folder, env: ENVIRONMENT });
}

/** Runs a command of `sow`, to its end. */
export async function command(...words: string[]): Promise<void> {
  await promisify(execFile)(PYTHON, ["-m", "sow_cli", ...words], { env: ENVIRONMENT });
}

async function freePort(): Promise<number> {
  // From below the range out of which the system gives ports to connections: a restart must find it free.
  for (let attempt = 0; attempt < 100; attempt++) {
    const port = 20_000 + Math.floor(Math.random() * 12_000);
    const probe = createServer();
    const isFree = await new Promise<boolean>((resolve) => {
      probe.once("error", () => resolve(false));
      probe.listen(port, "127.0.0.1", () => probe.close(() => resolve(true)));
    });
    if (isFree) {
      return port;
    }
  }
  throw new Error("no free port in a hundred");
}
