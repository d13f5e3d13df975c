#!/usr/bin/env python3
"""Makes one Markdown page of what gpu_run.sh left in a folder: gpu_report.py OUT_DIR. Steps that are missing are left out."""
import json
import pathlib
import sys

out = pathlib.Path(sys.argv[1])


def load(name):
    """The JSON objects of a step: one, or one a line; none if the step failed."""
    try:
        text = (out / f"{name}.json").read_text()
        try:
            return [json.loads(text)]
        except json.JSONDecodeError:
            return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    except (OSError, json.JSONDecodeError):
        return []


def table(header, rows):
    if not rows:
        return
    print("\n| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")


def steps():
    print("# Treadle, tested and measured\n")
    for line in (out / "machine.txt").read_text().splitlines():
        print(f"- {line}")
    rows = [line.split("\t") for line in (out / "steps.tsv").read_text().splitlines()]
    table(["step", "result", "s"], [[n, "done" if c == "0" else "timeout" if c in ("124", "137") else c, s] for n, c, s in rows])


def kernels(name, title):
    for report in load(name):
        peaks = report["peaks"]
        print(f"\n## {title}\n\n{report['backend']}; ceilings: memory {peaks['read_gigabytes_per_second']:.0f} GB/s, "
              f"float {peaks['float_gigaops_per_second'] / 1e3:.1f} TFLOP/s, int8 {peaks['integer_gigaops_per_second'] / 1e3:.1f} TOP/s")
        table(["case", "us", "GB/s", "% of memory", "TFLOP/s", "% of peak"],
              [[r["name"], f"{1e6 * r['seconds']:.1f}", f"{r['gigabytes_per_second']:.0f}", f"{100 * r['bandwidth_share']:.0f}",
                f"{r['gigaops_per_second'] / 1e3:.2f}", f"{100 * r['compute_share']:.0f}"] for r in report["rows"]])
        return report
    return None


def formats(report):
    """How much faster a layer's products are than in bf16."""
    seconds = {}
    for row in report["rows"] if report else []:
        parts = row["name"].split("/")
        if len(parts) == 3 and parts[2].startswith("rows="):
            key = (parts[1], row["rows"])
            seconds[key] = seconds.get(key, 0) + row["seconds"]
    rows = sorted({r for _, r in seconds})
    names = dict.fromkeys(name for name, _ in seconds)
    table(["all products of a layer, times bf16", *[f"{r} rows" for r in rows]],
          [[name, *[f"{seconds['bf16', r] / seconds[name, r]:.2f}" if (name, r) in seconds and ("bf16", r) in seconds else ""
                    for r in rows]] for name in names])


def int8(report):
    """A layer's products of LLM.int8() beside what cuBLASLt makes of them."""
    measured = [r for r in report["rows"] if "library_seconds" in r] if report else []
    notes = report.get("notes", []) if report else []
    if not measured and not notes:
        return
    print("\n## LLM.int8() and cuBLASLt\n\ncuBLASLt int8 + dequantize: our own quantization of activations, cuBLASLt's product to "
          "int32, and a pass that makes floats of it; replayed from a graph, matrices of one input as one product. It takes no outliers "
          "out and so does less than LLM.int8() (bitsandbytes does more): the last column is what we reach at least.")
    lines = [[r["name"], r["seconds"], r["library_seconds"]] for r in measured]
    for count in sorted({r["rows"] for r in measured}):
        same = [r for r in measured if r["rows"] == count]
        lines.append([f"all of these, {count} rows", sum(r["seconds"] for r in same), sum(r["library_seconds"] for r in same)])
    table(["case", "us", "cuBLASLt int8 + dequantize us", "its time / ours"],
          [[name, f"{1e6 * own:.1f}", f"{1e6 * library:.1f}", f"{library / own:.2f}"] for name, own, library in lines])
    for note in notes:
        print(f"\n{note}")


def crossovers(report):
    """Microseconds of a layer's products on the kernels for few rows and on those for many, at rows around their crossover."""
    seconds = {}
    for row in report["rows"] if report else []:
        parts = row["name"].split("/")
        if len(parts) == 4 and parts[3] in ("few", "many"):
            key = (parts[1], parts[3], row["rows"])
            seconds[key] = seconds.get(key, 0) + row["seconds"]
    counts = sorted({rows for _, _, rows in seconds})
    lines = []
    for name in dict.fromkeys(name for name, _, _ in seconds):
        for kind in ("few", "many"):
            lines.append([name, kind, *[f"{1e6 * seconds[name, kind, r]:.0f}" for r in counts], ""])
        faster = [r for r in counts if seconds[name, "many", r] < 0.98 * seconds[name, "few", r]]
        lines[-1][-1] = f"from {faster[0]} rows on" if faster else "never"
    table(["all products of a layer, us", "kernels for", *[f"{r} rows" for r in counts], "many is faster"], lines)


def iterations(copy_gigabytes):
    """Decoding reads every weight but the embedding's (unless that is the head, too) once."""
    shape = (load("shapes") or [None])[0]
    unread = 0 if shape is None or shape["tied_head"] else 2 * shape["vocab"] * shape["hidden"]
    base, rows = {}, []
    for weights in ("bf16", "int8", "nf4", "bf16-late-launches", "bf16-carve-out", "bf16-deterministic", "bf16-alone"):
        for report in load(f"iteration_{weights}"):
            for r in report["rows"]:
                key = (r["batch_size"], r["prompt_tokens"])
                base.setdefault(key, r) if weights == "bf16" else None
                gigabytes = (report["weight_bytes"] - unread) / r["decode_iteration_seconds"] * 1e-9
                first = base.get(key)
                ratio = f"{r['decode_tokens_per_second'] / first['decode_tokens_per_second']:.2f}" if first else ""
                prefill = f"{r['prefill_tokens_per_second'] / first['prefill_tokens_per_second']:.2f}" if first else ""
                share = f"{100 * gigabytes / copy_gigabytes:.0f}" if copy_gigabytes else ""
                rows.append([weights, *key, f"{r['prefill_tokens_per_second']:.0f}", prefill, f"{r['decode_tokens_per_second']:.0f}", ratio,
                             f"{1e3 * r['decode_iteration_seconds']:.3f}", f"{1e6 * r['decode_gap_seconds']:.0f}", f"{gigabytes:.0f}", share])
    if rows:
        print("\n## Iterations")
    table(["weights", "batch", "prompt", "prefill tokens/s", "times bf16", "decode tokens/s", "times bf16", "decode iteration ms",
           "gap us", "weights GB/s", "% of memory"], rows)
    if any(row[0] == "bf16-alone" for row in rows):
        print("\nThe gap is what the host takes between two iterations. bf16-alone: each waits for the result of the one before. "
              "bf16-late-launches, bf16-carve-out: one setting of the environment each (gpu_run.sh).")


def peers():
    ours = {(r["batch_size"], r["prompt_tokens"]): r for report in load("iteration_bf16") for r in report["rows"]}
    rows = []
    for report in load("transformers"):
        for r in report["rows"]:
            own = ours.get((r["batch_size"], r["prompt_tokens"]))
            factors = [f"{own[key] / r[key]:.2f}" if own else "" for key in ("prefill_tokens_per_second", "decode_tokens_per_second")]
            rows.append([f"{report['backend']}, {report['mode']}", r["batch_size"], r["prompt_tokens"], f"{r['prefill_tokens_per_second']:.0f}",
                         factors[0], f"{r['decode_tokens_per_second']:.0f}", factors[1]])
    if rows:
        print("\n## Hugging Face transformers, bf16")
    table(["", "batch", "prompt", "prefill tokens/s", "Treadle, times that", "decode tokens/s", "Treadle, times that"], rows)


def serving():
    rows = [[r["label"], f"{r['request_rate']:g}", f"{r['request_throughput']:.2f}", f"{r['median_normalized_latency_ms']:.1f}",
             f"{r['median_ttft_ms']:.0f}", f"{r['p99_itl_ms']:.1f}", r["failed"]]
            for policy in ("fcfs", "request-level") for r in load(f"serve_{policy}")]
    if rows:
        print("\n## Serving")
    table(["policy", "offered/s", "served/s", "median normalized latency ms", "median TTFT ms", "p99 ITL ms", "failed"], rows)


steps()
layer = kernels("kernels_layer", "A layer's ops")
formats(layer)
crossovers(layer)
int8(layer)
iterations(layer["peaks"]["read_gigabytes_per_second"] if layer else 0)
peers()
serving()
answers = {where: answer["token_ids"] for where in ("cpu", "cuda") for answer in load(f"greedy_{where}")}
same = all(ids == answers["cpu"] for ids in answers.values()) if "cpu" in answers else True
if len(answers) > 1:
    print(f"\n## Greedy tokens\n\n{'The same' if same else '**Different**'} on {' and '.join(answers)}: {answers}")
kernels("kernels_ops", "Op cases")
sys.exit(0 if same else 1)
