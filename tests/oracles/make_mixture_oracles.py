#!/usr/bin/env python3
"""Writes tests/testdata/mixture_oracles.json: the type that llama-quantize gives each matrix of small
Llamas, by mixture: {"MIXTURE": {"LAYERS HEADS KV_HEADS HIDDEN TIED": [types]}}, where the types are those
of the embedding and the head ("" without one), then in a line for each layer those of ORDER.

Needs: numpy, gguf, llama.cpp's llama-quantize.  Usage: make_mixture_oracles.py LLAMA_QUANTIZE [OUTPUT]
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import gguf
import numpy as np

OUTPUT = pathlib.Path(__file__).parents[1] / "testdata" / "mixture_oracles.json"
ORDER = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
MIXTURES = ["q3_k_m", "q4_k_m", "q5_k_m"]
# Layers, heads, heads of K and V, hidden size, whether the head is the embedding.
SHAPES = [(10, 4, 4, 256, 0), (24, 4, 2, 256, 1), (4, 4, 2, 64, 1), (80, 8, 2, 256, 0)]


def write_llama(path, layers, heads, kv_heads, hidden, tied):
    writer = gguf.GGUFWriter(path, "llama")
    vocab, ffn, keys = 64, 2 * hidden, hidden // heads * kv_heads
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(vocab)])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([1] * vocab)
    random = np.random.default_rng(1)

    def add(name, *shape):
        writer.add_tensor(name, random.normal(0, 0.1, shape).astype(np.float32))

    add("token_embd.weight", vocab, hidden)
    add("output_norm.weight", hidden)
    if not tied:
        add("output.weight", vocab, hidden)
    for i in range(layers):
        for name, *shape in [("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q", hidden, hidden),
                             ("attn_k", keys, hidden), ("attn_v", keys, hidden), ("attn_output", hidden, hidden),
                             ("ffn_gate", ffn, hidden), ("ffn_up", ffn, hidden), ("ffn_down", hidden, ffn)]:
            add(f"blk.{i}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    oracle = {}
    with tempfile.TemporaryDirectory() as folder:
        source, made = f"{folder}/source.gguf", f"{folder}/made.gguf"
        for shape in SHAPES:
            write_llama(source, *shape)
            for mixture in MIXTURES:
                subprocess.run([sys.argv[1], source, made, mixture], check=True, capture_output=True)
                types = {t.name: t.tensor_type.name.lower() for t in gguf.GGUFReader(made).tensors if len(t.shape) > 1}
                rows = [types["token_embd.weight"], types.get("output.weight", "")]
                rows += [" ".join(types[f"blk.{i}.{name}.weight"] for name in ORDER) for i in range(shape[0])]
                oracle.setdefault(mixture, {})[" ".join(map(str, shape))] = rows
    pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else OUTPUT).write_text(json.dumps(oracle) + "\n")


if __name__ == "__main__":
    main()
