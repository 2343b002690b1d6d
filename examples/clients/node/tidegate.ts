// Rate limits of Tidegate for Express, and for callers of an API that is limited. Copy this file and the directory proto/.

import { readFileSync } from "node:fs";

import * as grpc from "@grpc/grpc-js";
import * as loader from "@grpc/proto-loader";
import type { Request, RequestHandler, Response as Reply } from "express";

// --- The service: asks Tidegate before it answers ---

/** What is limited. The order of the entries matters: `{ entries: [["path", "/orders"], ["user", "ann"]] }`. */
export interface Descriptor {
  entries: [key: string, value: string][];
  /** The cost; absent: that of the request; 0 looks without spending. */
  hits?: number;
  /** Sent in place of the rule's limit. */
  limit?: { requests: number; unit: "SECOND" | "MINUTE" | "HOUR" | "DAY" | "MONTH" | "YEAR" };
}

/** `status` is 200 (go on), 429 (refused) or 503 (no answer in time, and the service fails closed). */
export interface Decision {
  status: 200 | 429 | 503;
  headers: [name: string, value: string][];
  body: Buffer;
  /** Why there was no answer. */
  error?: Error;
  /** Of the request, for descriptors without hits of their own. */
  hits: number;
}

export interface Options {
  /** Where `proto/` is. */
  protos: string;
  /** The longest that a request waits for an answer: 100 ms unless set. */
  timeoutMs?: number;
  /** Lets requests go on without an answer (true unless set); otherwise they get status 503. */
  failOpen?: boolean;
  /** Encrypts the connection, such as `tls("ca.crt")`. */
  credentials?: grpc.ChannelCredentials;
  /**
   * Called with the error of each call without a decision, for a metric of yours. Besides, `console.warn` tells of the first, and then
   * at most every 10 s with the number of those in between.
   */
  onUndecided?: (error: Error) => void;
}

/** From one line about calls without a decision to the next. */
const logPauseMs = 10_000;

/** Credentials for a Tidegate with TLS, from PEM files: its CA, and a client certificate with its key where Tidegate asks for one. */
export function tls(ca: string, certificate?: string, key?: string): grpc.ChannelCredentials {
  const read = (path?: string) => (path === undefined ? null : readFileSync(path));
  return grpc.credentials.createSsl(read(ca), read(key), read(certificate));
}

interface Answer {
  overall_code: string;
  response_headers_to_add: { key: string; value: string }[];
  raw_body: Buffer;
}

type Call = (request: object, options: grpc.CallOptions, done: (error: Error | null, answer: Answer) => void) => void;

/** A connection that is opened once, kept, and shared by all requests. */
export class Tidegate {
  private readonly client: grpc.Client;
  private quietUntil = 0;
  private unlogged = 0;

  constructor(
    private readonly address: string,
    private readonly domain: string,
    private readonly options: Options,
  ) {
    const types = loader.loadSync("envoy/service/ratelimit/v3/rls.proto", {
      includeDirs: [options.protos],
      keepCase: true,
      enums: String,
      longs: Number,
      defaults: true,
    });
    const service = types["envoy.service.ratelimit.v3.RateLimitService"] as grpc.ServiceDefinition;
    const Client = grpc.makeGenericClientConstructor(service, "RateLimitService");
    // Milliseconds: back within about a second after a restart, and a dead peer is noticed within 15 s.
    this.client = new Client(address, options.credentials ?? grpc.credentials.createInsecure(), {
      "grpc.initial_reconnect_backoff_ms": 100,
      "grpc.max_reconnect_backoff_ms": 1_000,
      "grpc.keepalive_time_ms": 10_000,
      "grpc.keepalive_timeout_ms": 5_000,
    });
    // Connects now, and not at the first request.
    this.client.getChannel().getConnectivityState(true);
  }

  /**
   * Asks about a request, in a middleware or in a handler that has read the body; 0 hits mean 1. Without an answer, `failOpen` decides,
   * and `error` says why; it is never thrown.
   */
  async decide(descriptors: Descriptor[], hits = 1): Promise<Decision> {
    hits = Math.max(hits, 1);
    if (descriptors.length === 0) return { status: 200, headers: [], body: Buffer.alloc(0), hits };
    try {
      const answer = await this.ask(descriptors.map(toProto), hits);
      const headers = answer.response_headers_to_add.map(({ key, value }): [string, string] => [key, value]);
      const refused = answer.overall_code === "OVER_LIMIT";
      return { status: refused ? 429 : 200, headers, body: refused ? answer.raw_body : Buffer.alloc(0), hits };
    } catch (thrown) {
      const error = thrown as Error;
      const failOpen = this.options.failOpen ?? true;
      this.report(error, failOpen ? "The request goes on without a limit" : "The request gets status 503");
      if (failOpen) return { status: 200, headers: [], body: Buffer.alloc(0), error, hits };
      const body = Buffer.from("The rate limiter is unavailable.\n");
      return { status: 503, headers: [["retry-after", "1"]], body, error, hits };
    }
  }

  /**
   * Gives back the hits that an admitted request spent on these of its descriptors. Call it once for a decision at most.
   *
   * Nothing is given back where Tidegate refused or did not decide: those hits may not be counted. If this call is not answered, it is
   * reported like a call without a decision, and not sent again: the hits stay counted.
   */
  async giveBack({ status, error, hits }: Decision, descriptors: Descriptor[]): Promise<void> {
    if (status !== 200 || error !== undefined || descriptors.length === 0) return;
    const given = descriptors.map((descriptor) => toProto({ ...descriptor, hits: descriptor.hits ?? hits }));
    try {
      await this.ask(given.map((descriptor) => ({ ...descriptor, is_negative_hits: true })));
    } catch (thrown) {
      this.report(thrown as Error, "Hits are not given back");
    }
  }

  private ask(descriptors: object[], hits = 1): Promise<Answer> {
    const request = { domain: this.domain, hits_addend: hits, descriptors };
    const deadline = Date.now() + (this.options.timeoutMs ?? 100);
    return new Promise((resolve, reject) => {
      const call = (this.client as unknown as { ShouldRateLimit: Call }).ShouldRateLimit.bind(this.client);
      call(request, { deadline }, (error, answer) => (error ? reject(error) : resolve(answer)));
    });
  }

  private report(error: Error, result: string): void {
    this.options.onUndecided?.(error);
    const now = performance.now();
    if (now < this.quietUntil) {
      this.unlogged++;
      return;
    }
    const more = `${this.unlogged} more since the last such line`;
    console.warn(`Tidegate at ${this.address} did not decide: ${error.message}. ${result}; ${more}`);
    this.quietUntil = now + logPauseMs;
    this.unlogged = 0;
  }

  close(): void {
    this.client.close();
  }
}

function toProto({ entries, hits, limit }: Descriptor): object {
  return {
    entries: entries.map(([key, value]) => ({ key, value })),
    hits_addend: hits === undefined ? undefined : { value: hits },
    limit: limit && { requests_per_unit: limit.requests, unit: limit.unit },
  };
}

/** A middleware: `app.use(rateLimit(tidegate, describe))`, or of one route. No descriptors: no limit. */
export function rateLimit(tidegate: Tidegate, describe: (request: Request) => Descriptor[], hits = 1): RequestHandler {
  return async (request, reply: Reply, next) => {
    if (apply(await tidegate.decide(describe(request), hits), reply)) next();
  };
}

/** Adds the headers to the response. If the request is not admitted, sends the whole response and returns false. */
export function apply(decision: Decision, reply: Reply): boolean {
  for (const [name, value] of decision.headers) reply.append(name, value);
  if (decision.status === 200) return true;
  if (!reply.hasHeader("content-type")) reply.setHeader("content-type", "text/plain; charset=utf-8");
  reply.status(decision.status).end(decision.body);
  return false;
}

// --- The caller: what to do when an API refuses ---

const longestJitterMs = 10_000;

const sleep = (ms: number) => new Promise((wake) => setTimeout(wake, ms));

/**
 * Calls `send` until its response is neither 429 nor 503, at most `attempts` times; returns the last response.
 *
 * Waits as long as Retry-After says, and then a random time of at most as long again (at least `baseMs`), twice that, and so on
 * up to `longestMs` (full jitter), so that callers who were refused together do not return together.
 */
export async function retry(
  send: () => Promise<Response>,
  { attempts = 5, baseMs = 100, longestMs = longestJitterMs } = {},
): Promise<Response> {
  for (let attempt = 0; ; attempt++) {
    const response = await send();
    if (![429, 503].includes(response.status) || attempt >= attempts - 1) return response;
    if (!response.bodyUsed) await response.body?.cancel();
    const waitMs = retryAfterMs(response.headers);
    await sleep(waitMs + Math.random() * Math.min(longestMs, Math.max(baseMs, waitMs) * 2 ** attempt));
  }
}

/** 0 without the header, or if it is a date, which Tidegate does not send. */
function retryAfterMs(headers: Headers): number {
  return (number(headers.get("retry-after")) ?? 0) * 1_000;
}

function number(text: string | null): number | undefined {
  return text !== null && /^\d+$/.test(text) ? Number(text) : undefined;
}

/**
 * Keeps a caller below the limit that the responses report: `await pacer.call(send)` waits for its turn and sends.
 *
 * While no limit is known, one call is in flight; afterwards as many as the last response left, less those in flight. Without any
 * left it waits until the reset, and a random time of at most as long again (10 s at most): others may wait for the same reset.
 */
export class Pacer {
  private remaining: number | undefined;
  private until = 0;
  private inFlight = 0;
  private waiting: (() => void)[] = [];

  async call(send: () => Promise<Response>): Promise<Response> {
    for (let wait = this.waitMs(); wait > 0; wait = this.waitMs()) await this.changed(wait);
    if (this.remaining !== undefined) this.remaining--;
    this.inFlight++;
    let reported: Reported | undefined;
    try {
      const response = await send();
      reported = reportedLimit(response.headers);
      return response;
    } finally {
      this.inFlight--;
      if (reported) {
        const { remaining, resetMs } = reported;
        const jitterMs = remaining > 0 ? 0 : Math.random() * Math.min(longestJitterMs, resetMs);
        this.remaining = remaining - this.inFlight;
        this.until = performance.now() + resetMs + jitterMs;
      } else if (this.remaining === undefined) {
        // Without a reported limit, calls are not held back for a second.
        this.remaining = Infinity;
        this.until = performance.now() + 1_000;
      }
      for (const wake of this.waiting.splice(0)) wake();
    }
  }

  /** Until it is worth looking again: 0 for now, Infinity for not before another call is answered. */
  private waitMs(): number {
    const now = performance.now();
    if (now >= this.until) this.remaining = undefined;
    if (this.remaining === undefined) return this.inFlight > 0 ? Infinity : 0;
    return this.remaining >= 1 ? 0 : this.until - now;
  }

  private changed(atMostMs: number): Promise<void> {
    return new Promise((wake) => {
      this.waiting.push(wake);
      // The longest that a timer can be.
      if (atMostMs !== Infinity) setTimeout(wake, Math.min(Math.ceil(atMostMs), 2 ** 31 - 1));
    });
  }
}

interface Reported {
  remaining: number;
  resetMs: number;
}

/** Calls that remain, and the time until that changes; from RateLimit, RateLimit-* or X-RateLimit-*. */
function reportedLimit(headers: Headers): Reported | undefined {
  const wait = retryAfterMs(headers);
  if (wait > 0) return { remaining: 0, resetMs: wait };
  // RateLimit: "per-user";r=1;t=46, "all";r=999;t=946. The least remaining counts, for the longest time.
  const items = [...(headers.get("ratelimit") ?? "").matchAll(/;r=(\d+);t=(\d+)/g)];
  const reported = items.map(([, r, t]): Reported => ({ remaining: Number(r), resetMs: Number(t) * 1_000 }));
  reported.sort((a, b) => a.remaining - b.remaining || b.resetMs - a.resetMs);
  if (reported[0]) return reported[0];
  for (const prefix of ["ratelimit", "x-ratelimit"]) {
    const remaining = number(headers.get(`${prefix}-remaining`));
    const reset = number(headers.get(`${prefix}-reset`));
    if (remaining === undefined || reset === undefined) continue;
    // X-RateLimit-Reset of Tidegate is a time in seconds of the epoch.
    const resetMs = prefix === "ratelimit" ? reset * 1_000 : Math.max(0, reset * 1_000 - Date.now());
    return { remaining, resetMs };
  }
  return undefined;
}
