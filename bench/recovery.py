#!/usr/bin/env python3
"""Tokens a second of one stream while workers are killed at random, as Petals' Table 1 has it (Borzunov et al. 2023,
section 4.1): after each token every stage fails with the same probability. All answers must have the same tokens.
  restart    killed; the request ends with the worker, and the client asks again from the beginning
  recompute  crashed (SIGSEGV), and no replay logs: the stages up to the lost one run what was known again
  replay     crashed: the lost stage alone does
  keep       killed: its successor finds its K/V where it left them
Usage: recovery.py BINARY MODEL [--stages 4] [--tokens 128] [--rates 0,1e-4,1e-3,1e-2] [--answers 3] [--most 300]"""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import time

MODES = {"restart": (signal.SIGKILL, ["--on-worker-loss", "restart"]),
         "recompute": (signal.SIGSEGV, ["--replay-log-memory", "0"]),
         "replay": (signal.SIGSEGV, []),
         "keep": (signal.SIGKILL, [])}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    def __init__(self, asked, mode):
        self.port, self.signal = free_port(), MODES[mode][0]
        self.process = subprocess.Popen(
            [asked.binary, "serve", "--model", asked.model, "--pipeline-parallel", str(asked.stages), "--listen",
             f"127.0.0.1:{free_port()}", "--http-listen", f"127.0.0.1:{self.port}", "--metrics-listen", "none",
             "--log-level", "error", *MODES[mode][1]], stderr=subprocess.DEVNULL)

    def workers(self):
        lists = pathlib.Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for children in lists for pid in children.read_text().split()]

    def stop(self):
        self.process.terminate()
        self.process.wait(60)

    def tokens(self, count):
        """Ids of one answer as they come; raises where the stream breaks."""
        body = json.dumps({"prompt": list(range(100, 116)), "max_tokens": count, "temperature": 0, "ignore_eos": True,
                           "stream": True, "return_token_ids": True})
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("POST", "/v1/completions", body)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ConnectionError(answer.read())
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ConnectionError(event["error"])
                for choice in event["choices"]:
                    yield from choice.get("token_ids") or []


def answer(server, asked, rate, draws, until):
    """An answer's ids, how many workers were killed, and the longest pause; None if it took too long."""
    kills, pause = 0, 0
    while True:
        ids, last = [], time.monotonic()
        try:
            for token in server.tokens(asked.tokens):
                pause, last = max(pause, time.monotonic() - last), time.monotonic()
                ids.append(token)
                if last > until:
                    return None
                for _ in range(asked.stages):
                    if draws.random() < rate and (workers := server.workers()):
                        kills += 1
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(draws.choice(workers), server.signal)
            if len(ids) == asked.tokens:
                return ids, kills, pause
        except (OSError, http.client.HTTPException):
            pass
        if time.monotonic() > until:
            return None
        time.sleep(0.02)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("binary")
    parser.add_argument("model")
    for name, default in (("stages", 4), ("tokens", 128), ("answers", 3), ("most", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rates", default="0,1e-4,1e-3,1e-2")
    parser.add_argument("--modes", default=",".join(MODES))
    asked = parser.parse_args()
    right = None
    for rate in map(float, asked.rates.split(",")):
        for mode in asked.modes.split(","):
            server = Server(asked, mode)
            draws, speeds, kills, pause = random.Random(1), [], 0, 0
            try:
                warm = answer(server, asked, 0, draws, time.monotonic() + 60)
                right = right or warm[0]
                for _ in range(asked.answers):
                    began = time.monotonic()
                    done = answer(server, asked, rate, draws, began + asked.most)
                    if done is None:
                        break
                    if done[0] != right:
                        sys.exit(f"{mode} at {rate}: other tokens than undisturbed")
                    speeds.append(asked.tokens / (time.monotonic() - began))
                    kills, pause = kills + done[1], max(pause, done[2])
            finally:
                server.stop()
            speed = f"{statistics.harmonic_mean(speeds):.1f}" if speeds else "-"
            print(f"| {mode} | {asked.tokens} | {rate:g} | {speed} | {kills} | {pause:.2f} |", flush=True)


if __name__ == "__main__":
    main()
