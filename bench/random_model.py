#!/usr/bin/env python3
"""Writes a GGUF Llama of a given shape with random weights: to measure speed where no checkpoint has that shape.

Needs the Python package gguf. Weights are normal with the spread of a fresh model, so activations stay finite; the text that such a model
makes means nothing. There is no tokenizer: it serves token ids (`bench iteration`, `bench serve`, `generate --token-ids`).

  bench/random_model.py OUT.gguf --layers 30 --hidden 512 --heads 8 --kv-heads 2 --ffn 1536 --vocab 49152 --format q4_1
"""
import argparse

import gguf
import numpy as np


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    for name, default in dict(layers=30, hidden=512, heads=8, kv_heads=2, ffn=1536, vocab=49152, context=4096, seed=1).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--format", choices=["f16", "q8_0", "q4_0", "q4_1"], default="q4_1")
    o = parser.parse_args()
    random = np.random.default_rng(o.seed)
    kind = gguf.GGMLQuantizationType[o.format.upper()]
    head_dim = o.hidden // o.heads

    writer = gguf.GGUFWriter(o.out, "llama")
    writer.add_name(f"random-{o.layers}x{o.hidden}")
    writer.add_block_count(o.layers)
    writer.add_embedding_length(o.hidden)
    writer.add_head_count(o.heads)
    writer.add_head_count_kv(o.kv_heads)
    writer.add_feed_forward_length(o.ffn)
    writer.add_context_length(o.context)
    writer.add_vocab_size(o.vocab)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head_dim)

    def matrix(name, rows, columns):
        values = random.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(columns)
        writer.add_tensor(name + ".weight", gguf.quants.quantize(values, kind), raw_dtype=kind)

    def ones(name):
        writer.add_tensor(name + ".weight", np.ones(o.hidden, dtype=np.float32))

    matrix("token_embd", o.vocab, o.hidden)
    for i in range(o.layers):
        layer = f"blk.{i}."
        ones(layer + "attn_norm")
        matrix(layer + "attn_q", o.hidden, o.hidden)
        matrix(layer + "attn_k", o.kv_heads * head_dim, o.hidden)
        matrix(layer + "attn_v", o.kv_heads * head_dim, o.hidden)
        matrix(layer + "attn_output", o.hidden, o.hidden)
        ones(layer + "ffn_norm")
        matrix(layer + "ffn_gate", o.ffn, o.hidden)
        matrix(layer + "ffn_up", o.ffn, o.hidden)
        matrix(layer + "ffn_down", o.hidden, o.ffn)
    ones("output_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
