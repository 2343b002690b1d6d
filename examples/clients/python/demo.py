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

import httpx
import uvicorn
from fastapi import FastAPI, Request
from tidegate import Descriptor, Pacer, RateLimitMiddleware, Tidegate, rate_limit, retry, tls


def user(request: Request) -> str:
    return request.headers.get("x-user", "anonymous")


def by_path_and_user(request: Request) -> list[Descriptor]:
    return [Descriptor({"path": request.url.path, "user": user(request)})]


def trial(request: Request) -> list[Descriptor]:
    return [Descriptor({"trial": user(request)}, hits=2, limit=(4, "DAY"))]


def with_own_decorator(request: Request) -> bool:
    return request.url.path in ("/export", "/trial")


def service(tidegate: Tidegate) -> FastAPI:
    app = FastAPI()
    app.add_middleware(
        RateLimitMiddleware,
        tidegate=tidegate,
        describe=lambda request: [] if with_own_decorator(request) else by_path_and_user(request),
    )

    @app.get("/export")
    @rate_limit(tidegate, by_path_and_user, hits=5)
    def export():
        return {"export": "done"}

    @app.get("/trial")
    @rate_limit(tidegate, trial)
    async def try_out():
        return {"trial": "done"}

    @app.get("/{path}")
    async def any_other(path: str):
        return {path: "done"}

    return app


async def serve(address: str, fail: str, timeout_ms: str, *files: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    credentials = tls(*files) if files else None
    app = service(Tidegate(address, "shop", int(timeout_ms) / 1000, fail == "open", credentials))
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
