#!/usr/bin/env python3
"""Says whether something became slower: a minute of fixed benchmarks on one thread, each as a ratio to what a loop that
only calculates, or only reads, reaches on this machine at the same time.

usage: bench/check.py [--write] [--rounds N] [--expected FOLDER] [--treadle PROGRAM] [--treadle-bench PROGRAM]

Ratios are compared with FOLDER/ISA.json (bench/expected), the committed ones of this instruction set: one that falls by
more than 15 % is named, and the exit code is 1. --write makes that file anew: do so on a quiet machine, and say in the
change why. Of several rounds the best time counts, on both sides of a ratio: others on the machine only take time away.
For the same reason what seems slower is measured for up to three times as many rounds.
"""
import argparse, json, pathlib, re, subprocess, sys

FALL = 0.15
MODEL = "smollm2-135m,layers=4"
ITERATION = ["bench", "iteration", "--random-model", MODEL, "--threads", "1", "--prompt-tokens", "128", "--new-tokens",
             "16", "--batch-sizes", "1,8", "--repeats", "1", "--json", "--weights"]
SCHEDULER = ["scheduler", "--running", "32", "--waiting", "64", "--iterations", "2000", "--repeats", "3", "--json"]
PEAKS = ["kernels", "--filter", "rms_norm", "--threads", "1", "--seconds-per-case", "0.001", "--json"]
WEIGHTS = ("bf16", "int8", "q8_0", "q4_0", "nf4")


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def measure(options):
    """One round: what the machine reaches, and by name what is to be divided by which of it."""
    ceilings = run([options.treadle_bench, *PEAKS])
    peaks = {"calculates": ceilings["peaks"]["float_gigaops_per_second"],
             "reads": ceilings["peaks"]["read_gigabytes_per_second"]}
    found = {}
    for weights in WEIGHTS:
        one, eight = run([options.treadle, *ITERATION, weights])["rows"]
        found[f"{weights}: prompt tokens/s"] = (one["prefill_tokens_per_second"], "calculates")
        found[f"{weights}: new tokens/s, one sequence"] = (one["decode_tokens_per_second"], "reads")
        found[f"{weights}: new tokens/s, eight sequences"] = (eight["decode_tokens_per_second"], "calculates")
    scheduler = run([options.treadle_bench, *SCHEDULER])
    found["scheduler: iterations/s"] = (1e6 / scheduler["iterations"][0]["microseconds_per_iteration"], "calculates")
    found["prefix cache: lookups/s"] = (1e6 / scheduler["prefix_cache"]["microseconds_found"], "calculates")
    return ceilings["backend"], peaks, found


def slower_than(committed, now):
    return [name for name, expected in committed.items() if now.get(name, 0) < expected * (1 - FALL)]


def processor():
    text = pathlib.Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return model[1] if model else "unknown"


def main():
    parser = argparse.ArgumentParser()
    here = pathlib.Path(__file__).resolve().parent
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--expected", type=pathlib.Path, default=here / "expected")
    parser.add_argument("--treadle", default=str(here.parent / "build/treadle"))
    parser.add_argument("--treadle-bench", default=str(here.parent / "build/treadle-bench"))
    options = parser.parse_args()
    committed, ratios, path = {"ratios": {}}, {}, None
    peaks, best, kinds = {}, {}, {}
    for number in range(3 * options.rounds):
        backend, reached, found = measure(options)
        for name, value in reached.items():
            peaks[name] = max(peaks.get(name, 0), value)
        for name, (value, kind) in found.items():
            best[name], kinds[name] = max(best.get(name, 0), value), kind
        ratios = {name: best[name] / peaks[kinds[name]] for name in best}
        path = options.expected / f"{backend.removeprefix('cpu ').split(',')[0]}.json"
        if not options.write and not path.exists():
            sys.exit(f"{path} is missing: nothing is committed for this instruction set; --write makes it")
        committed = json.loads(path.read_text()) if path.exists() else committed
        if number + 1 >= options.rounds and (options.write or not slower_than(committed["ratios"], ratios)):
            break
    if options.write:
        path.parent.mkdir(parents=True, exist_ok=True)
        rounded = {name: float(f"{ratio:.4g}") for name, ratio in ratios.items()}
        path.write_text(json.dumps({"processor": processor(), "ratios": rounded}, indent=1) + "\n")
        print(f"wrote {path}")
        return
    if committed["processor"] != processor():
        print(f"measured on {processor()}, committed on {committed['processor']}: ratios may differ")
    slower = slower_than(committed["ratios"], ratios)
    print(f"{'':44} {'committed':>10} {'now':>10}")
    for name, expected in committed["ratios"].items():
        now = ratios.get(name, 0)
        print(f"{name:44} {expected:10.4g} {now:10.4g} {now / expected - 1:+7.1%}{'  SLOWER' if name in slower else ''}")
    for name in ratios.keys() - committed["ratios"].keys():
        print(f"{name}: nothing is committed for it; --write adds it")
    if slower:
        sys.exit(f"{len(slower)} of {len(committed['ratios'])} fell by more than {FALL:.0%}: {', '.join(slower)}")
    print(f"all within {FALL:.0%}")


if __name__ == "__main__":
    main()
