import type { AddressInfo } from "node:net";

import express, { type Request } from "express";

import { type Descriptor, Pacer, rateLimit, retry, Tidegate, tls } from "./tidegate.js";

const usage = `A service with limits and its caller.

node dist/demo.js serve 127.0.0.1:8081 open 100         a service on a free port, with 100 ms for Tidegate; closed: fail closed
                          ... open 100 CA [CERT KEY]    the same over TLS, with these PEM files
node dist/demo.js retry http://127.0.0.1:PORT/search    two calls; each is repeated while it is refused
node dist/demo.js pace http://127.0.0.1:PORT/feed       six calls, none too early

The callers print a line for each HTTP request: status, Retry-After, and when it began and ended in ms.
PROTOS says where the directory proto/ is (../../../proto).`;

const user = (request: Request) => request.get("x-user") ?? "anonymous";
const byPathAndUser = (request: Request): Descriptor[] => [{ entries: [["path", request.path], ["user", user(request)]] }];
const trial = (request: Request): Descriptor[] => [
  { entries: [["trial", user(request)]], hits: 2, limit: { requests: 4, unit: "DAY" } },
];

function serve(address: string, fail: string, timeout: string, [ca, certificate, key]: string[]): void {
  const protos = process.env["PROTOS"] ?? "../../../proto";
  const credentials = ca === undefined ? undefined : tls(ca, certificate, key);
  const options = { protos, timeoutMs: Number(timeout), failOpen: fail === "open", credentials };
  const tidegate = new Tidegate(address, "shop", options);
  const app = express();
  app.get("/export", rateLimit(tidegate, byPathAndUser, 5), (_, reply) => void reply.json({ export: "done" }));
  app.get("/trial", rateLimit(tidegate, trial), (_, reply) => void reply.json({ trial: "done" }));
  app.use(rateLimit(tidegate, byPathAndUser));
  app.get("/:path", (request, reply) => void reply.json({ [request.params.path]: "done" }));
  const server = app.listen(0, "127.0.0.1", () => {
    console.log(`http://127.0.0.1:${(server.address() as AddressInfo).port}`);
  });
}

async function call(how: string, url: string): Promise<void> {
  const began = performance.now();
  const send = async () => {
    const start = performance.now() - began;
    const response = await fetch(url, { headers: { "x-user": how } });
    await response.text();
    const times = [start, performance.now() - began].map((ms) => ms.toFixed(0));
    console.log(response.status, response.headers.get("retry-after") ?? "-", ...times);
    return response;
  };
  if (how === "pace") {
    const pacer = new Pacer();
    await Promise.all(Array.from({ length: 6 }, () => pacer.call(send)));
  } else {
    for (let time = 0; time < 2; time++) await retry(send);
  }
}

const [command, target, fail, timeout, ...files] = process.argv.slice(2);
if (command === "serve" && target && fail && timeout) serve(target, fail, timeout, files);
else if (command && target) await call(command, target);
else console.error(usage);
