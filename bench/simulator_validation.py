#!/usr/bin/env python3
"""Holds what `treadle simulate` foretells of this machine against what a server does.

usage: bench/simulator_validation.py MODEL [--rates 0.5,1,...] [--rounds N] [--num-prompts N] [--out FOLDER] [--treadle PROGRAM]

Two servers of MODEL take turns at ORCA's trace, the idle one asleep: one whose ledger the cost of iterations is fitted
to, and one whose requests, of other seeds, are foretold. Turns are short because a shared machine's speed changes by the
minute. Prints two tables of means over the rounds: as foretold, and with the machine's speed in each turn known (the
time that its iterations took in all), which is what the simulator itself answers for.
"""
import argparse, collections, json, pathlib, socket, statistics, subprocess

KEYS = ["request_throughput", "median_normalized_latency_ms", "p99_normalized_latency_ms", "median_ttft_ms", "p99_ttft_ms"]
LIMITS = ["--max-context", "1024", "--max-batch-size", "32", "--max-batch-tokens", "512"]
TRACE = ["--input-len", "32:512", "--output-len", "1:128", "--json"]


def free_port():
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Machine:
    def __init__(self, options):
        self.options = options
        self.ledgers = [options.out / f"ledger{i}.jsonl" for i in range(2)]

    def serve(self):
        """The reports of the second server's turns."""
        options, ports, servers, reports = self.options, [free_port(), free_port()], [], []
        for port, ledger in zip(ports, self.ledgers):
            ledger.unlink(missing_ok=True)
            servers.append(subprocess.Popen(
                [options.treadle, "serve", "--model", options.model, "--listen", f"127.0.0.1:{port}", "--http-listen", "none",
                 "--metrics-listen", "none", "--speculate", "off", "--prefix-cache", "off", "--ledger-file", str(ledger), *LIMITS],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        for round in range(options.rounds):
            for rate in options.rates:
                for turn, port in enumerate(ports):
                    reports.append(self.run("bench", "serve", "--target", f"127.0.0.1:{port}", "--wait-ready", "60", "--request-rate", rate,
                                            "--seed", str(1000 * (1 - turn) + round + 1)))
        for server in servers:
            server.terminate()
            server.wait()
        return reports[1::2]

    def simulate(self, seed, rate):
        return self.run("simulate", "--model", self.options.model, "--ledger", str(self.ledgers[0]), "--seed", str(seed), "--request-rate",
                        str(rate), *LIMITS)

    def run(self, *words):
        command = [self.options.treadle, *words, "--num-prompts", str(self.options.num_prompts), *TRACE]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def seconds_at_work(self):
        """Of the second server's iterations in each turn."""
        turns, arrived = [], self.options.num_prompts
        for record in lines(self.ledgers[1]):
            arrivals = [each for each in record["arrivals"] if each["request"] != 1]  # the server's own
            if arrivals and arrived + len(arrivals) > self.options.num_prompts:
                turns.append(0)
                arrived = 0
            arrived += len(arrivals)
            if turns:
                turns[-1] += sum(record[part] for part in ("receive", "compute", "sample", "bubble"))
        return turns


def table(title, cells):
    print(f"{title}:\n\n| offered/s | {' | '.join(key.replace('_', ' ') for key in KEYS)} |\n|{'---|' * (len(KEYS) + 1)}")
    for rate, found in cells.items():
        row = []
        for key in KEYS:
            said, was = (statistics.mean(values) for values in zip(*found[key]))
            row.append(f"{said:.4g} for {was:.4g} ({100 * (said / was - 1):+.0f} %)")
        print(f"| {rate} | {' | '.join(row)} |")
    print()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rates", default="0.5,1,1.5,2,3", type=lambda text: text.split(","))
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--num-prompts", default=30, type=int)
    parser.add_argument("--out", default=pathlib.Path("build/simulator_validation"), type=pathlib.Path)
    parser.add_argument("--treadle", default="build/treadle")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    machine = Machine(options)
    foretold, at_speed = (collections.defaultdict(lambda: collections.defaultdict(list)) for _ in range(2))
    speeds = []
    served = machine.serve()
    for run, seconds in zip(served, machine.seconds_at_work()):
        rate, seed, slower = run["request_rate"], run["seed"], 1.0
        same = plain = machine.simulate(seed, rate)
        # A machine that is slower by a factor is one that gets its requests so much faster, and counts longer seconds.
        for _ in range(3):
            slower = seconds / (same["busy"] * same["duration"])
            same = machine.simulate(seed, float(rate) * slower)
        speeds.append(slower)
        for key in KEYS:
            foretold[rate][key].append((plain[key], run[key]))
            at_speed[rate][key].append((same[key] / slower if key == "request_throughput" else same[key] * slower, run[key]))
    table(f"As foretold, means of {options.rounds} turns", foretold)
    table("With the machine's speed in each turn known", at_speed)
    print(f"Its iterations took {min(speeds):.2f} to {max(speeds):.2f} times as long as those that the cost was fitted to.")


if __name__ == "__main__":
    main()
