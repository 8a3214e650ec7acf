/**
 * Channels: addresses, TLS, tokens, and the options of gRPC.
 *
 *   [1]  No message and no error contains a token.
 *   [2]  A token goes to another machine over TLS only.
 */

import { existsSync, readFileSync, statSync } from "node:fs";
import { readFile, stat } from "node:fs/promises";
import { isIP } from "node:net";
import { type ChannelCredentials, type ChannelOptions, credentials, Metadata } from "@grpc/grpc-js";
import { list, ofOtherType } from "./arguments.js";
import { invalid } from "./errors.js";
import { MESSAGE_BYTES_MAX } from "./statuses.js";

export const DEFAULT_PORT = 7450;
export const DEFAULT_SERVER = `127.0.0.1:${DEFAULT_PORT}`;
const ADDRESSES_MAX = 100;
const RECONNECT_BACKOFF_MS_MAX = 2_000;
const RECONNECT_BACKOFF_OF_MANY_MS_MAX = 200; // a search comes by only when an instance is needed
const KEEPALIVE_MS = 30_000;
const KEEPALIVE_TIMEOUT_MS = 15_000;

/** TLS to the server: PEM files. With `certificate` and `key` the client proves its identity (mutual TLS). */
export interface Tls {
  /** The certificates to trust; by default those that Node trusts. */
  readonly ca?: string | undefined;
  readonly certificate?: string | undefined;
  readonly key?: string | undefined;
  /** The name in the server's certificate, when it differs from the host in the address. */
  readonly serverName?: string | undefined;
}

/**
 * A bearer token: the text itself, a file that holds it, or a function that gives it. A file is read again when it has
 * changed, and a function is called before each call: so a token can be renewed while the client runs.
 */
export type Token = string | { readonly file: string } | (() => string | Promise<string>);

/** The addresses of a list such as "a:7450,b:7450", each once and with its port. Throws InvalidArgument. */
export function addressesOf(server: string | readonly string[]): string[] {
  const parts = (typeof server === "string" ? server.split(",") : list(server, "server", "addresses")).map((part) => {
    if (typeof part !== "string") {
      throw ofOtherType("server", part);
    }
    return part.trim();
  });
  if (parts.length === 0 || parts.some((part) => part === "")) {
    throw invalid("server", `${JSON.stringify(server)} has an empty address`);
  }
  if (parts.length > ADDRESSES_MAX) {
    throw invalid("server", `${parts.length} addresses are more than ${ADDRESSES_MAX}`);
  }
  return [...new Set(parts.map(target))];
}

function target(server: string): string {
  if (/^unix:|:\/\//.test(server)) {
    return server; // in gRPC's own notation
  }
  const { host, port } = hostAndPort(server) ?? {};
  if (host === undefined || !(Number(port) > 0 && Number(port) < 65_536)) {
    throw invalid("server", `${JSON.stringify(server)} is not HOST:PORT`);
  }
  return `${host}:${port}`;
}

/** Hosts that gRPC takes for a scheme: `unix:7450` is a file, to which a token may go in plain text. */
const SCHEMES: ReadonlySet<string> = new Set(["unix", "unix-abstract", "vsock", "dns", "ipv4", "ipv6", "xds"]);

/** HOST or HOST:PORT, and nothing in gRPC's own notation. */
export function isHostAndPort(server: string): boolean {
  const { host } = hostAndPort(server) ?? {};
  return host !== undefined && !SCHEMES.has(host.toLowerCase());
}

function hostAndPort(server: string): { host: string; port: string } | undefined {
  const match = /^(\[[0-9a-fA-F:.%]+\]|[^\s:/[\]]+)(?::([0-9]{1,5}))?$/.exec(server);
  return match === null ? undefined : { host: match[1]!, port: match[2] ?? String(DEFAULT_PORT) };
}

/** Whether a server is on this machine. */
export function isLocal(server: string): boolean {
  if (server.startsWith("unix:")) {
    return true;
  }
  const host = hostAndPort(server)?.host.replace(/[[\]]/g, "") ?? "";
  return host === "localhost" || host === "::1" || (isIP(host) === 4 && host.startsWith("127."));
}

/** The options of a channel. `ofMany`: its client has several addresses. */
export function channelOptions(server: string, tls: Tls | undefined, ofMany: boolean): ChannelOptions {
  const options: ChannelOptions = {
    "grpc.max_send_message_length": MESSAGE_BYTES_MAX,
    "grpc.max_receive_message_length": MESSAGE_BYTES_MAX,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": ofMany ? RECONNECT_BACKOFF_OF_MANY_MS_MAX : RECONNECT_BACKOFF_MS_MAX,
    "grpc.keepalive_time_ms": KEEPALIVE_MS,
    "grpc.keepalive_timeout_ms": KEEPALIVE_TIMEOUT_MS,
    "grpc.service_config_disable_resolution": 1,
    // A connection of its own: gRPC would share one among all clients of a process, and with it the server's bound of
    // calls on a connection (rule N4).
    "grpc.use_local_subchannel_pool": 1,
  };
  if (tls?.serverName !== undefined) {
    options["grpc.ssl_target_name_override"] = tls.serverName;
    options["grpc.default_authority"] = tls.serverName;
  }
  if (isLocal(server)) {
    options["grpc.enable_http_proxy"] = 0; // a proxy would read the token
  }
  return options;
}

/** Reads the files of TLS; without `tls`: plain text. Throws InvalidArgument with the file that cannot be used. */
export function channelCredentials(tls: Tls | undefined): ChannelCredentials {
  if (tls === undefined) {
    return credentials.createInsecure();
  }
  if ((tls.certificate === undefined) !== (tls.key === undefined)) {
    throw invalid("tls", "certificate and key must be given together");
  }
  const [ca, key, certificate] = [
    pem(tls.ca, "tls.ca"),
    pem(tls.key, "tls.key"),
    pem(tls.certificate, "tls.certificate"),
  ];
  try {
    return credentials.createSsl(ca, key, certificate);
  } catch (error) {
    throw invalid("tls", `the files cannot be used: ${(error as Error).message}`);
  }
}

function pem(path: string | undefined, field: string): Buffer | null {
  if (path === undefined) {
    return null;
  }
  let content: Buffer;
  try {
    content = readFileSync(path);
  } catch (error) {
    throw invalid(field, `cannot read ${path}: ${(error as Error).message}`);
  }
  if (!content.includes("-----BEGIN ")) {
    throw invalid(field, `${path} is no PEM file`);
  }
  return content;
}

/** Gives the metadata that shows a token. */
export class Bearer {
  readonly #token: Token | undefined;
  #read = "";
  #stamp = "";

  /** Throws InvalidArgument if there is no token to show, or where anybody in between could read it ([2]). */
  constructor(token: Token | undefined, servers: readonly string[], tls: Tls | undefined) {
    this.#token = token;
    if (token === undefined) {
      return;
    }
    const far = servers.find((server) => !isLocal(server));
    if (tls === undefined && far !== undefined) {
      throw invalid("token", `goes to another machine, ${far}, over TLS only: give tls, such as { ca: "ca.pem" }`);
    }
    if (typeof token === "string") {
      if (existsSync(token)) {
        throw invalid("token", "is the name of a file, not a token; give it as { file }");
      }
      this.#read = checked(token, "the text");
    } else if (typeof token === "object") {
      this.#take(statSync(this.#found(token.file)), () => readFileSync(token.file, "latin1"), token.file);
    }
  }

  /** The metadata of the next call. Throws InvalidArgument if there is no token to show. */
  async metadata(): Promise<Metadata> {
    const metadata = new Metadata();
    if (this.#token !== undefined) {
      metadata.set("authorization", `Bearer ${await this.#text(this.#token)}`);
    }
    return metadata;
  }

  async #text(token: Token): Promise<string> {
    if (typeof token === "function") {
      return checked(await token(), "the result of the function");
    }
    if (typeof token === "object") {
      const state = await stat(this.#found(token.file));
      if (stampOf(state) !== this.#stamp) {
        const content = await readFile(token.file, "latin1");
        this.#take(state, () => content, token.file);
      }
    }
    return this.#read;
  }

  #found(file: string): string {
    if (!existsSync(file)) {
      throw invalid("token", `cannot read ${file}`);
    }
    return file;
  }

  #take(state: FileState, content: () => string, file: string): void {
    if (process.platform !== "win32" && (state.mode & 0o077) !== 0) {
      throw invalid("token", `other users may read ${file}; run: chmod 600 ${file}`);
    }
    this.#read = checked(content(), file);
    this.#stamp = stampOf(state);
  }
}

interface FileState {
  readonly mode: number;
  readonly mtimeMs: number;
  readonly ino: number;
}

function stampOf({ mtimeMs, ino }: FileState): string {
  return `${mtimeMs} ${ino}`;
}

function checked(given: unknown, source: string): string {
  const text = typeof given === "string" ? given.trim() : "";
  if (!/^[\x21-\x7e]{1,16384}$/.test(text)) {
    throw invalid("token", `${source} is no token: expected one line of 1 to 16384 visible ASCII characters`);
  }
  return text;
}

/** Server, TLS and token, as the variables of the command `sow` name them. An empty one is none. */
export function fromEnvironment(variables: NodeJS.ProcessEnv): { server: string; tls?: Tls; token?: Token } {
  const [ca, certificate, key, serverName, file] = [
    "SOW_TLS_CA",
    "SOW_TLS_CERT",
    "SOW_TLS_KEY",
    "SOW_TLS_SERVER_NAME",
    "SOW_TOKEN_FILE",
  ].map((name) => variables[name] || undefined);
  return {
    server: variables["SOW_SERVER"] || DEFAULT_SERVER,
    ...(ca || certificate || key || serverName ? { tls: { ca, certificate, key, serverName } } : {}),
    ...(file === undefined ? {} : { token: { file } }),
  };
}
