#!/usr/bin/env python3
"""Black-box conformance runner for envoy.service.ratelimit.v3.

  run.py --selfcheck                       validate every case file (no server)
  run.py --list                            groups, their env, their cases
  run.py --groups                          the names of the groups that have cases
  run.py --env --group G                   KEY=VALUE lines the server of group G needs
  run.py --prepare DIR --group G           write the rule files of group G into DIR
  run.py --documents --group G             print the rule files of group G as JSON, by name
  run.py --addr HOST:PORT --group G        run group G against a server
  run.py --config-check 'CMD {dir}'        run config_cases.yaml through a checker of
                                           rule files; exit 0 = accepted. Cases that
                                           merge domains set MERGE_DOMAIN_CONFIG=true.

All but --selfcheck take --skip-quirks (no case marked quirk, nor its rule files) or
--quirks-only (no other).

Without --reference an invalid request may be answered with UNKNOWN (the reference)
or INVALID_ARGUMENT, texts of errors are free, and a checker must name the broken
file. With --reference codes and texts must be the reference's, and the checker is
called as its config_check is: CMD -config_dir DIR [-merge_domain_configs].

With --leased P, what remains may differ by P percent of the limit: as much as leases
hold, and as is granted while another answer is under way.

--run-id ID replaces the token @RUN@ in domains (configs, requests and expected
metadata), so a suite can be repeated against a Redis that still holds counters.
Use the same ID for --prepare and for the run.  Default: empty.

See README.md next to this file for the case format.
"""
import argparse
import importlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time

import yaml

HERE = os.path.dirname(os.path.abspath(__file__))
UNIT_S = {"SECOND": 1, "MINUTE": 60, "HOUR": 3600, "DAY": 86400,
          "WEEK": 604800, "MONTH": 2592000, "YEAR": 31536000}
UNIT_NUM = {"UNKNOWN": 0, "SECOND": 1, "MINUTE": 2, "HOUR": 3, "DAY": 4,
            "MONTH": 5, "YEAR": 6, "WEEK": 7}
NUM_UNIT = {v: k for k, v in UNIT_NUM.items()}
NUM_CODE = {0: "UNKNOWN", 1: "OK", 2: "OVER_LIMIT"}


# --------------------------------------------------------------------- proto

def load_stubs():
    """Compile rls_min.proto into a scratch directory and import the result."""
    import grpc_tools
    from grpc_tools import protoc
    wkt = os.path.join(os.path.dirname(grpc_tools.__file__), "_proto")
    with tempfile.TemporaryDirectory() as out:
        rc = protoc.main(["protoc", f"-I{HERE}", f"-I{wkt}", f"--python_out={out}",
                          f"--grpc_python_out={out}", os.path.join(HERE, "rls_min.proto")])
        if rc != 0:
            sys.exit("protoc failed")
        sys.path.insert(0, out)
        return importlib.import_module("rls_min_pb2"), importlib.import_module("rls_min_pb2_grpc")


# --------------------------------------------------------------------- cases

CASE_KEYS = {"name", "about", "quirk", "group", "env", "config", "steps",
             "skip_if_same_window"}
STEP_KEYS = {"request", "times", "expect", "expect_error"}
EXPECT_KEYS = {"overall_code", "statuses", "headers", "dynamic_metadata"}
STATUS_KEYS = {"code", "current_limit", "limit_remaining", "duration_until_reset"}


def substitute(obj, run_id):
    if isinstance(obj, str):
        return obj.replace("@RUN@", run_id)
    if isinstance(obj, list):
        return [substitute(x, run_id) for x in obj]
    if isinstance(obj, dict):
        return {substitute(k, run_id): substitute(v, run_id) for k, v in obj.items()}
    return obj


def load_cases(run_id=""):
    cases = []
    root = os.path.join(HERE, "cases")
    for fn in sorted(os.listdir(root)):
        if not fn.endswith(".yaml"):
            continue
        with open(os.path.join(root, fn), encoding="utf-8") as f:
            case = yaml.safe_load(f)
        case["file"] = fn
        case.setdefault("group", "default")
        case.setdefault("env", {})
        cases.append(substitute(case, run_id))
    return cases


def config_domains(text):
    """Domains a config text declares (first YAML document only, as yaml.v2 does)."""
    m = re.search(r"^domain:\s*(.+?)\s*$", text.split("\n---", 1)[0], re.M)
    return [m.group(1).strip("'\"")] if m else []


def selfcheck(cases):
    problems = []
    names, envs, owners = set(), {}, {}
    for c in cases:
        where = c["file"]

        def bad(msg):
            problems.append(f"{where}: {msg}")

        extra = set(c) - CASE_KEYS - {"file"}
        if extra:
            bad(f"unknown case keys {sorted(extra)}")
        if c.get("name") != where[:-5]:
            bad("name must equal the file name")
        if c["name"] in names:
            bad("duplicate name")
        names.add(c["name"])
        if envs.setdefault(c["group"], c["env"]) != c["env"]:
            bad(f"env differs from the other cases of group {c['group']}")
        if (c["group"] == "default") != (not c["env"]):
            bad("only group default has no env")
        for fn, text in c["config"].items():
            try:
                list(yaml.compose_all(text))
            except yaml.YAMLError as e:
                bad(f"config {fn}: {e}")
            for d in config_domains(text):
                if owners.setdefault((c["group"], d), c["name"]) != c["name"]:
                    bad(f"domain {d} already used by {owners[(c['group'], d)]}")
        if not c.get("steps"):
            bad("no steps")
        for i, s in enumerate(c.get("steps") or []):
            extra = set(s) - STEP_KEYS
            if extra:
                bad(f"step {i}: unknown keys {sorted(extra)}")
            if ("expect" in s) == ("expect_error" in s):
                bad(f"step {i}: exactly one of expect / expect_error")
            req = s["request"]
            if set(req) - {"domain", "hits_addend", "descriptors"}:
                bad(f"step {i}: unknown request keys")
            for d in req.get("descriptors", []):
                if set(d) - {"entries", "limit", "hits_addend"}:
                    bad(f"step {i}: unknown descriptor keys {sorted(d)}")
            if "expect" in s:
                e = s["expect"]
                if set(e) - EXPECT_KEYS:
                    bad(f"step {i}: unknown expect keys")
                if e.get("overall_code") not in ("OK", "OVER_LIMIT"):
                    bad(f"step {i}: overall_code")
                if len(e.get("statuses", [])) != len(req.get("descriptors", [])):
                    bad(f"step {i}: statuses and descriptors differ in length")
                for st in e.get("statuses", []):
                    if set(st) - STATUS_KEYS:
                        bad(f"step {i}: unknown status keys {sorted(st)}")
                    if "code" not in st or "limit_remaining" not in st or "duration_until_reset" not in st:
                        bad(f"step {i}: status needs code, limit_remaining, duration_until_reset")
    return problems


def smallest_unit(case):
    """Seconds of the smallest window a case depends on (single-second rules are
    only ever hit once per step, so they need no guard)."""
    text = "\n".join(case["config"].values())
    found = [u.upper() for u in re.findall(r"\bunit:\s*['\"]?([A-Za-z]+)", text)]
    for s in case["steps"]:
        for d in s["request"].get("descriptors", []):
            if d.get("limit"):
                found.append(str(d["limit"].get("unit", "")).upper())
    sizes = [UNIT_S[u] for u in found if u in UNIT_S and u != "SECOND"]
    return min(sizes) if sizes else None


def guard_window(case, margin=8):
    size = smallest_unit(case)
    if size is None:
        return
    left = size - time.time() % size
    if left < margin:
        time.sleep(left + 0.2)


def same_window(units):
    now = int(time.time())
    starts = {now // UNIT_S[u] * UNIT_S[u] for u in units}
    return len(starts) < len(units)


# -------------------------------------------------------------------- compare

def build_request(pb, req):
    m = pb.RateLimitRequest(domain=req.get("domain", ""), hits_addend=req.get("hits_addend", 0))
    for d in req.get("descriptors", []):
        dm = m.descriptors.add()
        for e in d.get("entries", []):
            dm.entries.add(key=str(e.get("key", "")), value=str(e.get("value", "")))
        if d.get("limit") is not None:
            dm.limit.requests_per_unit = d["limit"].get("requests_per_unit", 0)
            unit = d["limit"].get("unit", "UNKNOWN")
            dm.limit.unit = unit if isinstance(unit, int) else UNIT_NUM[unit]
        if d.get("hits_addend") is not None:
            dm.hits_addend.value = d["hits_addend"]
    return m


def describe(resp):
    from google.protobuf import json_format
    out = {"overall_code": NUM_CODE.get(resp.overall_code, resp.overall_code), "statuses": []}
    for s in resp.statuses:
        st = {"code": NUM_CODE.get(s.code, s.code)}
        if s.HasField("current_limit"):
            cl = {"requests_per_unit": s.current_limit.requests_per_unit,
                  "unit": NUM_UNIT.get(s.current_limit.unit, s.current_limit.unit)}
            if s.current_limit.name:
                cl["name"] = s.current_limit.name
            st["current_limit"] = cl
        st["limit_remaining"] = s.limit_remaining
        st["duration_until_reset"] = "absent"
        if s.HasField("duration_until_reset"):
            d = s.duration_until_reset
            st["duration_until_reset"] = d.seconds + d.nanos / 1e9 if d.nanos else d.seconds
        out["statuses"].append(st)
    if resp.response_headers_to_add:
        out["headers"] = [{"key": h.key, "value": h.value} for h in resp.response_headers_to_add]
    if resp.HasField("dynamic_metadata"):
        out["dynamic_metadata"] = json_format.MessageToDict(resp.dynamic_metadata)
    for f in ("request_headers_to_add", "raw_body"):
        if getattr(resp, f):
            out[f] = str(getattr(resp, f))
    return out


def scalar_ok(want, got):
    """Equality, or {min,max} / {max_s} / {regex} matchers."""
    if isinstance(want, dict) and set(want) <= {"min", "max"}:
        try:
            g = float(got)
        except (TypeError, ValueError):
            return False
        return want.get("min", -math.inf) <= g <= want.get("max", math.inf)
    if isinstance(want, dict) and set(want) == {"regex"}:
        return re.fullmatch(want["regex"], str(got)) is not None
    return want == got


def compare(expect, got, i, leased):
    """Differences between one expectation and one described response (i = repeat index)."""
    diffs = []
    limits = [w.get("current_limit") for w in expect["statuses"]]
    limits = [limit["requests_per_unit"] if isinstance(limit, dict) else 0 for limit in limits]

    def chk_remaining(path, want, have, limit):
        if isinstance(want, dict) or abs(int(want) - int(have)) > limit * leased // 100:
            chk(path, want, have)

    def chk(path, want, have):
        if not scalar_ok(want, have):
            diffs.append(f"{path}: expected {want!r}, got {have!r}")

    chk("overall_code", expect["overall_code"], got["overall_code"])
    chk("len(statuses)", len(expect["statuses"]), len(got["statuses"]))
    for n, (w, g) in enumerate(zip(expect["statuses"], got["statuses"])):
        p = f"statuses[{n}]"
        chk(p + ".code", w["code"], g["code"])
        if w.get("current_limit") != "any":
            chk(p + ".current_limit", w.get("current_limit"), g.get("current_limit"))
        rem = w["limit_remaining"]
        if isinstance(rem, dict) and "first" in rem:
            rem = max(0, rem["first"] + i * rem["step"])
        chk_remaining(p + ".limit_remaining", rem, g["limit_remaining"], limits[n])
        dur, have = w["duration_until_reset"], g["duration_until_reset"]
        if dur == "absent":
            chk(p + ".duration_until_reset", "absent", have)
        else:
            top = dur["max_s"] if isinstance(dur, dict) else UNIT_S["YEAR"]
            if not isinstance(have, int) or not 1 <= have <= top:
                diffs.append(f"{p}.duration_until_reset: expected whole seconds in 1..{top}, got {have!r}")
    want_h, have_h = expect.get("headers", []), got.get("headers", [])
    if [h["key"] for h in want_h] != [h["key"] for h in have_h]:
        diffs.append(f"headers: expected {want_h!r}, got {have_h!r}")
    else:
        for w, g in zip(want_h, have_h):
            if w["key"].lower().endswith("-remaining"):
                chk_remaining(f"headers[{w['key']}]", w["value"], g["value"], max(limits, default=0))
            else:
                chk(f"headers[{w['key']}]", w["value"], g["value"])
    chk("dynamic_metadata", expect.get("dynamic_metadata"), got.get("dynamic_metadata"))
    for f in ("request_headers_to_add", "raw_body"):
        if f in got:
            diffs.append(f"{f}: expected empty, got {got[f]!r}")
    return diffs


def run_case(stub, pb, case, timeout, reference, leased):
    import grpc
    for si, step in enumerate(case["steps"]):
        req = build_request(pb, step["request"])
        for i in range(step.get("times", 1)):
            where = f"step {si + 1}" + (f" repeat {i + 1}/{step['times']}" if step.get("times", 1) > 1 else "")
            try:
                got = describe(stub.ShouldRateLimit(req, timeout=timeout))
            except grpc.RpcError as e:
                want = step.get("expect_error")
                if want is None:
                    return [f"{where}: unexpected error {e.code().name}: {e.details()}"]
                diffs = []
                accepted = {want["code"]} if reference or want["code"] != "UNKNOWN" else {"UNKNOWN", "INVALID_ARGUMENT"}
                if e.code().name not in accepted:
                    diffs.append(f"{where}: expected code {want['code']}, got {e.code().name} ({e.details()})")
                if reference and want.get("message_contains", "") not in (e.details() or ""):
                    diffs.append(f"{where}: message {e.details()!r} lacks {want['message_contains']!r}")
                if diffs:
                    return diffs
                continue
            if "expect_error" in step:
                return [f"{where}: expected error {step['expect_error']}, got {got}"]
            diffs = compare(step["expect"], got, i, leased)
            if diffs:
                return [f"{where}: {d}" for d in diffs] + [f"  got: {got}"]
    return []


# -------------------------------------------------------------- config checks

def run_config_checks(cmd, reference, wanted):
    with open(os.path.join(HERE, "config_cases.yaml"), encoding="utf-8") as f:
        cases = yaml.safe_load(f)
    passed = failed = 0
    for c in filter(wanted, cases):
        with tempfile.TemporaryDirectory() as d:
            for fn, text in c["config"].items():
                with open(os.path.join(d, fn), "w", encoding="utf-8") as f:
                    f.write(text)
            env = dict(os.environ)
            if reference:
                argv = shlex.split(cmd) + ["-config_dir", d] + ["-merge_domain_configs"] * bool(c.get("merge"))
            else:
                argv = [a.replace("{dir}", d) for a in shlex.split(cmd)]
                env["MERGE_DOMAIN_CONFIG"] = "true" if c.get("merge") else "false"
            p = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env)
        out = p.stdout + p.stderr
        want_ok = c["expect"] == "ok"
        problem = None
        if (p.returncode == 0) != want_ok:
            problem = f"expected {'success' if want_ok else 'failure'}, exit status {p.returncode}"
        elif not want_ok and reference and c["expect"]["error_contains"] not in out:
            problem = f"output lacks {c['expect']['error_contains']!r}"
        elif not want_ok and not any(fn in out for fn in c["config"]):
            problem = "the output names no file"
        if problem:
            failed += 1
            print(f"FAIL {c['name']}: {problem}\n     {out.strip()[-400:]}")
        else:
            passed += 1
    print(f"{passed} passed, {failed} failed")
    return failed


# ----------------------------------------------------------------------- main

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--addr", default="localhost:8081")
    ap.add_argument("--group", default="default")
    ap.add_argument("--prepare", metavar="DIR")
    ap.add_argument("--documents", action="store_true")
    ap.add_argument("--run-id", default="")
    ap.add_argument("--only", metavar="REGEX", help="run only cases whose name matches")
    quirks = ap.add_mutually_exclusive_group()
    quirks.add_argument("--skip-quirks", action="store_true", help="leave out cases marked quirk")
    quirks.add_argument("--quirks-only", action="store_true", help="leave out all others")
    ap.add_argument("--timeout", type=float, default=10)
    ap.add_argument("--wait", type=float, default=15, help="seconds to wait for the server")
    ap.add_argument("--list", action="store_true")
    ap.add_argument("--groups", action="store_true")
    ap.add_argument("--env", action="store_true")
    ap.add_argument("--selfcheck", action="store_true")
    ap.add_argument("--config-check", metavar="CMD")
    ap.add_argument("--leased", type=int, default=0, metavar="P", help="what remains may differ by P percent of the limit")
    ap.add_argument("--reference", action="store_true", help="hold the answers to the reference's very codes and texts")
    a = ap.parse_args()

    def wanted(case):
        return not (a.skip_quirks and case.get("quirk")) and not (a.quirks_only and not case.get("quirk"))

    if a.config_check:
        sys.exit(1 if run_config_checks(a.config_check, a.reference, wanted) else 0)

    cases = load_cases(a.run_id)
    problems = selfcheck(cases)
    if problems:
        print("\n".join(problems))
        sys.exit(2)
    groups = {}
    for c in filter(wanted, cases):
        groups.setdefault(c["group"], []).append(c)
    if a.selfcheck:
        for g, cs in groups.items():
            print(f"{g}: {len(cs)} cases, {sum(bool(c.get('quirk')) for c in cs)} quirks")
        print(f"{len(cases)} cases ok")
        return
    if a.groups:
        print("\n".join(groups))
        return
    if a.list:
        for g, cs in groups.items():
            env = " ".join(f"{k}={v}" for k, v in cs[0]["env"].items())
            print(f"[{g}] {env}")
            for c in cs:
                print(f"  {c['name']}{'  (quirk)' if c.get('quirk') else ''}: {c.get('about', '')}")
        return
    if a.group not in groups:
        sys.exit(f"no such group; have {sorted(groups)}")
    if a.env:
        for k, v in groups[a.group][0]["env"].items():
            print(f"{k}={v}")
        return
    if a.prepare:
        os.makedirs(a.prepare, exist_ok=True)
        n = 0
        for c in groups[a.group]:
            for fn, text in c["config"].items():
                with open(os.path.join(a.prepare, f"{c['name']}--{fn}"), "w", encoding="utf-8") as f:
                    f.write(text)
                n += 1
        print(f"wrote {n} files to {a.prepare}")
        return

    if a.documents:
        def document(text):
            try:
                return yaml.safe_load(text)
            except yaml.YAMLError:
                return None  # what only a file can have
        print(json.dumps({f"{c['name']}--{fn}": document(text) for c in groups[a.group] for fn, text in c["config"].items()}))
        return

    import grpc
    pb, pbg = load_stubs()
    chan = grpc.insecure_channel(a.addr)
    try:
        grpc.channel_ready_future(chan).result(timeout=a.wait)
    except grpc.FutureTimeoutError:
        sys.exit(f"no server at {a.addr}")
    stub = pbg.RateLimitServiceStub(chan)
    passed = failed = skipped = 0
    for c in groups[a.group]:
        if a.only and not re.search(a.only, c["name"]):
            continue
        if c.get("skip_if_same_window") and same_window(c["skip_if_same_window"]):
            print(f"SKIP {c['name']}: window starts coincide now")
            skipped += 1
            continue
        guard_window(c)
        diffs = run_case(stub, pb, c, a.timeout, a.reference, a.leased)
        if diffs:
            failed += 1
            print(f"FAIL {c['name']}" + ("  (quirk)" if c.get("quirk") else ""))
            for d in diffs:
                print(f"     {d}")
        else:
            passed += 1
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
