// The probe of grpc-js: a client that a test steers. Its commands are in probe.py.

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

import * as grpc from "@grpc/grpc-js";
import * as loader from "@grpc/proto-loader";

type Call = (request: object, options: grpc.CallOptions, done: (error: grpc.ServiceError | null, answer: Answer) => void) => void;
interface Answer {
  overall_code: number;
}

const types = loader.loadSync("envoy/service/ratelimit/v3/rls.proto", { includeDirs: [process.env.PROTOS!], keepCase: true });
const Client = grpc.makeGenericClientConstructor(
  types["envoy.service.ratelimit.v3.RateLimitService"] as grpc.ServiceDefinition,
  "RateLimitService",
);
const backoff = { initialBackoff: "0.05s", maxBackoff: "0.1s", backoffMultiplier: 1, retryableStatusCodes: ["UNAVAILABLE"] };
const policies: Record<string, object> = {
  policy: { retryPolicy: { maxAttempts: 3, ...backoff } },
  off: { retryPolicy: { maxAttempts: 3, ...backoff } },
  hedging: { hedgingPolicy: { maxAttempts: 3, hedgingDelay: "0.1s", nonFatalStatusCodes: [] } },
};
const clients = new Map<string, { plain: grpc.Client; gzip: grpc.Client }>();

function open(name: string, target: string, ca: string, retries: string, keepaliveMs: string): void {
  const options: grpc.ChannelOptions = {
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1_000,
    "grpc.keepalive_time_ms": Number(keepaliveMs),
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.keepalive_permit_without_calls": 1,
    // Channels to the same address do not share a connection.
    "grpc.use_local_subchannel_pool": 1,
  };
  const policy = policies[retries];
  if (policy) options["grpc.service_config"] = JSON.stringify({ loadBalancingConfig: [], methodConfig: [{ name: [{}], ...policy }] });
  if (retries === "off") options["grpc.enable_retries"] = 0;
  const secured = ca === "-" ? grpc.credentials.createInsecure() : grpc.credentials.createSsl(readFileSync(ca));
  const gzip = { ...options, "grpc.default_compression_algorithm": grpc.compressionAlgorithms.gzip };
  // A client connects at its first call.
  clients.set(name, { plain: new Client(target, secured, options), gzip: new Client(target, secured, gzip) });
}

function call(id: string, name: string, key: string, value: string, timeoutMs: string, compression: string): void {
  const began = performance.now();
  const client = clients.get(name)![compression === "gzip" ? "gzip" : "plain"];
  const request = { domain: "clients", descriptors: [{ entries: [{ key, value }] }] };
  const ask = (client as unknown as { ShouldRateLimit: Call }).ShouldRateLimit.bind(client);
  ask(request, { deadline: Date.now() + Number(timeoutMs) }, (error, answer) => {
    const ms = Math.floor(performance.now() - began);
    console.log(JSON.stringify({ id: Number(id), status: error?.code ?? 0, code: answer?.overall_code ?? 0, ms }));
    console.error(id, error?.message);
  });
}

for await (const line of createInterface({ input: process.stdin })) {
  const [command, ...words] = line.split(" ") as [string, string, string, string, string, string, string];
  if (command === "open") open(words[0], words[1], words[2], words[3], words[4]);
  else call(words[0], words[1], words[2], words[3], words[4], words[5]);
}
process.exit();
