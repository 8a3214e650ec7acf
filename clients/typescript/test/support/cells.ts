/** Two cells, `a` and `b`, of which b has the topics whose names begin with "b-". Each is a real server. */

import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { AdminService } from "../../src/contract.js";
import { Client } from "../../src/index.js";
import { command, Server } from "./server.js";

export type Cell = "a" | "b";
/** A pattern of topics, and the cell where they live. */
type Placed = readonly [pattern: string, cell: Cell];

/** Owns the servers, and the version of their placement. */
export class TwoCells {
  readonly servers: Readonly<Record<Cell, Server>>;
  #version = 0; // the one that was loaded last
  #topics = 0;

  private constructor(a: Server, b: Server) {
    this.servers = { a, b };
  }

  /** Both are running. The test ends them. */
  static async start(t: { after(end: () => void | Promise<void>): void }): Promise<TwoCells> {
    const cells = new TwoCells(await Server.make(t), await Server.make(t));
    cells.#write([], ["a", "b"]);
    await Promise.all(
      (["a", "b"] as const).map(async (cell) => {
        const config = `[server]\ndynamic_topics = true\ninstance = "${cell}-1"\n[replication]\nserve_links = true\n`;
        cells.servers[cell].configure(`${config}[placement]\ncell = "${cell}"\nfile = "placement.toml"\n`);
        await cells.servers[cell].start();
      }),
    );
    return cells;
  }

  /** The address of a cell. */
  at(cell: Cell): string {
    return this.servers[cell].address;
  }

  /** The placement that was loaded last. */
  get version(): number {
    return this.#version;
  }

  /** The name of another topic that lives in a cell. */
  topic(cell: Cell): string {
    return `${cell}-${++this.#topics}`;
  }

  /** Loads another placement: these patterns count before "b-.*". */
  async place(topics: readonly Placed[], at: readonly Cell[] = ["a", "b"]): Promise<void> {
    this.#write(topics, at);
    await this.#load(at);
  }

  /** Loads a placement in which the cell a is the only one. */
  async placeAllInA(): Promise<void> {
    this.#write([], ["a"], ["a"]);
    await this.#load(["a"]);
  }

  async #load(at: readonly Cell[]): Promise<void> {
    for (const cell of at) {
      await this.direct(cell, (client) => client.call(AdminService.method.reloadPlacement, {}));
    }
  }

  /** Moves a topic with its records, by the command. */
  async move(topic: string, to: Cell): Promise<void> {
    await command("--server", this.at("a"), "cells", "move", topic, "--to", to, "--links-for", "0s", "--links-before", "0s");
    this.#version += 1; // the command has raised it
  }

  /** Uses a client of one cell. */
  async direct<Result>(cell: Cell, use: (client: Client) => Promise<Result>): Promise<Result> {
    const client = new Client(this.at(cell));
    try {
      return await use(client);
    } finally {
      client.close();
    }
  }

  /** The keys of a topic in one cell. */
  async keys(cell: Cell, topic: string): Promise<string[]> {
    return await this.direct(cell, async (client) => (await client.query(topic).all()).map(({ key }) => key));
  }

  #write(topics: readonly Placed[], at: readonly Cell[], known: readonly Cell[] = ["a", "b"]): void {
    this.#version += 1;
    const cells = known.map((cell) => `${cell} = ["${this.at(cell)}"]\n`).join("");
    const last: readonly Placed[] = known.includes("b") ? [["b-.*", "b"]] : [];
    const placed = [...topics, ...last].map(([pattern, cell]) => `[[topics]]\npattern = '${pattern}'\ncell = "${cell}"\n`);
    const text = `version = ${this.#version}\ndefault = "a"\n[cells]\n${cells}${placed.join("")}`;
    at.forEach((cell) => writeFileSync(join(this.servers[cell].folder, "placement.toml"), text));
  }
}
