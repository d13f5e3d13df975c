#!/usr/bin/env python3
"""What `serve --record` costs: two servers of one model, with and without it, take turns with the same load.

usage: bench/run_record.py MODEL [ROUNDS]

Prints tokens per second of each round, medians, and the servers' CPU time for a token, which other programs on the
machine disturb least.
"""
import concurrent.futures, json, os, statistics, subprocess, sys, tempfile, time, urllib.request

CLIENTS, TOKENS = 8, 256


def start(model, port, more):
    server = subprocess.Popen(["build/treadle", "serve", "--model", model, "--listen", "127.0.0.1:0", "--http-listen",
                               f"127.0.0.1:{port}", "--metrics-listen", "none", "--kv-memory", "512M", "--log-requests",
                               "off", *more], stderr=subprocess.DEVNULL)
    while True:
        try:
            return server, urllib.request.urlopen(f"http://127.0.0.1:{port}/ready").status
        except OSError:
            time.sleep(0.2)


def ask(port, number):
    name = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models"))["data"][0]["id"]
    body = {"model": name, "prompt": f"Once upon a time there were {number}", "max_tokens": TOKENS, "temperature": 1,
            "seed": number, "ignore_eos": True}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    answer = json.load(urllib.request.urlopen(request))
    assert answer["usage"]["completion_tokens"] == TOKENS, answer


def cpu_seconds(server):
    fields = open(f"/proc/{server.pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(server, port):
    before, began = cpu_seconds(server), time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(ask, [port] * CLIENTS, range(CLIENTS)))
    tokens = CLIENTS * TOKENS
    return tokens / (time.monotonic() - began), (cpu_seconds(server) - before) / tokens * 1e6


def main():
    model, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 11
    folder = tempfile.mkdtemp()
    servers = {"plain": (start(model, 18480, [])[0], 18480),
               "recorded": (start(model, 18481, ["--record", f"{folder}/recording"])[0], 18481)}
    found = {name: [] for name in servers}
    for number in range(rounds + 1):
        for name in sorted(servers, reverse=number % 2 == 1):
            measured = measure(*servers[name])
            if number > 0:  # the first warms up
                found[name].append(measured)
                print(f"{name:9} {measured[0]:7.1f} tokens/s, {measured[1]:7.1f} us of CPU per token", flush=True)
    for server, _ in servers.values():
        server.terminate()
        server.wait()
    medians = {name: [statistics.median(column) for column in zip(*rows)] for name, rows in found.items()}
    for name, (speed, cpu) in medians.items():
        print(f"median {name:9} {speed:7.1f} tokens/s, {cpu:7.1f} us of CPU per token")
    ratios = [recorded[0] / plain[0] for plain, recorded in zip(found["plain"], found["recorded"])]
    print(f"recorded against plain: {statistics.median(ratios):.4f} of the speed (median of rounds), "
          f"{medians['recorded'][1] / medians['plain'][1]:.4f} of the CPU time")
    size = os.path.getsize(f"{folder}/recording")
    print(f"recording: {size / (CLIENTS * TOKENS * (rounds + 1)):.0f} bytes per token")


main()
