#!/usr/bin/env python3
"""Alert rules and dashboard. promtool reads the rules and runs alerts_test.yaml, where each alert
must fire in one test and stay silent in another. Then a real Prometheus scrapes a real server
under load, over mutual TLS and with a token: every expression of the dashboard returns data, every
metric that the server exports is on the dashboard, no scrape fails while certificate and token are
rotated, and TreadleDown fires when the server is gone.
Usage: check_prometheus.py [TREADLE MODEL]; without a server only what promtool can tell."""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

import yaml

from certificates import Authority, write

HERE = os.path.dirname(os.path.abspath(__file__))
RULES = os.path.join(HERE, "..", "prometheus")
# A server without pipelines need not have it.
MAY_BE_ABSENT = {"treadle:pipeline_bubble_ratio"}
DASHBOARD = os.path.join(HERE, "..", "grafana", "treadle.json")
FIRST_TOKEN, SECOND_TOKEN = "scrape-0123456789abcdef", "scrape-fedcba9876543210"


def check_rules():
    for command in (["check", "config", "prometheus.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(["promtool", *command], cwd=RULES, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    rules = yaml.safe_load(open(os.path.join(RULES, "alerts.yaml")))["groups"][0]["rules"]
    outcomes = {}
    for test in yaml.safe_load(open(os.path.join(RULES, "alerts_test.yaml")))["tests"]:
        for case in test["alert_rule_test"]:
            outcomes.setdefault(case["alertname"], set()).add(bool(case["exp_alerts"]))
    for rule in rules:
        assert outcomes.get(rule["alert"]) == {True, False}, f"{rule['alert']} lacks a test"
    guide = open(os.path.join(HERE, "..", "README.md")).read()
    missing = [rule["alert"] for rule in rules if f"`{rule['alert']}`" not in guide]
    assert not missing, f"deploy/README.md does not explain {missing}"
    print(f"alerts: {len(rules)} rules, each fires on its condition and not otherwise")


def expressions():
    for panel in json.load(open(DASHBOARD))["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"].replace("$__rate_interval", "15s").replace("$instance", ".*")
            yield panel["title"], expr


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def wait_until(what, condition, seconds):
    end = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except OSError:
            pass  # not listening yet
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.2)


def query(port, expr):
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": expr})
    return json.loads(get(url))["data"]["result"]


class Secrets:
    """The server's and Prometheus' files, and how to scrape with them."""

    def __init__(self, folder):
        self.authority = Authority(os.path.join(folder, "authority"))
        self.server = self.authority.sign(os.path.join(folder, "server"), "DNS:metrics.example")
        self.client = self.authority.sign(os.path.join(folder, "prometheus"), "DNS:prometheus.example")
        self.accepted, self.sent = os.path.join(folder, "accepted"), os.path.join(folder, "sent")
        write(self.accepted, FIRST_TOKEN + "\n")
        write(self.sent, FIRST_TOKEN + "\n")

    def flags(self):
        return ["--metrics-tls-cert", self.server["tls.crt"], "--metrics-tls-key", self.server["tls.key"],
                "--metrics-tls-client-ca", self.server["ca.crt"], "--metrics-token-file", self.accepted]

    def scrape_config(self):
        return {"scheme": "https", "authorization": {"type": "Bearer", "credentials_file": self.sent},
                "tls_config": {"ca_file": self.client["ca.crt"], "cert_file": self.client["tls.crt"],
                               "key_file": self.client["tls.key"], "server_name": "metrics.example"}}

    def scrape(self, port, token):
        """What /metrics answers, and the server's certificate."""
        context = ssl.create_default_context(cafile=self.client["ca.crt"])
        context.load_cert_chain(self.client["tls.crt"], self.client["tls.key"])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as plain, \
                context.wrap_socket(plain, server_hostname="metrics.example") as connection:
            certificate = connection.getpeercert()["serialNumber"]
            connection.sendall(f"GET /metrics HTTP/1.1\r\nHost: metrics.example\r\nConnection: close\r\n"
                               f"Authorization: Bearer {token}\r\n\r\n".encode())
            with connection.makefile("rb") as answer:
                return answer.read().decode(), certificate


def configuration(folder, metrics_port, secrets):
    """The shipped files, on other ports, in a hurry, and with secrets."""
    config = yaml.safe_load(open(os.path.join(RULES, "prometheus.yaml")))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{metrics_port}"]}]
    config["scrape_configs"][0].update(secrets.scrape_config())
    rules = yaml.safe_load(open(os.path.join(RULES, "alerts.yaml")))
    for rule in rules["groups"][0]["rules"]:
        if "for" in rule:
            rule["for"] = "2s"
    for name, content in (("prometheus.yaml", config), ("alerts.yaml", rules)):
        with open(os.path.join(folder, name), "w") as file:
            yaml.safe_dump(content, file)
    return os.path.join(folder, "prometheus.yaml")


def exported_metrics(port, secrets):
    return set(re.findall(r"^# TYPE (treadle:\S+)", secrets.scrape(port, FIRST_TOKEN)[0], re.M))


def check_panels(port, exported):
    absent = MAY_BE_ABSENT - exported
    panels = [(title, expr) for title, expr in expressions() if not any(name in expr for name in absent)]

    def empty():
        return [(title, expr) for title, expr in panels
                if not any(row["value"][1] != "NaN" for row in query(port, expr))]

    try:
        wait_until("data for every panel", lambda: not empty(), 60)
    except AssertionError:
        raise AssertionError(f"no data for {empty()}")
    shown = " ".join(expr for _, expr in panels)
    hidden = [name for name in exported if not re.search(re.escape(name) + r"(_bucket|_sum|_count)?\b", shown)]
    assert not hidden, f"exported, but on no panel: {hidden}"
    firing = [row["metric"]["alertname"] for row in query(port, 'ALERTS{alertstate="firing"}')]
    assert not firing, f"alerts under a light load: {firing}"
    print(f"dashboard: {len(panels)} expressions return data on a live Prometheus, {len(exported)} metrics all shown"
          + "".join(f"; this server does not export {name}" for name in absent))


def check_rotation(port, metrics_port, secrets):
    """A token, and then a certificate, while Prometheus scrapes."""

    def accepts(token):
        return " 200 OK" in secrets.scrape(metrics_port, token)[0].splitlines()[0]

    def scraped_again():
        begin = time.time()
        wait_until("another scrape", lambda: [row for row in query(port, 'timestamp(up{job="treadle"})')
                                              if float(row["value"][1]) > begin], 60)

    assert accepts(FIRST_TOKEN) and not accepts(SECOND_TOKEN)
    write(secrets.accepted, f"{FIRST_TOKEN}\n{SECOND_TOKEN}\n")
    wait_until("the second token", lambda: accepts(SECOND_TOKEN), 60)
    write(secrets.sent, SECOND_TOKEN)
    scraped_again()
    scraped_again()  # the first may have begun before
    write(secrets.accepted, SECOND_TOKEN)
    wait_until("the end of the first token", lambda: not accepts(FIRST_TOKEN), 60)
    _, before = secrets.scrape(metrics_port, SECOND_TOKEN)
    secrets.authority.sign(os.path.dirname(secrets.server["tls.crt"]), "DNS:metrics.example")
    wait_until("the new certificate", lambda: secrets.scrape(metrics_port, SECOND_TOKEN)[1] != before, 60)
    scraped_again()
    scraped_again()
    worst = [float(row["value"][1]) for row in query(port, 'min_over_time(up{job="treadle"}[1h])')]
    assert worst == [1], f"scrapes failed during the rotation: {worst}"
    print("scrapes over mutual TLS with a token: none failed while token and certificate were rotated")


def check_live(binary, model):
    grpc, metrics, port = free_port(), free_port(), free_port()
    processes = []

    def start(*command):
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return processes[-1]

    with tempfile.TemporaryDirectory() as folder:
        secrets = Secrets(os.path.join(folder, "secrets"))
        try:
            server = start(binary, "serve", "--model", model, "--listen", f"127.0.0.1:{grpc}", "--http-listen", "none",
                           "--metrics-listen", f"127.0.0.1:{metrics}", "--threads", "1", "--pin-threads", "off",
                           "--kv-memory", "256M", "--ledger-file", f"{folder}/ledger", *secrets.flags())
            wait_until("the server", lambda: exported_metrics(metrics, secrets), 120)
            start("prometheus", f"--config.file={configuration(folder, metrics, secrets)}",
                  f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}")
            wait_until("Prometheus", lambda: query(port, 'up{job="treadle"} == 1'), 60)
            load = start(binary, "bench", "serve", "--target", f"127.0.0.1:{grpc}", "--num-prompts", "100000",
                         "--max-concurrency", "6", "--input-len", "8:32", "--output-len", "4:16")
            check_panels(port, exported_metrics(metrics, secrets))
            check_rotation(port, metrics, secrets)
            load.kill()
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
            wait_until("TreadleDown", lambda: query(port, 'ALERTS{alertname="TreadleDown",alertstate="firing"}'), 60)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    print("TreadleDown fires when the server is gone")


if __name__ == "__main__":
    check_rules()
    if len(sys.argv) == 3:
        check_live(*sys.argv[1:])
