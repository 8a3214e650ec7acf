/**
 * The search for an instance that serves (rule F1). No I/O: the transport asks the addresses, and gives the clock.
 *
 *   [1]  It asks the addresses in the given order, round by round; the first that serves is taken.
 *   [2]  An instance of another cluster, and an address without a sow server, are never taken.
 *   [3]  A client that has not reached an instance yet, and was given no time to connect, does not wait on where every
 *        address has refused twice. An address that says nothing has not refused.
 *   [4]  If no instance serves, the first that answers is taken: its reads go on (rule X3).
 */

import { AllRefused, FailedPrecondition, NoAnswer, SowError, Unavailable } from "./errors.js";
import { REFUSED_MS } from "./statuses.js";

/** An instance, as it describes itself. */
export interface Instance {
  /** Where the client has found it. */
  readonly address: string;
  /** Its `[server] instance`. */
  readonly name: string;
  /** Made with its data, so it tells instances of the same name apart. */
  readonly id: string;
  readonly journalEpoch: string;
  /** Its `[server] cluster`; empty: none. */
  readonly cluster: string;
  /** It takes reads and writes. */
  readonly serving: boolean;
  readonly serverVersion: string;
  /** The version of the contract that it serves. */
  readonly contract: number;
}

/** Errors after which a client looks for another instance. It stays if the instance says that it serves. */
export const LOSSES: ReadonlySet<string> = new Set(["UNREACHABLE", "NOT_SERVING", "STORE_FAILED", "STOPPING", "DISK_FULL"]);

const ATTEMPT_MS_FIRST = 250;
const ATTEMPT_MS_MAX = 1_000;
const PAUSE_MS_FIRST = 50;
const PAUSE_MS_MAX = 500;

/** Monotonic time, and a pause. */
export interface Clock {
  now(): number;
  sleep(ms: number): Promise<void>;
}

/** What a search needs. */
export interface SearchOptions {
  readonly addresses: readonly string[];
  readonly limitMs: number;
  /** The cluster of the client's first instance; empty: not known. */
  readonly cluster: string;
  /** It waits for `limitMs` although all addresses refuse ([3]). */
  readonly isPatient: boolean;
  readonly clock: Clock;
  /** Asks an address; resolves with an error where it is of this address alone, and rejects with any other. */
  readonly ask: (address: string, withinMs: number) => Promise<Instance | SowError>;
}

/** Finds an instance. Throws Unavailable (UNREACHABLE) with what each address has answered, or the error of `ask`. */
export async function search({ addresses, limitMs, cluster, isPatient, clock, ask }: SearchOptions): Promise<Instance> {
  const began = clock.now();
  const giveUp = began + limitMs;
  const why = new Map<string, SowError>();
  for (let round = 0; ; round++) {
    let answering: Instance | undefined;
    let silent = false;
    for (const address of addresses) {
      const left = giveUp - clock.now();
      if (left <= 0 && round > 0) {
        break;
      }
      const patience = Math.min(ATTEMPT_MS_FIRST * 2 ** round, ATTEMPT_MS_MAX);
      const answer = await ask(address, Math.max(10, Math.min(patience, left)));
      if (answer instanceof SowError) {
        silent ||= answer instanceof NoAnswer;
        // Silence, such as in the last moment, tells less than an earlier answer.
        if (answer.reason !== "UNREACHABLE" || !why.has(address)) {
          why.set(address, answer);
        }
      } else if (cluster !== "" && answer.cluster !== "" && answer.cluster !== cluster) {
        why.set(address, otherCluster(answer, cluster));
      } else if (answer.serving) {
        return answer;
      } else {
        why.set(address, new Unavailable(`${answer.name} at ${address} does not serve`, { reason: "NOT_SERVING" }));
        answering ??= answer;
      }
    }
    if (answering !== undefined) {
      return answering;
    }
    if (!isPatient && !silent && clock.now() - began >= REFUSED_MS) {
      throw failure(addresses, [...why.values()], undefined);
    }
    const pause = Math.min(PAUSE_MS_FIRST * 2 ** round, PAUSE_MS_MAX);
    if (clock.now() + pause > giveUp) {
      throw failure(addresses, [...why.values()], limitMs);
    }
    await clock.sleep(pause);
  }
}

/** The error of an address where something else answers. */
export function noServer(address: string): SowError {
  return new FailedPrecondition(`${address} is no sow server: it speaks gRPC, and has none of sow's services`, {
    reason: "NO_SOW_SERVER",
    details: { server: address },
  });
}

function otherCluster(found: Instance, cluster: string): SowError {
  return new FailedPrecondition(
    `${found.name} at ${found.address} is of the cluster ${found.cluster}, and this client is of the cluster ${cluster}`,
    { reason: "OTHER_CLUSTER", details: { server: found.address, cluster: found.cluster, expected: cluster } },
  );
}

/** Where one address was not reached, the fault may pass: UNREACHABLE. `limitMs`: undefined where all have refused. */
function failure(addresses: readonly string[], why: readonly SowError[], limitMs: number | undefined): SowError {
  const told = why.map((error) => error.text).join("; ");
  const [first] = why;
  if (first !== undefined && !why.some((error) => error instanceof Unavailable)) {
    return new FailedPrecondition(told, { reason: first.reason, details: first.details });
  }
  if (limitMs === undefined) {
    return new AllRefused(`no instance of ${addresses.join(", ")} serves: ${told}`, { reason: "UNREACHABLE" });
  }
  return new Unavailable(`no instance of ${addresses.join(", ")} serves within ${Math.round(limitMs) / 1_000} s: ${told}`, {
    reason: "UNREACHABLE",
  });
}
