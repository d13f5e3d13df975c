#!/usr/bin/env python3
"""The rendered chart as real processes on this machine: the server's command line, its probes, its
drain within the grace period, its secrets and what its ServiceMonitor says of the metrics port, the
image's health check, and the init container that fetches the model.
Usage: check_server.py HELM TREADLE MODEL"""

import base64
import hashlib
import http.server
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time

import yaml

from certificates import Authority, write

HERE = os.path.dirname(os.path.abspath(__file__))
CHART = os.path.join(HERE, "..", "helm", "treadle")
HEALTH = os.path.join(HERE, "..", "grpc_health.sh")
AUTHORIZATION = "Bearer not-a-secret"


def render_object(helm, values, kind):
    """The first object of this kind."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file)
        file.flush()
        output = subprocess.check_output([helm, "template", "chat", CHART, "--values", file.name])
    return next(d for d in yaml.safe_load_all(output) if d and d["kind"] == kind)


def render(helm, values, kind="Deployment"):
    """The pod that it makes."""
    return render_object(helm, values, kind)["spec"]["template"]["spec"]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def health(port, probe):
    done = subprocess.run([HEALTH, f"127.0.0.1:{port}", probe["grpc"].get("service", "")],
                          capture_output=True, text=True, timeout=30)
    return done.stdout.strip()


def wait_until(what, condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def start(binary, pod, replace):
    """A pod's command, with flags of this machine in place of the cluster's."""
    args = pod["containers"][0]["args"]
    given = [f"{name}={replace[name]}" if (name := arg.split("=")[0]) in replace else arg for arg in args]
    assert sum(old != new for old, new in zip(args, given)) == len(replace), args
    return subprocess.Popen([binary, *given], stderr=subprocess.PIPE, text=True)


def secret_flags(pod, secrets):
    """The pod's flags that name a file of a Secret, each with that file here: in `secrets`, by the Secret's name."""
    volumes = {v["name"]: v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
    files = {}
    for mount in pod["containers"][0]["volumeMounts"]:
        if mount["name"] in volumes:
            assert mount["readOnly"]
            folder = os.path.join(secrets, volumes[mount["name"]])
            files |= {os.path.join(mount["mountPath"], name): os.path.join(folder, name) for name in os.listdir(folder)}
    split = [arg.partition("=") for arg in pod["containers"][0]["args"]]
    return {name: files[path] for name, _, path in split if path in files}


def check_lifecycle(helm, binary, model):
    values = {"server": {"kvMemory": "256M", "threads": 1}, "drain": {"timeoutSeconds": 60}}
    spec = render(helm, values)
    container = spec["containers"][0]
    port, probed = free_port(), free_port()
    generate = [binary, "generate", "--target", f"127.0.0.1:{port}", "--temperature", "0",
                "--ignore-eos", "--prompt", "Once upon a time"]
    assert health(probed, container["startupProbe"]) != "SERVING"
    server = start(binary, spec, {"--model": model, "--listen": f"127.0.0.1:{port}", "--http-listen": "none",
                                  "--metrics-listen": "none", "--health-listen": f"127.0.0.1:{probed}"})
    try:
        probes = [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
        assert len({probe["grpc"]["service"] for probe in probes}) == 3
        wait_until("the startup probe", lambda: health(probed, probes[0]) == "SERVING", 120)
        wait_until("the readiness probe", lambda: health(probed, probes[1]) == "SERVING", 120)
        assert health(probed, probes[2]) == "SERVING"
        accepted = subprocess.Popen([*generate, "--max-new-tokens", "150"], stdout=subprocess.PIPE,
                                    stderr=subprocess.PIPE)
        assert accepted.stdout.read(1), accepted.stderr.read()  # a token has come out
        server.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        wait_until("readiness falls", lambda: health(probed, probes[1]) != "SERVING", 10)
        assert health(probed, probes[0]) == health(probed, probes[2]) == "SERVING"  # draining is no failure
        refused = subprocess.run([*generate, "--max-new-tokens", "1"], capture_output=True, text=True, timeout=60)
        assert refused.returncode != 0 and "UNAVAILABLE" in refused.stderr, refused.stderr
        _, errors = accepted.communicate(timeout=120)
        assert accepted.returncode == 0, f"the accepted request failed: {errors}"
        _, log = server.communicate(timeout=spec["terminationGracePeriodSeconds"])
        assert server.returncode == 0 and log.rstrip().endswith("drained"), (server.returncode, log)
        took = time.monotonic() - asked
    finally:
        server.kill()
    print(f"server: the chart's command line starts, its three probes pass, a draining server refuses "
          f"and finishes what it accepted ({took:.1f} s of {spec['terminationGracePeriodSeconds']} s of grace)")


def check_pipeline(helm, binary, model, topology):
    """The processes that the chart renders for a pipeline answer as one process does, and end."""
    values = {"server": {"kvMemory": "256M", "threads": 1}, "drain": {"timeoutSeconds": 60},
              "parallelism": {"pipeline": 2, "dataInterface": "lo", "topology": topology}}
    prompt = ["--temperature", "0", "--prompt", "Once upon a time", "--max-new-tokens", "24"]
    expected = subprocess.check_output([binary, "generate", "--model", model, *prompt], timeout=120,
                                       stderr=subprocess.DEVNULL)
    port, probed = free_port(), free_port()
    replace = {"--model": model, "--listen": f"127.0.0.1:{port}", "--http-listen": "none",
               "--metrics-listen": "none", "--health-listen": f"127.0.0.1:{probed}"}
    processes = []
    secrets = tempfile.TemporaryDirectory()
    try:
        pod = render(helm, values)
        if topology == "StatefulSet":
            workers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
            replace["--workers"] = ",".join(workers)
            wait = pod["initContainers"][0]
            waiting = subprocess.Popen([*wait["command"], *wait["args"]], stdout=subprocess.PIPE, text=True,
                                       env={**os.environ, "WORKERS": replace["--workers"]})
            processes.append(waiting)
            assert waiting.stdout.readline() == f"waiting for {workers[0]}\n"
            worker_pod = render(helm, values, "StatefulSet")
            secret = render_object(helm, values, "Secret")
            os.makedirs(os.path.join(secrets.name, secret["metadata"]["name"]))
            for name, value in secret["data"].items():
                write(os.path.join(secrets.name, secret["metadata"]["name"], name), base64.b64decode(value).decode())
            replace.update(secret_flags(pod, secrets.name))
            for worker in workers:
                flags = {"--model": model, "--listen": worker, **secret_flags(worker_pod, secrets.name)}
                processes.append(start(binary, worker_pod, flags))
            waiting.communicate(timeout=60)
            assert processes.pop(0).returncode == 0
        master = start(binary, pod, replace)
        processes.insert(0, master)
        probe = pod["containers"][0]["readinessProbe"]
        wait_until("the readiness probe", lambda: health(probed, probe) == "SERVING" or master.poll() is not None, 120)
        got = subprocess.check_output([binary, "generate", "--target", f"127.0.0.1:{port}", *prompt], timeout=120)
        assert got == expected, f"{got!r}, one process: {expected!r}"
        for process in processes:  # the master first: the workers' preStop is longer
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=pod["terminationGracePeriodSeconds"])
            assert process.returncode == 0, log
    finally:
        for process in processes:
            process.kill()
        secrets.cleanup()
    print(f"pipeline ({topology}): the chart's command lines start, answer as one process does, and end")


def scrape(port, endpoint, secrets, authorized=True):
    """As the Prometheus operator does for an endpoint of a ServiceMonitor; the first line."""

    def file(selector):
        return os.path.join(secrets, selector["name"], selector["key"])

    tls = endpoint["tlsConfig"]
    assert endpoint["scheme"] == "https" and endpoint["authorization"]["type"] == "Bearer"
    context = ssl.create_default_context(cafile=file(tls["ca"]["secret"]))
    context.load_cert_chain(file(tls["cert"]["secret"]), file(tls["keySecret"]))
    token = open(file(endpoint["authorization"]["credentials"])).read()
    header = f"Authorization: Bearer {token}\r\n" if authorized else ""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as plain, \
            context.wrap_socket(plain, server_hostname=tls["serverName"]) as connection:
        connection.sendall(f"GET /metrics HTTP/1.0\r\n{header}\r\n".encode())
        with connection.makefile("rb") as answer:
            return answer.read().decode().splitlines()[0]


def check_secrets(helm, binary, model):
    """TLS everywhere: the pod's Secrets fit its flags and its ServiceMonitor, and the image's health
    check finds the plaintext port."""
    values = {"server": {"kvMemory": "256M", "threads": 1}, "tls": {"secret": "chat-tls"},
              "metricsTls": {"secret": "chat-tls", "clientCa": True}, "metricsToken": {"secret": "chat-scrape"},
              "serviceMonitor": {"enabled": True, "tls": {"clientSecret": "prometheus-tls"}}}
    pod = render(helm, values)
    endpoint = render_object(helm, values, "ServiceMonitor")["spec"]["endpoints"][0]
    service = render_object(helm, values, "Service")["metadata"]["name"]
    grpc, metrics, probed = free_port(), free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        secrets = os.path.join(folder, "secrets")
        authority = Authority(os.path.join(folder, "authority"))
        authority.sign(os.path.join(secrets, "chat-tls"), f"DNS:{service}.default.svc")
        authority.sign(os.path.join(secrets, "prometheus-tls"), "DNS:prometheus")
        os.makedirs(os.path.join(secrets, "chat-scrape"))
        write(os.path.join(secrets, "chat-scrape", "token"), "scrape-0123456789abcdef")
        replace = secret_flags(pod, secrets)
        assert len(replace) == 6, replace
        replace.update({"--model": model, "--listen": f"127.0.0.1:{grpc}", "--http-listen": "none",
                        "--metrics-listen": f"127.0.0.1:{metrics}", "--health-listen": f"127.0.0.1:{probed}"})
        server = start(binary, pod, replace)

        def image_health(*arguments, **environment):
            return subprocess.run([HEALTH, *arguments], env={**os.environ, **environment}, capture_output=True,
                                  text=True, timeout=30).returncode == 0

        try:
            wait_until("the image's health check", lambda: image_health(GRPC_HEALTH_ADDRESS=f"127.0.0.1:{probed}"), 120)
            assert not image_health(f"127.0.0.1:{grpc}"), "a plaintext check of a TLS port"
            assert scrape(metrics, endpoint, secrets) == "HTTP/1.1 200 OK"
            assert scrape(metrics, endpoint, secrets, authorized=False) == "HTTP/1.1 401 Unauthorized"
            server.send_signal(signal.SIGTERM)
            _, log = server.communicate(timeout=60)
            assert server.returncode == 0 and "0123456789abcdef" not in log, log
        finally:
            server.kill()
    dockerfile = open(os.path.join(HERE, "..", "Dockerfile")).read()
    assert re.search(r'^HEALTHCHECK .* CMD \["grpc-health"\]$', dockerfile, re.M), "the address is the environment's"
    print("secrets: the chart's Secrets are where its flags look, its ServiceMonitor scrapes over mutual TLS with a "
          "token, and the image's health check takes its address from the environment")


class Source(http.server.BaseHTTPRequestHandler):
    data = os.urandom(100_000)

    def do_GET(self):
        allowed = self.headers.get("Authorization") == AUTHORIZATION
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(self.data if allowed else b"no")

    def log_message(self, *_):
        pass


def check_fetch(helm):
    source = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Source)
    threading.Thread(target=source.serve_forever, daemon=True).start()
    right = hashlib.sha256(Source.data).hexdigest()
    cases = [(right, AUTHORIZATION, 0), ("0" * 64, AUTHORIZATION, 1), (right, "Bearer wrong", 22)]
    for sha256, authorization, expected in cases:
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "deep", "m.gguf")
            spec = render(helm, {"model": {
                "source": "url", "mountPath": folder, "path": file,
                "url": {"url": f"http://127.0.0.1:{source.server_port}/m.gguf", "sha256": sha256,
                        "authorizationSecret": {"name": "token"}}}})
            init = spec["initContainers"][0]
            env = {e["name"]: e.get("value", authorization) for e in init["env"]}
            for _ in range(2):  # the second time the file is there
                done = subprocess.run([*init["command"], *init["args"]], env={**os.environ, **env},
                                      capture_output=True, text=True, timeout=120)
                assert (done.returncode == 0) == (expected == 0), (expected, done)
                assert os.path.exists(file) == (expected == 0)
                assert authorization.split()[1] not in done.stderr + done.stdout
            if sha256 != right:
                assert "sha256" in done.stderr and not os.path.exists(file + ".part"), done.stderr
    source.shutdown()
    print("model by URL: fetched and checked; a wrong sha256 or a refused download leaves no model")


if __name__ == "__main__":
    check_fetch(sys.argv[1])
    if len(sys.argv) > 3:
        check_lifecycle(*sys.argv[1:4])
        check_secrets(*sys.argv[1:4])
        for kind in ("StatefulSet", "SinglePod"):
            check_pipeline(*sys.argv[1:4], kind)
