"""Rate limits of Tidegate for FastAPI, and for callers of an API that is limited. Copy this file and the stubs (README.md)."""

import asyncio
import functools
import inspect
import logging
import random
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Awaitable, Callable, Mapping, Sequence

import grpc
from envoy.extensions.common.ratelimit.v3.ratelimit_pb2 import RateLimitDescriptor
from envoy.service.ratelimit.v3.rls_pb2 import RateLimitRequest, RateLimitResponse
from envoy.service.ratelimit.v3.rls_pb2_grpc import RateLimitServiceStub
from envoy.type.v3.ratelimit_unit_pb2 import RateLimitUnit
from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders

# --- The service: asks Tidegate before it answers ---

logger = logging.getLogger("tidegate")
LOG_PAUSE = 10.0  # seconds from one line about calls without a decision to the next


@dataclass(frozen=True)
class Descriptor:
    """What is limited, such as `Descriptor({"path": "/orders", "user": "ann"})`; the order of entries matters.

    `hits` is the cost (absent: that of the request; 0 looks without spending). `limit` is sent in place of the rule's limit:
    `(100, "MINUTE")`.
    """

    entries: Mapping[str, str]
    hits: int | None = None
    limit: tuple[int, str] | None = None

    def to_proto(self) -> RateLimitDescriptor:
        descriptor = RateLimitDescriptor(entries=[{"key": key, "value": value} for key, value in self.entries.items()])
        if self.hits is not None:
            descriptor.hits_addend.value = self.hits
        if self.limit is not None:
            descriptor.limit.requests_per_unit = self.limit[0]
            descriptor.limit.unit = RateLimitUnit.Value(self.limit[1])
        return descriptor

    def given_back(self, hits: int) -> RateLimitDescriptor:
        descriptor = self.to_proto()
        descriptor.hits_addend.value = hits if self.hits is None else self.hits
        descriptor.is_negative_hits = True
        return descriptor


@dataclass(frozen=True)
class Decision:
    """`status` is 200 (go on), 429 (refused) or 503 (no answer in time, and the caller fails closed)."""

    status: int = 200
    headers: Sequence[tuple[str, str]] = ()
    body: bytes = b""
    error: grpc.RpcError | None = field(default=None, compare=False)
    # Of the request, for descriptors without hits of their own.
    hits: int = 1

    @property
    def admitted(self) -> bool:
        return self.status == 200

    def add_headers(self, headers: MutableHeaders) -> None:
        for name, value in self.headers:
            headers.append(name, value)

    def response(self) -> Response:
        """The response to a request that is not admitted."""
        response = Response(self.body, self.status)
        self.add_headers(response.headers)
        if "content-type" not in response.headers:
            response.headers["content-type"] = "text/plain; charset=utf-8"
        return response


def tls(ca: str, certificate: str | None = None, key: str | None = None) -> grpc.ChannelCredentials:
    """Credentials for a Tidegate with TLS, from PEM files: its CA, and a client certificate with its key where Tidegate asks for one."""
    read = lambda path: Path(path).read_bytes() if path else None
    return grpc.ssl_channel_credentials(read(ca), read(key), read(certificate))


class Tidegate:
    """A connection that is opened at the first request, kept, and shared by all of one event loop. It can be made at the top of a module.

    `timeout` is the longest that a request waits for an answer, in seconds. Without an answer a request goes on if `fail_open`,
    and otherwise gets status 503. With `credentials`, such as `tls("ca.crt")`, the connection is encrypted.

    A call without a decision is never silent: `on_undecided` is called with the error of each, for a metric of yours, and the logger
    `tidegate` warns of the first, and then at most every 10 s with the number of those in between.
    """

    def __init__(
        self,
        address: str,
        domain: str,
        timeout: float = 0.1,
        fail_open: bool = True,
        credentials: grpc.ChannelCredentials | None = None,
        on_undecided: Callable[[grpc.RpcError], None] = lambda error: None,
    ):
        self.address, self.domain, self.timeout, self.fail_open = address, domain, timeout, fail_open
        self.credentials, self.on_undecided = credentials, on_undecided
        self.quiet_until, self.unlogged = 0.0, 0
        self.channel: grpc.aio.Channel | None = None

    def _connect(self) -> None:
        """Opens the connection in the event loop that runs. gRPC ties it to that loop."""
        # Milliseconds: back within about a second after a restart, and a dead peer is noticed within 15 s.
        options = [
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
        ]
        if self.credentials is None:
            self.channel = grpc.aio.insecure_channel(self.address, options)
        else:
            self.channel = grpc.aio.secure_channel(self.address, self.credentials, options)
        self.stub = RateLimitServiceStub(self.channel)

    async def decide(self, descriptors: Sequence[Descriptor], hits: int = 1) -> Decision:
        """Asks about a request, in a middleware or in a handler that has read the body; 0 hits mean 1.

        Never raises for a server that does not answer: `Decision.error` says why.
        """
        if not descriptors:
            return Decision()
        try:
            answer = await self._ask([descriptor.to_proto() for descriptor in descriptors], hits)
        except grpc.RpcError as error:
            if self.fail_open:
                self._report(error, "The request goes on without a limit")
                return Decision(error=error)
            self._report(error, "The request gets status 503")
            return Decision(503, [("retry-after", "1")], b"The rate limiter is unavailable.\n", error)
        headers = [(header.key, header.value) for header in answer.response_headers_to_add]
        if answer.overall_code == RateLimitResponse.OVER_LIMIT:
            return Decision(429, headers, answer.raw_body)
        return Decision(headers=headers, hits=max(hits, 1))

    async def give_back(self, decision: Decision, descriptors: Sequence[Descriptor]) -> None:
        """Gives back the hits that an admitted request spent on these of its descriptors. Call it once for a decision at most.

        Nothing is given back where Tidegate refused or did not decide: those hits may not be counted. If this call is not answered, it
        is reported like a call without a decision, and not sent again: the hits stay counted.
        """
        if not decision.admitted or decision.error is not None or not descriptors:
            return
        try:
            await self._ask([descriptor.given_back(decision.hits) for descriptor in descriptors])
        except grpc.RpcError as error:
            self._report(error, "Hits are not given back")

    async def _ask(self, descriptors: list[RateLimitDescriptor], hits: int = 1) -> RateLimitResponse:
        request = RateLimitRequest(domain=self.domain, descriptors=descriptors, hits_addend=hits)
        if self.channel is None:
            self._connect()
        return await self.stub.ShouldRateLimit(request, timeout=self.timeout)

    def _report(self, error: grpc.RpcError, result: str) -> None:
        self.on_undecided(error)
        now = time.monotonic()
        if now < self.quiet_until:
            self.unlogged += 1
            return
        reason = f"{error.code().name}: {error.details()}"
        more = "%d more since the last such line"
        logger.warning(f"Tidegate at %s did not decide: %s. %s; {more}", self.address, reason, result, self.unlogged)
        self.quiet_until, self.unlogged = now + LOG_PAUSE, 0

    async def close(self) -> None:
        if self.channel is not None:
            await self.channel.close()


Describe = Callable[[Request], Sequence[Descriptor]]


class RateLimitMiddleware:
    """`app.add_middleware(RateLimitMiddleware, tidegate=tidegate, describe=describe)`; no descriptors: no limit."""

    def __init__(self, app, tidegate: Tidegate, describe: Describe):
        self.app, self.tidegate, self.describe = app, tidegate, describe

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        decision = await self.tidegate.decide(self.describe(Request(scope)))
        if not decision.admitted:
            return await decision.response()(scope, receive, send)

        async def send_with_headers(message):
            if message["type"] == "http.response.start":
                decision.add_headers(MutableHeaders(scope=message))
            await send(message)

        await self.app(scope, receive, send_with_headers)


def rate_limit(tidegate: Tidegate, describe: Describe, hits: int = 1):
    """Limits one endpoint: `@app.get("/export")`, and below it `@rate_limit(tidegate, describe, hits=5)`."""

    def decorate(endpoint):
        signature = inspect.signature(endpoint)
        own = [
            inspect.Parameter("tidegate_request", inspect.Parameter.KEYWORD_ONLY, annotation=Request),
            inspect.Parameter("tidegate_response", inspect.Parameter.KEYWORD_ONLY, annotation=Response),
        ]

        @functools.wraps(endpoint)
        async def limited(*args, tidegate_request: Request, tidegate_response: Response, **kwargs):
            decision = await tidegate.decide(describe(tidegate_request), hits)
            if not decision.admitted:
                return decision.response()
            if inspect.iscoroutinefunction(endpoint):
                result = await endpoint(*args, **kwargs)
            else:
                result = await run_in_threadpool(endpoint, *args, **kwargs)
            decision.add_headers((result if isinstance(result, Response) else tidegate_response).headers)
            return result

        # FastAPI fills in what the signature asks for.
        limited.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *own])
        return limited

    return decorate


# --- The caller: what to do when an API refuses ---


LONGEST_JITTER = 10.0  # seconds


async def retry(send: Callable[[], Awaitable], attempts: int = 5, base: float = 0.1, longest: float = LONGEST_JITTER):
    """Calls `send` until its response is neither 429 nor 503, at most `attempts` times; returns the last response.

    Waits as long as Retry-After says, and then a random time of at most as long again (at least `base`), twice that, and so on
    up to `longest` (seconds; full jitter), so that callers who were refused together do not return together.
    """
    for attempt in range(attempts):
        response = await send()
        if response.status_code not in (429, 503) or attempt == attempts - 1:
            return response
        wait = retry_after(response.headers)
        await asyncio.sleep(wait + random.uniform(0, min(longest, max(base, wait) * 2**attempt)))


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds; 0 without the header, or if it is a date, which Tidegate does not send."""
    value = headers.get("retry-after", "").strip()
    return float(value) if value.isascii() and value.isdigit() else 0.0


class Pacer:
    """Keeps a caller below the limit that the responses report. `await pacer.call(send)` waits for its turn and sends.

    While no limit is known, one call is in flight; afterwards as many as the last response left, less those in flight. Without any
    left it waits until the reset, and a random time of at most as long again (10 s at most): others may wait for the same reset.
    """

    def __init__(self):
        self.remaining: float | None = None
        self.until = 0.0
        self.in_flight = 0
        self.changed = asyncio.Condition()

    async def call(self, send: Callable[[], Awaitable]):
        async with self.changed:
            while (wait := self._wait()) != 0.0:
                # An answer of another call may end the wait early.
                try:
                    await asyncio.wait_for(self.changed.wait(), wait)
                except TimeoutError:
                    pass
            if self.remaining is not None:
                self.remaining -= 1
            self.in_flight += 1
        reported = None
        try:
            response = await send()
            reported = reported_limit(response.headers)
            return response
        finally:
            async with self.changed:
                self.in_flight -= 1
                if reported:
                    remaining, reset = reported
                    jitter = 0.0 if remaining else random.uniform(0, min(LONGEST_JITTER, reset))
                    self.remaining, self.until = remaining - self.in_flight, time.monotonic() + reset + jitter
                elif self.remaining is None:
                    self.remaining, self.until = float("inf"), time.monotonic() + 1.0
                self.changed.notify_all()

    def _wait(self) -> float | None:
        """Seconds until it is worth looking again: 0 for now, None for not before another call is answered."""
        now = time.monotonic()
        if now >= self.until:
            self.remaining = None
        if self.remaining is None:
            return None if self.in_flight else 0.0
        return 0.0 if self.remaining >= 1 else self.until - now


def reported_limit(headers: Mapping[str, str]) -> tuple[int, float] | None:
    """Calls that remain, and seconds until that changes; from RateLimit, RateLimit-* or X-RateLimit-*."""
    if wait := retry_after(headers):
        return 0, wait
    # RateLimit: "per-user";r=1;t=46, "all";r=999;t=946. The least remaining counts, for the longest time.
    items = re.findall(r";r=(\d+);t=(\d+)", headers.get("ratelimit", ""))
    if items:
        least, longest = min((int(r), -int(t)) for r, t in items)
        return least, -longest
    for prefix in ("ratelimit", "x-ratelimit"):
        remaining, reset = headers.get(f"{prefix}-remaining", ""), headers.get(f"{prefix}-reset", "")
        if remaining.isdigit() and reset.isdigit():
            # X-RateLimit-Reset of Tidegate is a time in seconds of the epoch.
            return int(remaining), float(reset) if prefix == "ratelimit" else max(0.0, float(reset) - time.time())
    return None
