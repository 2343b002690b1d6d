"""The probe of gRPC's C core: a client that a test steers.

Reads commands from standard input, and prints one line of JSON for each call:

    open NAME TARGET CA RETRIES KEEPALIVE_MS          CA: a file, or - for none; RETRIES: default, policy, hedging or off
    call ID NAME KEY VALUE TIMEOUT_MS COMPRESSION     COMPRESSION: gzip, or - for none
"""

import json
import sys
import threading
import time
from pathlib import Path

import grpc
from envoy.extensions.common.ratelimit.v3.ratelimit_pb2 import RateLimitDescriptor
from envoy.service.ratelimit.v3.rls_pb2 import RateLimitRequest
from envoy.service.ratelimit.v3.rls_pb2_grpc import RateLimitServiceStub

POLICY = {"maxAttempts": 3, "initialBackoff": "0.05s", "maxBackoff": "0.1s", "backoffMultiplier": 1}
SERVICE_CONFIG = {"methodConfig": [{"name": [{}], "retryPolicy": POLICY | {"retryableStatusCodes": ["UNAVAILABLE"]}}]}

printing = threading.Lock()
channels = {}


def open_channel(name, target, ca, retries, keepalive_ms):
    options = [
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.keepalive_time_ms", int(keepalive_ms)),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Channels to the same address do not share a connection.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if retries in ("policy", "off"):
        options.append(("grpc.service_config", json.dumps(SERVICE_CONFIG)))
    if retries == "off":
        options.append(("grpc.enable_retries", 0))
    if ca == "-":
        channel = grpc.insecure_channel(target, options)
    else:
        channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(Path(ca).read_bytes()), options)
    channels[name] = RateLimitServiceStub(channel)


def call(number, name, key, value, timeout_ms, compression):
    began = time.monotonic()
    request = RateLimitRequest(domain="clients", descriptors=[RateLimitDescriptor(entries=[{"key": key, "value": value}])])
    compression = grpc.Compression.Gzip if compression == "gzip" else None
    future = channels[name].ShouldRateLimit.future(request, timeout=int(timeout_ms) / 1_000, compression=compression)

    def ended(future):
        status = future.code().value[0]
        code = future.result().overall_code if status == 0 else 0
        line = {"id": int(number), "status": status, "code": code, "ms": int((time.monotonic() - began) * 1_000)}
        with printing:
            print(json.dumps(line), flush=True)
            print(number, future.details(), file=sys.stderr, flush=True)

    future.add_done_callback(ended)


for line in sys.stdin:
    command, *words = line.split()
    {"open": open_channel, "call": call}[command](*words)
