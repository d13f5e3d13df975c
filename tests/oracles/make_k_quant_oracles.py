#!/usr/bin/env python3
"""Writes tests/testdata/k_quant_oracles.json: SHA-256 sums of the blocks that llama.cpp's quantizers make
of matrices whose values both sides compute (`values` in make_quantize_oracles.py), with importance and
without. Rows: [format, kind, seed, n, k, seed of the importance or 0, sum].

Needs: numpy, and llama.cpp's libggml-base.so, built for plain x86-64 (as its own CMake does: no fused
multiply-add in that library).  Usage: make_k_quant_oracles.py LIBGGML_BASE [OUTPUT]
"""
import ast
import ctypes
import hashlib
import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
TYPES = {"q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q3_k": 11, "q4_k": 12, "q5_k": 13,
         "q6_k": 14, "iq4_nl": 20, "iq4_xs": 23}
FLOATS = ctypes.POINTER(ctypes.c_float)


def load_values():
    """The function `values`, without the packages that its script needs."""
    tree = ast.parse((HERE / "make_quantize_oracles.py").read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "values"]
    names = {"np": np}
    exec(compile(tree, "values", "exec"), names)
    return names["values"]


def main():
    ggml = ctypes.CDLL(sys.argv[1])
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, FLOATS, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [FLOATS]
    values = load_values()
    rows = []
    for name, kind in TYPES.items():
        for shape in ["smooth", "grid", "tiny"]:
            if shape == "tiny" and kind < 10:
                continue  # ggml divides by 0 there
            for seed, n, k in [(3, 5, 512), (9, 3, 768)]:
                matrix = values(shape, seed, n * k)
                for importance_seed in [0, 31]:
                    importance = None
                    if importance_seed:
                        importance = np.abs(values("smooth", importance_seed, k)) + np.float32(2**-10)
                        importance = importance.ctypes.data_as(FLOATS)
                    out = ctypes.create_string_buffer(n * k * 4)
                    size = ggml.ggml_quantize_chunk(kind, matrix.ctypes.data_as(FLOATS), out, 0, n, k, importance)
                    rows.append([name, shape, seed, n, k, importance_seed, hashlib.sha256(out.raw[:size]).hexdigest()])
    text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
    pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else HERE.parent / "testdata" / "k_quant_oracles.json").write_text(text)


if __name__ == "__main__":
    main()
