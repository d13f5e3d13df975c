#!/usr/bin/env python3
"""Writes tests/testdata/gguf_blocks.bin: random blocks of every GGUF type that Treadle reads, and their
values according to the gguf package. Records: u32 type, u32 blocks, u32 values, block bytes, f32 values.

Needs: numpy, and a gguf that knows NVFP4 (llama.cpp's gguf-py of 2026-03 or later).  Usage: make_gguf_blocks.py [OUTPUT]
"""
import pathlib
import struct
import sys
import warnings

import gguf
import numpy as np

OUTPUT = pathlib.Path(__file__).parents[1] / "testdata" / "gguf_blocks.bin"
BLOCKS = 20
FEW_BLOCKS = 10  # of the I and T types, which are many

# Where each type's 16-bit constants lie in a block.
CONSTANTS = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "MXFP4": [],
    "Q2_K": [80, 82], "Q3_K": [108], "IQ4_XS": [0],
    "NVFP4": [], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0],
    "IQ1_S": [0], "IQ1_M": [], "TQ1_0": [52], "TQ2_0": [64],
}
# Largest, smallest subnormal, a subnormal, zeros, infinity, NaN.
EXTREMES = np.array([0x7BFF, 0xFBFF, 0x0001, 0x83FF, 0x0000, 0x8000, 0x7C00, 0x7E00], np.uint16)


def coded_blocks(name, size, random):
    blocks = FEW_BLOCKS if name.startswith(("IQ1", "IQ2", "IQ3", "T")) else BLOCKS
    raw = random.integers(0, 256, (blocks, size), dtype=np.uint8)
    for at in CONSTANTS[name]:
        constants = random.normal(0, 0.05, blocks).astype(np.float16).view(np.uint16)
        constants[: len(EXTREMES)] = np.roll(EXTREMES, at)
        raw[:, at : at + 2] = constants.view(np.uint8).reshape(blocks, 2)
    if name == "MXFP4":  # subnormal scales, the smallest normal ones, common ones, the largest
        raw[:14, 0] = [0, 1, 2, 3, 120, 121, 126, 127, 128, 129, 252, 253, 254, 255]
    return raw


def dense_values(name, random):
    if name == "F32":
        values = random.normal(size=64).astype(np.float32)
        values[:4] = [np.inf, -0.0, 1e-42, 3e38]
        return values.view(np.uint8)
    return random.integers(0, 65536, 512, dtype=np.uint16).view(np.uint8)


def main():
    random = np.random.default_rng(20250)
    out = bytearray()
    for name in ["F32", "F16", "BF16", *CONSTANTS]:
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        raw = coded_blocks(name, size, random) if name in CONSTANTS else dense_values(name, random)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # infinity times zero, on purpose
            values = np.asarray(gguf.dequantize(raw, kind), np.float32).ravel()
        blocks = raw.size // size
        assert values.size == blocks * elements
        out += struct.pack("<III", kind.value, blocks, values.size) + raw.tobytes() + values.tobytes()
    pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else OUTPUT).write_bytes(out)


if __name__ == "__main__":
    main()
