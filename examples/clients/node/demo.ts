import type { AddressInfo } from "node:net";

import express, { type Request, type Response as Reply } from "express";

import { apply, type Descriptor, Pacer, rateLimit, retry, Tidegate, tls } from "./tidegate.js";

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
  let undecided = 0;
  const onUndecided = () => void undecided++;
  const options = { protos, timeoutMs: Number(timeout), failOpen: fail === "open", credentials, onUndecided };
  const tidegate = new Tidegate(address, "shop", options);
  const app = express();
  app.get("/export", rateLimit(tidegate, byPathAndUser, 5), (_, reply) => void reply.json({ export: "done" }));
  app.get("/trial", rateLimit(tidegate, trial), (_, reply) => void reply.json({ trial: "done" }));
  app.post("/login", express.urlencoded({ extended: false }), (request, reply) => login(tidegate, request, reply));
  app.get("/undecided", (_, reply) => void reply.json(undecided));
  app.use(rateLimit(tidegate, byPathAndUser));
  app.get("/:path", (request, reply) => void reply.json({ [request.params.path]: "done" }));
  const server = app.listen(0, "127.0.0.1", () => {
    console.log(`http://127.0.0.1:${(server.address() as AddressInfo).port}`);
  });
}

/** A stand-in for your lookup and its hash. */
const isRight = (account: string, password: string) => account !== "" && password === "right";

async function login(tidegate: Tidegate, request: Request, reply: Reply): Promise<void> {
  const [name, password] = ["account", "password"].map((field) => String(request.body?.[field] ?? "")) as [string, string];
  // Behind a proxy, the address that the proxy vouches for: `trust proxy` of Express.
  const address: Descriptor = { entries: [["path", "/login"], ["remote_address", request.ip ?? ""]] };
  const account: Descriptor = { entries: [["path", "/login"], ["account", name]] };
  const decision = await tidegate.decide([address, account]);
  if (decision.error) {
    // Also where others fail open: without a decision, guesses would have no limit.
    reply.status(503).set("retry-after", "1").send("Try again later.\n");
    return;
  }
  if (!apply(decision, reply)) return;
  if (!isRight(name, password)) {
    reply.status(401).send("Wrong account or password.\n");
    return;
  }
  // The hit of the account only: whoever knows one password must not get more guesses at others from an address.
  await tidegate.giveBack(decision, [account]);
  reply.send("Welcome.\n");
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
