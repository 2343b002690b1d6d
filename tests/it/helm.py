#!/usr/bin/env python3
"""What the tests of the chart need of Python: YAML, the schemas of Kubernetes, and an HTTP client.

helm.py yaml FILE                the documents of a YAML file, as a JSON list
helm.py objects FILE VERSION...  the same of a rendering, or a line on standard error for each object that one of these
                                 versions of Kubernetes would refuse or only partly understand
helm.py ask URL QUESTION         GET URL/healthcheck, POST URL/json, GET URL/metrics: `STATUS BODY` of each
helm.py patched FILE             a configuration of Envoy with the patches that the object in the file makes
helm.py applied CONFIG FILE      the configuration of Envoy with the patches of an EnvoyPatchPolicy
"""
import json
import re
import sys
import urllib.request

import kubernetes_validate
import yaml


class Strict(yaml.SafeLoader):
    """Kubernetes refuses a key that stands there twice; PyYAML would take the last."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.YAMLError(f"{node.start_mark}: {sorted(twice)} stands there twice")
        return super().construct_mapping(node, deep)


def documents(path):
    with open(path, encoding="utf-8") as file:
        return [document for document in yaml.load_all(file, Strict) if document is not None]


def objects(path, versions):
    found, refused = documents(path), False
    for version in versions:
        for item in found:
            # What operators bring has no schema here.
            if item["apiVersion"].startswith(("monitoring.coreos.com/", "cert-manager.io/")):
                continue
            try:
                kubernetes_validate.validate(item, version, strict=True)
            except Exception as error:
                refused = True
                name = item.get("metadata", {}).get("name")
                print(f"Kubernetes {version}: {item['kind']} {name}: {error}", file=sys.stderr)
    if refused:
        sys.exit(1)
    return found


def ask(url, question):
    for request in (
        url + "/healthcheck",
        urllib.request.Request(url + "/json", question.encode()),
        url + "/metrics",
    ):
        with urllib.request.urlopen(request, timeout=30) as answer:
            print(answer.status, answer.read().decode())


TYPE = "type.googleapis.com/envoy.extensions.filters"


def manager(name, **more):
    """A listener's only filter, which routes."""
    return {
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": {
            "@type": f"{TYPE}.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": name,
            "http_filters": [
                {
                    "name": "envoy.filters.http.router",
                    "typed_config": {"@type": f"{TYPE}.http.router.v3.Router"},
                }
            ],
            **more,
        },
    }


def routes(action):
    return {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, **action}]}]}


def at(port):
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def cluster(name, address, **more):
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    return {"name": name, **more, "load_assignment": {"cluster_name": name, "endpoints": endpoints}}


def add(target, path, value):
    """The `add` of a JSON patch, into a map or a list."""
    *way, last = path.strip("/").split("/")
    for step in way:
        target = target[int(step) if isinstance(target, list) else step]
    if isinstance(target, list):
        target.insert(int(last), value)
    else:
        target[last] = value


def patched(path):
    (found,) = documents(path)
    kind = found["kind"]
    routing = routes({"route": {"cluster": "upstream"}})
    edge = manager("edge", use_remote_address=True, route_config=routing)
    listener = {"name": "default/eg/http", "address": at(10000), "default_filter_chain": {"filters": [edge]}}
    direct = manager("upstream", route_config=routes({"direct_response": {"status": 200}}))
    upstream = {"name": "upstream", "address": at(8090), "filter_chains": [{"filters": [direct]}]}
    clusters = [cluster("upstream", at(8090))]
    if kind == "EnvoyPatchPolicy":
        for patch in found["spec"]["jsonPatches"]:
            operation, (_, _, target) = patch["operation"], patch["type"].rpartition(".")
            assert operation["op"] == "add"
            if target == "Cluster":
                clusters.append(operation["value"])
            else:
                assert patch["name"] == listener["name"]
                add({"Listener": listener, "RouteConfiguration": routing}[target], operation["path"], operation["value"])
    else:
        values = {item["applyTo"]: item["patch"]["value"] for item in found["spec"]["configPatches"]}
        filters, hosts = values["HTTP_FILTER"], values["VIRTUAL_HOST"]
        listener.update(values["LISTENER"])
        edge["typed_config"]["http_filters"].insert(0, filters)
        for host in routing["virtual_hosts"]:
            host.update(hosts)
        # Istio makes a cluster of a Service whose port speaks gRPC; the patch replaces how it speaks HTTP/2.
        name = filters["typed_config"]["rate_limit_service"]["grpc_service"]["envoy_grpc"]["cluster_name"]
        clusters.append(cluster(name, at(8081), **values["CLUSTER"]))
    printed(
        {
            "admin": {"address": at(9901)},
            "static_resources": {"listeners": [listener, upstream], "clusters": clusters},
        }
    )


def applied(configuration, path):
    ((whole,), (found,)) = documents(configuration), documents(path)
    for patch in found["spec"]["jsonPatches"]:
        operation, (_, _, target) = patch["operation"], patch["type"].rpartition(".")
        assert (operation["op"], target) == ("add", "Cluster")
        (resource,) = [item for item in whole["static_resources"]["clusters"] if item["name"] == patch["name"]]
        add(resource, operation["path"], operation["value"])
    printed(whole)


def printed(configuration):
    text = yaml.safe_dump(configuration)
    # Names of the cluster are known there only; ports are followed by a space, as the tests of Envoy expect.
    text = re.sub(r"address: \S+\.svc\.cluster\.local", "address: 127.0.0.1", text)
    print(re.sub(r"(port_value: \d+)", r"\1 ", text))


if __name__ == "__main__":
    order, argument, *rest = sys.argv[1:]
    if order == "yaml":
        json.dump(documents(argument), sys.stdout)
    elif order == "objects":
        json.dump(objects(argument, rest), sys.stdout)
    elif order == "patched":
        patched(argument)
    elif order == "applied":
        applied(argument, *rest)
    else:
        ask(argument, *rest)
