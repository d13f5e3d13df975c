#!/usr/bin/env python3
"""Checks by hand the .gguf files that `treadle quantize` makes of a Hugging Face folder, with the programs that
they are for.

Run from the repository's root with torch (CPU), transformers, safetensors and gguf installed:

    tests/oracles/check_written_gguf.py build/treadle FOLDER [--perplexity LLAMA_PERPLEXITY TEXT] [--chunks 20]

FOLDER is a Llama or a Qwen in floats with a tokenizer. Checked: every tensor as the gguf package dequantizes it against the
folder's own (rows of Q and K in GGUF's order, exactly for f32 and f16, within half a step for q8_0, q4_0 and q4_1);
the tokenizer's pieces and merges; with --perplexity, llama.cpp's perplexity on TEXT against Treadle's by the same
protocol, for each format.
"""
import argparse
import json
import pathlib
import re
import subprocess
import tempfile

import gguf
import numpy as np
import torch
import transformers

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
STEPS = {"q8_0": 127, "q4_0": 8, "q4_1": 15}  # of a block of 32, from 0 (or the least) to the largest magnitude


def gguf_name(name):
    layer = re.match(r"model\.layers\.(\d+)\.(.*)\.(\w+)$", name)
    if layer:
        return f"blk.{layer[1]}.{NAMES[layer[2]]}.{layer[3]}"
    stem, suffix = name.rsplit(".", 1)
    return f"{NAMES[stem]}.{suffix}"


def interleaved(weight, heads):
    """Halves of a head's rows to pairs side by side."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def expected_tensors(model):
    config = model.config
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        llama = config.model_type == "llama"
        if llama and "q_proj" in name:
            values = interleaved(values, config.num_attention_heads)
        if llama and "k_proj" in name:
            values = interleaved(values, config.num_key_value_heads)
        tensors[gguf_name(name)] = values
    return tensors


def half_steps(values, spec):
    """What rounding may change each value by: half a step of its block, and the rounding of constants to 16 bits."""
    blocks = values.reshape(-1, 32).astype(np.float64)
    reach = blocks.max(1) - blocks.min(1) if spec == "q4_1" else np.abs(blocks).max(1)
    # q4_0 reaches 8 steps to one side and 7 to the other: the far end is off by up to a whole one.
    width = 1.0 if spec == "q4_0" else 0.5
    tolerance = reach * (width / STEPS[spec] + 2**-10) + 2 * np.abs(blocks).max(1) * 2**-11
    return np.repeat(tolerance, 32).reshape(values.shape)


def check_tensors(reader, expected, spec):
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, values in expected.items():
        tensor = found[name]
        mine = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
        kind = tensor.tensor_type.name.lower()
        assert kind == ("f32" if values.ndim == 1 else spec if name not in ("token_embd.weight", "output.weight") else kind)
        if kind in STEPS:
            assert (np.abs(mine - values) <= half_steps(values, kind)).all(), name
        else:
            assert np.array_equal(mine, values.astype(np.float16).astype(np.float32) if kind == "f16" else values), name


def field(reader, key):
    return reader.fields[key].contents()


def check_tokenizer(reader, folder):
    data = json.load(open(folder / "tokenizer.json"))
    tokens = field(reader, "tokenizer.ggml.tokens")
    pieces = dict(data["model"]["vocab"]) | {token["content"]: token["id"] for token in data["added_tokens"]}
    assert all(tokens[i] == text for text, i in pieces.items())
    if "tokenizer.ggml.merges" in reader.fields:
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]]
        assert field(reader, "tokenizer.ggml.merges") == merges


def perplexities(binary, llama, text, path, chunks):
    mine = json.loads(subprocess.run([binary, "perplexity", path, "--text", text, "--protocol", "llama.cpp", "--json",
                                      "--max-tokens", str(512 * chunks)], check=True, capture_output=True, text=True).stdout)
    theirs = subprocess.run([llama, "-m", path, "-f", text, "-c", "512", "--chunks", str(chunks)], check=True,
                            capture_output=True, text=True)
    estimate = re.search(r"Final estimate: PPL = ([\d.]+)", theirs.stdout + theirs.stderr)
    return mine["perplexity"], float(estimate[1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--perplexity", nargs=2, metavar=("LLAMA_PERPLEXITY", "TEXT"))
    parser.add_argument("--chunks", type=int, default=20)
    options = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    expected = expected_tensors(model)
    with tempfile.TemporaryDirectory() as scratch:
        for spec in ("f32", "f16", "q8_0", "q4_0", "q4_1"):
            path = f"{scratch}/{spec}.gguf"
            subprocess.run([options.binary, "quantize", options.folder, path, "--weights", spec], check=True)
            reader = gguf.GGUFReader(path)
            check_tensors(reader, expected, spec)
            check_tokenizer(reader, options.folder)
            line = f"{spec}: {len(expected)} tensors and the tokenizer are right"
            if options.perplexity:
                mine, theirs = perplexities(options.binary, *options.perplexity, path, options.chunks)
                line += f"; perplexity {mine:.4f}, llama.cpp's {theirs:.4f} ({100 * (mine / theirs - 1):+.3f} %)"
                assert abs(mine / theirs - 1) < 0.005
            print(line)
            pathlib.Path(path).unlink()


if __name__ == "__main__":
    main()
