#!/usr/bin/env python3
"""Draws ORCA's figures from benchmark results (needs matplotlib).

    plot.py figure9  OUT.png RESULT.json [RESULT.json ...]
    plot.py figure10 OUT.png RESULTS.jsonl [RESULTS.jsonl ...]
    plot.py simulated OUT.png FIGURE.jsonl [FIGURE.jsonl ...]

figure9:  JSON of `treadle bench iteration --json`; execution time of a batch against its size, one bar group per
          prompt length (section 6.1).
figure10: JSON lines of `treadle bench serve --json`; median normalized latency against throughput, one curve per
          label (policy, max_batch_size, or a peer) (section 6.2).
simulated: JSON lines of `treadle simulate --figure NAME --json`, a panel a figure: both systems as the paper draws them.
"""
import collections
import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def figure9(out, files):
    rows = [row for name in files for row in json.load(open(name))["rows"]]
    prompts = sorted({row["prompt_tokens"] for row in rows})
    sizes = sorted({row["batch_size"] for row in rows})
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    width = 0.8 / len(prompts)
    for i, prompt in enumerate(prompts):
        mine = {row["batch_size"]: row for row in rows if row["prompt_tokens"] == prompt}
        at = [x + (i - (len(prompts) - 1) / 2) * width for x in range(len(sizes))]
        label = f"{prompt} prompt tokens"
        axes[0].bar(at, [mine[s]["total_seconds"] * 1e3 if s in mine else 0 for s in sizes], width, label=label)
        axes[1].plot(sizes, [mine[s]["decode_tokens_per_second"] if s in mine else None for s in sizes], "o-", label=label)
    new = rows[0]["new_tokens"]
    axes[0].set(xticks=range(len(sizes)), xticklabels=sizes, xlabel="batch size", ylabel="execution time, ms",
                title=f"One batch, {new} tokens generated")
    axes[1].set(xlabel="batch size", ylabel="tokens/s, all sequences", title="Increment phase", xscale="log")
    axes[1].set_xticks(sizes, [str(s) for s in sizes])
    axes[1].set_ylim(bottom=0)
    for axis in axes:
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=130)


def what_ran(result):
    """What a line of `bench serve --json` says of its requests."""
    if "trace" in result:
        requests = result["trace"]
    else:
        arrivals = "Poisson" if result["burstiness"] == 1 else f"gamma ({result['burstiness']})"
        requests = f"input {result['input_len']}, output {result['output_len']}, {arrivals} arrivals"
    return f"{result['num_prompts']} requests: {requests}, end of sequence {result['end_of_sequence']}"


def figure10(out, files):
    curves = collections.defaultdict(list)
    requests = set()
    for name in files:
        for line in open(name):
            if line.strip():
                result = json.loads(line)
                requests.add(what_ran(result))
                curves[result["label"]].append((result["request_throughput"], result["median_normalized_latency_ms"]))
    figure, axis = plt.subplots(figsize=(8, 5))
    for label, points in sorted(curves.items()):
        points.sort()
        style = "s--" if label.startswith("request-level") else "^:" if not label.startswith("fcfs") else "o-"
        axis.plot([p[0] for p in points], [p[1] for p in points], style, label=label)
    axis.set(xlabel="throughput, requests/s", ylabel="median normalized latency, ms/token", yscale="log",
             title="\n".join(sorted(requests)))
    axis.legend()
    axis.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(out, dpi=130)


def simulated(out, files):
    panels = collections.defaultdict(lambda: collections.defaultdict(list))
    for name in files:
        for line in open(name):
            point = json.loads(line)
            panels[point["figure"]][point["label"]].append(point)
    columns = min(2, len(panels))
    figure, axes = plt.subplots(-(-len(panels) // columns), columns, figsize=(6.5 * columns, 4 * -(-len(panels) // columns)), squeeze=False)
    for axis in list(axes.flat)[len(panels):]:
        axis.remove()
    for axis, (title, curves) in zip(axes.flat, panels.items()):
        if title.startswith("Figure 9"):
            sizes = sorted({point["x"] for points in curves.values() for point in points})
            for i, (label, points) in enumerate(curves.items()):
                at = [sizes.index(point["x"]) + (i - (len(curves) - 1) / 2) * 0.2 for point in points]
                axis.bar(at, [point["latency_ms"] for point in points], 0.2, label=label)
            axis.set(xticks=range(len(sizes)), xticklabels=[f"{size:g}" for size in sizes], xlabel="batch size",
                     ylabel="execution time, ms (none: out of memory)", title=title)
        else:
            for label, points in curves.items():
                axis.plot([point["request_throughput"] for point in points], [point["latency_ms"] for point in points],
                          "o-" if label.startswith("orca") else "^:", markersize=4, label=label)
            what = "median latency, ms" if title.startswith("Figure 11") else "median normalized latency, ms/token"
            axis.set(xlabel="throughput, requests/s", ylabel=what, xscale="log", yscale="log", title=title)
        axis.legend(fontsize=7, ncols=2)
        axis.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    commands = {"figure9": figure9, "figure10": figure10, "simulated": simulated}
    if len(sys.argv) < 4 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](sys.argv[2], sys.argv[3:])
