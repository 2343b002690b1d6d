"""A service with limits and its caller.

python demo.py serve 127.0.0.1:8081 open 100         a service on a free port, with 100 ms for Tidegate; `closed`: fail closed
                     ... open 100 CA [CERT KEY]      the same over TLS, with these PEM files
python demo.py retry http://127.0.0.1:PORT/search    two calls; each is repeated while it is refused
python demo.py pace http://127.0.0.1:PORT/feed       six calls, none too early

The callers print a line for each HTTP request: status, Retry-After, and when it began and ended in ms.
"""

import asyncio
import socket
import sys
import time
from collections import Counter
from urllib.parse import parse_qs

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from tidegate import Descriptor, Pacer, RateLimitMiddleware, Tidegate, rate_limit, retry, tls


def user(request: Request) -> str:
    return request.headers.get("x-user", "anonymous")


def by_path_and_user(request: Request) -> list[Descriptor]:
    return [Descriptor({"path": request.url.path, "user": user(request)})]


def trial(request: Request) -> list[Descriptor]:
    return [Descriptor({"trial": user(request)}, hits=2, limit=(4, "DAY"))]


def is_limited_elsewhere_or_free(request: Request) -> bool:
    return request.url.path in ("/export", "/trial", "/login", "/undecided")


def is_right(account: str, password: str) -> bool:
    """A stand-in for your lookup and its hash."""
    return account != "" and password == "right"


undecided = Counter()


def service(tidegate: Tidegate) -> FastAPI:
    app = FastAPI()
    app.add_middleware(
        RateLimitMiddleware,
        tidegate=tidegate,
        describe=lambda request: [] if is_limited_elsewhere_or_free(request) else by_path_and_user(request),
    )

    @app.get("/export")
    @rate_limit(tidegate, by_path_and_user, hits=5)
    def export():
        return {"export": "done"}

    @app.get("/trial")
    @rate_limit(tidegate, trial)
    async def try_out():
        return {"trial": "done"}

    @app.post("/login")
    async def login(request: Request):
        form = parse_qs((await request.body()).decode(errors="replace"))
        name, password = (form.get(field, [""])[0] for field in ("account", "password"))
        # Behind a proxy, the address that the proxy vouches for.
        address = Descriptor({"path": "/login", "remote_address": request.client.host})
        account = Descriptor({"path": "/login", "account": name})
        decision = await tidegate.decide([address, account])
        if decision.error is not None:
            # Also where others fail open: without a decision, guesses would have no limit.
            return Response("Try again later.\n", 503, {"retry-after": "1"})
        if not decision.admitted:
            return decision.response()
        if is_right(name, password):
            # The hit of the account only: whoever knows one password must not get more guesses at others from an address.
            await tidegate.give_back(decision, [account])
            reply = Response("Welcome.\n")
        else:
            reply = Response("Wrong account or password.\n", 401)
        decision.add_headers(reply.headers)
        return reply

    @app.get("/undecided")
    async def calls_without_a_decision():
        return undecided.total()

    @app.get("/{path}")
    async def any_other(path: str):
        return {path: "done"}

    return app


async def serve(address: str, fail: str, timeout_ms: str, *files: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    credentials = tls(*files) if files else None
    count = lambda error: undecided.update([error.code().name])
    app = service(Tidegate(address, "shop", int(timeout_ms) / 1000, fail == "open", credentials, on_undecided=count))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await uvicorn.Server(uvicorn.Config(app, log_level="warning")).serve([listener])


async def call(how: str, url: str) -> None:
    began = time.monotonic()
    pacer = Pacer()

    async with httpx.AsyncClient() as client:

        async def send() -> httpx.Response:
            start = time.monotonic() - began
            response = await client.get(url, headers={"x-user": how})
            times_ms = f"{start * 1000:.0f} {(time.monotonic() - began) * 1000:.0f}"
            print(response.status_code, response.headers.get("retry-after", "-"), times_ms, flush=True)
            return response

        if how == "pace":
            await asyncio.gather(*(pacer.call(send) for _ in range(6)))
        else:
            for _ in range(2):
                await retry(send)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", address, fail, timeout_ms, *files]:
            asyncio.run(serve(address, fail, timeout_ms, *files))
        case ["retry" | "pace" as how, url]:
            asyncio.run(call(how, url))
        case _:
            sys.exit(__doc__)
