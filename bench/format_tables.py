#!/usr/bin/env python3
"""Markdown and plots from what bench/run_format_tables.sh measured (plots need matplotlib).

    format_tables.py FOLDER

Reads FOLDER/{about.json,int8.jsonl,int8_planted.jsonl,kbit.jsonl,four_bits.jsonl}; writes FOLDER/DATE-formats.md and
FOLDER/DATE-formats-{int8,kbit,four-bits}.png.
"""
import json
import re
import sys

# Perplexities of the thesis: Table 2.1, 125M and 13B parameters; Table 5.2.
TABLE_2_1 = {
    "int8 absmax": (87.76, 19.08),
    "int8 zeropoint": (56.66, 13.94),
    "int8 absmax row-wise": (30.93, 16.49),
    "int8 absmax vector-wise": (35.84, 16.48),
    "int8 zeropoint vector-wise": (25.72, 13.47),
    "int8 absmax row-wise + decomposition": (30.76, 12.46),
    "absmax LLM.int8() (vector-wise + decomposition)": (25.83, 12.45),
    "zeropoint LLM.int8() (vector-wise + decomposition)": (25.69, 12.45),
}
TABLE_5_2 = {"kbit-int4:64": 34.34, "kbit-float4e2:64": 31.07, "kbit-float4e3:64": 29.48, "nf4-dq": 27.41}
FOUR_BITS = {
    "kbit-int4:64": "Int4 (15 levels)",
    "kbit-float4e2:64": "Float4 E2M1",
    "kbit-float4e3:64": "Float4 E3M0",
    "fp4": "FP4 (bitsandbytes)",
    "nf4": "NF4",
    "nf4-dq": "NF4 + double quantization",
}


def read(folder, name):
    with open(f"{folder}/{name}.jsonl") as file:
        return [json.loads(line) for line in file if line.strip()]


def number(value):
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 100 else f"{value:.0f}"


def quality(row):
    return f"{number(row['mean_kl'])} ± {row['kl_error']:.1g} | {100 * row['argmax_equal']:.1f} % | {number(row['perplexity'])}"


def kbit(row):
    """(type, bits, block) of a row's format."""
    kind, bits, block = re.fullmatch(r"kbit-([a-z]+)(\d)(?:e\d)?:(\w+)", row["weights"]).groups()
    return kind, int(bits), block


def total_megabits(row):
    return row["bits_per_weight"] * row["converted_weights"] / 1e6


def claims(title, rows):
    """rows: (what the thesis has, whether it is so here)."""
    lines = [f"{title}", ""]
    return lines + [f"- {'as in the thesis' if holds else '**not as in the thesis**'}: {what}" for what, holds in rows] + [""]


def int8_section(plain, planted):
    lines = [
        "## (a) LLM.int8(): Table 2.1", "",
        "8-bit weights and activations of the layers' matrices; head and embedding as they are. *Simulated* rows round both to what the way can",
        "represent and multiply in 32 bits (`bench/quality/int8_simulation.h`); the others are the product's `--weights int8`. *Planted*: in each norm, the",
        f"weights of 6 features times {planted[0]['planted_factor']:g}, and the columns that read them divided by it: the same function, bit for bit in",
        "`exact`, with outlier features in every layer. That makes those columns small in rows whose scale stays, which a trained model's need not be: ways with",
        "8-bit weights for outlier columns (bitsandbytes' and the product's) pay for it, the thesis' 16-bit ones do not. A call is 512 tokens.",
        "Thesis: perplexity on C4 at 125M and 13B parameters.",
        "", "| way | KL | argmax equal | perplexity | planted: KL | argmax equal | perplexity | thesis 125M / 13B |", "|---|---|---|---|---|---|---|---|",
        f"| 32-bit, as stored | 0 | 100 % | {number(plain[0]['perplexity_exact'])} | 0 | 100 % | {number(planted[0]['perplexity_exact'])} | 25.65 / 12.45 |",
    ]
    for row, other in zip(plain, planted):
        theirs = TABLE_2_1.get(row["name"])
        name = row["name"] + (" (simulated)" if row["simulated"] else "")
        lines.append(f"| {name} | {quality(row)} | {quality(other)} | {'%.2f / %.2f' % theirs if theirs else ''} |")
    kl, outlier = ({row["name"]: row["mean_kl"] for row in rows} for rows in (plain, planted))
    absmax, rowwise, vector = "int8 absmax", "int8 absmax row-wise", "int8 absmax vector-wise"
    full, zero = list(TABLE_2_1)[6], list(TABLE_2_1)[7]
    return lines + [""] + claims("What the thesis finds:", [
        ("a constant per tensor is worst, zeropoint or not",
         min(kl[absmax], kl["int8 zeropoint"]) > max(kl[rowwise], kl[vector])),
        ("zeropoint beats absmax without decomposition (tensor and vector-wise)",
         kl["int8 zeropoint"] < kl[absmax] and kl["int8 zeropoint vector-wise"] < kl[vector]),
        ("vector-wise beats row-wise (from 1.3B on; at 125M it does not)", kl[vector] < kl[rowwise]),
        ("decomposition helps row-wise and vector-wise", kl[rowwise + " + decomposition"] < kl[rowwise] and kl[full] < kl[vector]),
        ("with outlier features, every way without decomposition diverges at least 5 times as much as LLM.int8()",
         5 * outlier[full] < min(outlier[name] for name in list(TABLE_2_1)[:5])),
        ("outlier features cost LLM.int8() nothing (less than half more KL)", outlier[full] < 1.5 * kl[full]),
        ("with decomposition, zeropoint has no advantage left (within a factor of 1.5)", outlier[full] < 1.5 * outlier[zero]),
    ])


def kbit_section(rows):
    lines = [
        "## (b) k-bit inference: KL against total bits", "",
        "Weights only, 16-bit constants, activations and head as they are. Exponent bits of the float type: 2 up to 5 bits, 3 from 6 on.",
        "Bits are those of the converted matrices, constants included.", "",
        "| type | bits | block | bits per weight | total Mbit | KL | argmax equal | perplexity |", "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        kind, bits, block = kbit(row)
        lines.append(f"| {kind} | {bits} | {block} | {row['bits_per_weight']:.3f} | {total_megabits(row):.0f} | {quality(row)} |")
    kl = {kbit(row): row["mean_kl"] for row in rows}
    swept = sorted({key[:2] for key in kl if key[2] == "tensor"})
    statements = [("at 4 bits, float and quantile beat int and dynamic",
                   max(kl["float", 4, "64"], kl["quantile", 4, "64"]) < min(kl["int", 4, "64"], kl["dynamic", 4, "64"])),
                  ("at 4 bits, quantile is best", kl["quantile", 4, "64"] == min(v for (_, b, s), v in kl.items() if (b, s) == (4, "64"))),
                  ("at 5 bits, int beats float", kl["int", 5, "64"] < kl["float", 5, "64"])]
    if swept:
        statements.append(("smaller blocks are better, for every type and width that was swept",
                           all(kl[k, b, "64"] < kl[k, b, "256"] < kl[k, b, "1024"] < kl[k, b, "tensor"] for k, b in swept)))
        gain = {b: kl["float", b, "1024"] / kl["float", b, "64"] for b in (3, 4, 5)}
        statements.append((f"blocks of 64 instead of 1024 divide KL (float type: by {gain[3]:.2f}, {gain[4]:.2f}, {gain[5]:.2f} at 3, 4, 5 bits)",
                           all(value > 1 for value in gain.values())))
    return lines + [""] + claims("What the thesis finds:", statements)


def four_bits_section(rows):
    lines = [
        "## (c) QLoRA: Table 5.2", "", "Weights only, blocks of 64. Thesis: mean perplexity on Pile Common Crawl, models of 125M to 13B.", "",
        "| type | bits per weight | KL | argmax equal | perplexity | thesis |", "|---|---|---|---|---|---|",
        f"| 32-bit, as stored | 32 | 0 | 100 % | {number(rows[0]['perplexity_exact'])} | |",
    ]
    for row in rows:
        theirs = TABLE_5_2.get(row["weights"])
        lines.append(f"| {FOUR_BITS[row['weights']]} | {row['bits_per_weight']:.3f} | {quality(row)} | {theirs or ''} |")
    kl = {row["weights"]: row["mean_kl"] for row in rows}
    error = {row["weights"]: row["kl_error"] for row in rows}
    return lines + [""] + claims("What the thesis finds:", [
        ("NF4 with double quantization is best of the four of Table 5.2", kl["nf4-dq"] == min(kl[name] for name in TABLE_5_2)),
        ("double quantization costs nothing (within two standard errors)", abs(kl["nf4-dq"] - kl["nf4"]) < 2 * error["nf4"]),
        ("E2M1 beats Int4", kl["kbit-float4e2:64"] < kl["kbit-int4:64"]),
        ("E3M0 beats E2M1", kl["kbit-float4e3:64"] < kl["kbit-float4e2:64"]),
    ])


def header(about, positions):
    return [
        f"# Number formats: the thesis' tables on {about['model']}, {about['date']}", "",
        f"`bench/run_format_tables.sh` with {about['treadle']} on {about['cpus']} CPUs of an {about['processor']}; {about['seconds']} s.",
        f"Model sha256 `{about['model_sha256']}`.", f"Text: {about['text']} (`bench/fetch_text.sh`), sha256 `{about['text_sha256']}`.", "",
        f"The model's weights as stored, decoded to 32 bits, stand in for an unquantized model. KL: mean Kullback-Leibler divergence of next-token",
        f"distributions from that reference, nats, over {positions} positions (windows of 512), ± its standard error. Perplexity: the same tokens.",
        "As the stored weights were quantized once already, small differences between types of 4 bits and more mean little.", "",
    ]


def plots(prefix, plain, planted, rows, four):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(10, 5))
    at = range(len(plain))
    axis.barh([y + 0.2 for y in at], [r["mean_kl"] for r in plain], 0.4, label="as stored")
    axis.barh([y - 0.2 for y in at], [r["mean_kl"] for r in planted], 0.4, label="planted outlier features")
    axis.set(xscale="log", xlabel="mean KL from 32 bits, nats", title="8-bit weights and activations (LLM.int8(), Table 2.1)")
    axis.set_yticks(list(at), [r["name"] for r in plain], fontsize=8)
    axis.invert_yaxis()
    axis.legend()
    axis.grid(alpha=0.3, axis="x")
    figure.tight_layout()
    figure.savefig(f"{prefix}-int8.png", dpi=130)

    figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True)
    points = {kbit(r): (total_megabits(r), r["mean_kl"]) for r in rows}
    for kind, style in (("int", "s-"), ("float", "o-"), ("dynamic", "^-"), ("quantile", "d-")):
        line = [points[key] for key in sorted(points) if key[0] == kind and key[2] == "64"]
        axes[0].plot(*zip(*line), style, label=kind)
    order = ["64", "256", "1024", "tensor"]
    for kind, color in (("int", "C0"), ("float", "C1"), ("quantile", "C3")):
        for bits, style in ((3, "s:"), (4, "o-"), (5, "^--")):
            line = [points[kind, bits, block] for block in order if (kind, bits, block) in points]
            axes[1].plot(*zip(*line), style, color=color, label=f"{kind}, {bits} bits")
    axes[0].set(title="data types, 3 to 8 bits, blocks of 64", ylabel="mean KL from 32 bits, nats", yscale="log")
    axes[1].set(title="block sizes: tensor, 1024, 256, 64 (left to right)")
    for axis in axes:
        axis.set_xlabel("total bits of the converted matrices, Mbit")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(f"{prefix}-kbit.png", dpi=130)

    figure, axis = plt.subplots(figsize=(8, 4))
    axis.bar([FOUR_BITS[r["weights"]] for r in four], [r["mean_kl"] for r in four], yerr=[2 * r["kl_error"] for r in four], capsize=4)
    axis.set(ylabel="mean KL from 32 bits, nats", title="4-bit types, blocks of 64 (QLoRA, Table 5.2)")
    axis.tick_params(axis="x", labelsize=7)
    axis.grid(alpha=0.3, axis="y")
    figure.tight_layout()
    figure.savefig(f"{prefix}-four-bits.png", dpi=130)


def main(folder):
    with open(f"{folder}/about.json") as file:
        about = json.load(file)
    plain, planted, rows, four = (read(folder, name) for name in ("int8", "int8_planted", "kbit", "four_bits"))
    prefix = f"{folder}/{about['date']}-formats"
    counts = [table[0]["positions"] for table in (plain, rows, four)]
    positions = counts[0] if len(set(counts)) == 1 else "{} (a), {} (b), {} (c)".format(*counts)
    lines = header(about, positions) + int8_section(plain, planted) + kbit_section(rows) + four_bits_section(four)
    names = ["int8", "kbit", "four-bits"]
    try:
        plots(prefix, plain, planted, rows, four)
        lines += ["Plots: " + ", ".join(f"[{name}]({about['date']}-formats-{name}.png)" for name in names) + "."]
    except ImportError:
        print("matplotlib is not installed: no plots")
    with open(f"{prefix}.md", "w") as file:
        file.write("\n".join(lines) + "\n")
    print(f"Wrote {prefix}.md")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
