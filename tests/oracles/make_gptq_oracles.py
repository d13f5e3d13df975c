#!/usr/bin/env python3
"""Writes tests/testdata/gptq_oracles.json: small GPTQ and AWQ tensors, packed here from codes, zero
points and scales as AutoGPTQ and AutoAWQ document their files, and the weights that they mean.

Needs: numpy.  Usage: make_gptq_oracles.py [OUTPUT]
"""
import json
import pathlib
import sys

import numpy as np

OUTPUT = pathlib.Path(__file__).parents[1] / "testdata" / "gptq_oracles.json"
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ's pack order: nibble i of a word holds this column


def pack(fields, bits, order=None):
    """[rows, cols] to words [rows, cols * bits / 32], fields along columns, the first lowest."""
    per_word = 32 // bits
    words = np.zeros((fields.shape[0], fields.shape[1] // per_word), np.uint32)
    for i in range(per_word):
        column = order[i] if order else i
        words |= fields[:, column::per_word].astype(np.uint32) << np.uint32(bits * i)
    return words.view(np.int32)


def act_order(random, k, group):
    """Groups are runs of columns in the order in which act-order met them."""
    g_idx = np.zeros(k, np.int64)
    g_idx[random.permutation(k)] = np.arange(k) // group
    return g_idx


def make(random, packing, bits, n, k, group, symmetric, mislabelled=False, g_idx=None, stored_g_idx=None):
    groups = -(-k // (k if group == -1 else group))
    codes = random.integers(0, 2**bits, (k, n))
    zeros = random.integers(0, 2**bits, (groups, n))
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    scales = random.normal(0, 0.01, (groups, n)).astype(np.float16)
    in_order = g_idx is None
    if in_order:
        g_idx = np.arange(k) // (k if group == -1 else group)
    weights = scales[g_idx].astype(np.float64) * (codes - zeros[g_idx])  # exact in 32 bits
    minus_one = (packing == "gptq_v1") != mislabelled and packing != "awq"
    stored = (zeros - 1) % 2**bits if minus_one else zeros
    if packing == "awq":
        qweight, qzeros = pack(codes, bits, AWQ_COLUMNS), pack(stored, bits, AWQ_COLUMNS)
    else:
        qweight, qzeros = pack(codes.T, bits).T, pack(stored, bits)
    return {
        "packing": packing, "bits": bits, "n": n, "k": k, "group_size": group, "symmetric": symmetric,
        "qweight": np.ascontiguousarray(qweight).ravel().tolist(), "qzeros": qzeros.ravel().tolist(),
        "scales": scales.view(np.uint16).ravel().tolist(),
        "g_idx": (g_idx if stored_g_idx is None else stored_g_idx).tolist(), "in_order": in_order,
        "weights": weights.T.astype(np.float32).ravel().tolist(),
    }


def main():
    random = np.random.default_rng(4)
    cases = [
        make(random, "gptq_v1", 4, 24, 64, 32, False),
        make(random, "gptq_v1", 4, 8, 64, -1, True),
        make(random, "gptq_v1", 4, 16, 48, 32, True, mislabelled=True),
        make(random, "gptq_v2", 4, 16, 48, 32, False),  # the last group is shorter
        make(random, "gptq_v2", 4, 8, 32, 16, True, mislabelled=True),
        make(random, "gptq_v1", 8, 12, 32, 16, False),
        make(random, "gptq_v2", 8, 8, 32, 16, True),
        make(random, "awq", 4, 32, 48, 16, False),
        make(random, "awq", 4, 16, 32, -1, True),
        make(random, "gptq_v1", 4, 24, 96, 32, False, g_idx=act_order(random, 96, 32)),
        make(random, "gptq_v2", 4, 16, 64, 16, True, g_idx=act_order(random, 64, 16)),
        make(random, "gptq_v1", 8, 12, 40, 16, False, g_idx=act_order(random, 40, 16)),  # the last is shorter
        make(random, "gptq_v2", 8, 8, 32, 16, False, g_idx=random.integers(0, 2, 32)),  # groups of any size
        make(random, "gptq_v1", 4, 16, 64, 16, False, stored_g_idx=np.zeros(64, np.int64)),  # not filled in
    ]
    path = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
