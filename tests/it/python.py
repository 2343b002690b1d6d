#!/usr/bin/env python3
"""What a gRPC client sees that knows only the address of a server, and has no file of its protocol.

python.py ADDRESS look     one JSON object: services, types, answers to three equal calls, health
python.py ADDRESS watch    a line `NAME STATUS` for every change of health, until it has changed once
"""
import json
import sys

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVICE = "envoy.service.ratelimit.v3.RateLimitService"
NAMES = ["", "ratelimit", SERVICE]


def services(channel, version):
    """The services that a version of reflection lists; the versions differ only in the name of the service."""
    info = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    (answer,) = info(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    return sorted(service.name for service in answer.list_services_response.service)


def look(channel):
    pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    method = pool.FindServiceByName(SERVICE).FindMethodByName("ShouldRateLimit")
    request, response = (message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type))
    entry = pool.FindMessageTypeByName("envoy.extensions.common.ratelimit.v3.RateLimitDescriptor.Entry")
    kinds = descriptor_pb2.FieldDescriptorProto.Type
    should_rate_limit = channel.unary_unary(
        f"/{SERVICE}/{method.name}",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )
    order = json_format.ParseDict(
        {"domain": "python", "descriptors": [{"entries": [{"key": "user", "value": "äöü"}]}]}, request()
    )
    answers = [json_format.MessageToDict(should_rate_limit(order, timeout=30)) for _ in range(3)]
    health = health_pb2_grpc.HealthStub(channel)

    def status(name):
        try:
            return health_pb2.HealthCheckResponse.ServingStatus.Name(
                health.Check(health_pb2.HealthCheckRequest(service=name), timeout=30).status
            )
        except grpc.RpcError as error:
            return error.code().name

    print(json.dumps({
        "services": {version: services(channel, version) for version in ("v1", "v1alpha")},
        "entry": {field.name: kinds.Name(field.type) for field in entry.fields},
        "answers": answers,
        "health": {name: status(name) for name in [*NAMES, "unknown"]},
    }))


def watch(channel):
    health = health_pb2_grpc.HealthStub(channel)
    watched = [(name, health.Watch(health_pb2.HealthCheckRequest(service=name), timeout=60)) for name in NAMES]
    for _ in range(2):
        for name, statuses in watched:
            print(name, health_pb2.HealthCheckResponse.ServingStatus.Name(next(statuses).status), flush=True)


with grpc.insecure_channel(sys.argv[1]) as opened:
    {"look": look, "watch": watch}[sys.argv[2]](opened)
