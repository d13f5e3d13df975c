#!/usr/bin/env python3
"""Writes tests/testdata/quantize_oracles.{json,bin}: what bitsandbytes' CPU code, the gguf package and
PyTorch make of matrices whose values both sides compute (see `values`), and codebooks.

JSON: {"cases": [{"spec", "kind", "seed", "n", "k", and of each result [offset, bytes] in the .bin}],
"codebooks": {name: [offset, bytes]}}. Floats are little-endian float32.

Needs: numpy, torch, bitsandbytes, gguf.  Usage: make_quantize_oracles.py [OUTPUT FOLDER]
"""
import json
import pathlib
import sys

import bitsandbytes.functional as bnb
import gguf
import numpy as np
import torch

OUTPUT = pathlib.Path(__file__).parents[1] / "testdata"


def values(kind, seed, count):
    """Exact in float32. smooth: a triangle distribution with blocks of zeros; grid: multiples of a
    half, so that ties are common; tiny: subnormal numbers; between: for each 128 the largest magnitude
    and points half way between its 127 parts, where a scale's last bit decides."""
    i = np.arange(count, dtype=np.uint64)
    x = ((i * 0x9E3779B1 + seed * 0x85EBCA77) & 0xFFFFFFFF).astype(np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    if kind == "between":
        largest = np.repeat(1 + (x[::128] & np.uint32(0x7FFFFF)).astype(np.float64) / 2**23, 128)[:count]
        part = (i % 128).astype(np.float64)
        return np.where(part == 0, largest, (part - 0.5) * largest / 127).astype(np.float32)
    if kind == "grid":
        return ((x % np.uint32(255)).astype(np.float32) - np.float32(127)) / np.float32(2)
    smooth = ((x & np.uint32(0xFFFF)).astype(np.int64) + (x >> np.uint32(16)).astype(np.int64) - 65535)
    out = np.ldexp(smooth.astype(np.float64), -145 if kind == "tiny" else -20).astype(np.float32)
    out[(i // 128) % 9 == 4] = 0
    out[i % 97 == 5] = -0.0
    return out


class Blob:
    def __init__(self):
        self.data = bytearray()

    def put(self, array):
        if isinstance(array, torch.Tensor):
            array = array.contiguous().numpy()
        raw = np.ascontiguousarray(array).tobytes()
        self.data += raw
        return [len(self.data) - len(raw), len(raw)]


def four_bits(blob, case, matrix):
    quant_type, _, block = case["spec"].partition(":")
    nested = quant_type.endswith("-dq")
    codes, state = bnb.quantize_4bit(
        matrix, blocksize=int(block or 64), quant_type=quant_type[:3], compress_statistics=nested)
    if not nested:
        case["data"] = blob.put(codes)
        case["scales"] = blob.put(state.absmax)
    else:  # codes are those of the type without double quantization
        case["nested_codes"] = blob.put(state.absmax)
        case["nested_absmax"] = blob.put(state.state2.absmax)
        case["offset"] = blob.put(np.array([state.offset.item()], np.float32))
    if matrix.numel() <= 1000:
        case["decoded"] = blob.put(bnb.dequantize_4bit(codes, state))


def int8_rows(blob, case, matrix):
    codes, absmax, _ = bnb.int8_vectorwise_quant(matrix.clone())
    case["data"] = blob.put(codes)
    case["absmax"] = blob.put(absmax)


def fp8_rows(blob, case, matrix):
    scale = matrix.abs().amax(dim=1) / 448
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = (matrix / safe[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    case["data"] = blob.put(codes.view(torch.uint8))
    case["scales"] = blob.put(scale)


def ggml_blocks(blob, case, matrix):
    kind = gguf.GGMLQuantizationType[case["spec"].upper()]
    case["data"] = blob.put(gguf.quants.quantize(matrix.numpy(), kind))


def dense(blob, case, matrix):
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[case["spec"]]
    case["data"] = blob.put(matrix.to(dtype).view(torch.uint8))


# Shapes: blocks that fit the rows, that straddle them, that end early, and a matrix of odd size.
CASES = [
    (four_bits, "nf4 nf4:32 nf4:128 fp4 fp4:128", "smooth", 20, 192),
    (four_bits, "nf4 fp4", "grid", 10, 200),
    (four_bits, "nf4 fp4", "tiny", 6, 100),
    (four_bits, "nf4:4096 fp4:4096", "smooth", 13, 640),
    (four_bits, "nf4 nf4-dq fp4 fp4-dq", "smooth", 5, 100),
    (four_bits, "nf4 nf4-dq fp4", "smooth", 3, 33),
    (four_bits, "nf4-dq nf4-dq:128 fp4-dq:32", "smooth", 250, 192),
    (four_bits, "nf4-dq", "grid", 250, 192),
    (int8_rows, "int8", "smooth", 12, 100),
    (int8_rows, "int8", "grid", 12, 100),
    (int8_rows, "int8", "smooth", 9, 128),  # row 4 is zero
    (int8_rows, "int8", "between", 30, 128),
    # Seed 12: a value that multiplication by the reciprocal and division round to different codes.
    (four_bits, "fp4", "grid", 1, 24),
    (fp8_rows, "fp8", "smooth", 12, 128),
    (fp8_rows, "fp8", "grid", 12, 100),
    (ggml_blocks, "q8_0 q4_0 q4_1", "smooth", 10, 160),
    (ggml_blocks, "q8_0 q4_0 q4_1", "grid", 10, 160),
    (ggml_blocks, "q8_0", "between", 10, 128),
    (dense, "f32 f16 bf16", "smooth", 5, 40),
    (dense, "f16 bf16", "tiny", 2, 40),
]


def codebooks(blob):
    out = {}
    for bits in range(3, 9):
        used = 2**bits - 1
        linear = bnb.create_linear_map(total_bits=bits).numpy()
        half = used // 2  # the map has zeros in its middle
        out[f"int{bits}"] = np.concatenate([linear[:half], [0], linear[256 - half:]]).astype(np.float32)
        out[f"dynamic{bits}"] = np.array(sorted(
            v for v in bnb.create_dynamic_map(max_exponent_bits=bits - 1, total_bits=bits).tolist() if v != 0), np.float32)
        for exponent in range(1, bits):
            table = bnb.create_fp8_map(True, exponent, bits - 1 - exponent, bits)
            out[f"float{bits}e{exponent}"] = np.array(sorted(v for v in table.tolist() if v != 0), np.float32)
        sample = np.sort(np.abs(values("smooth", 7, 999)) * np.sign(values("smooth", 8, 999)))
        sample = sample / np.abs(sample).max()
        medians = np.quantile(sample, (np.arange(used) + 0.5) / used, method="hazen")
        medians = np.sort(np.append(medians, 0))
        out[f"quantile{bits}"] = (medians / np.abs(medians).max()).astype(np.float32)
    e2m1 = np.array(sorted(set(gguf.quants.MXFP4.kvalues) - {0}), np.float32)
    out["e2m1"] = e2m1 / e2m1.max()
    return {name: blob.put(table) for name, table in out.items()}


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    blob = Blob()
    cases = []
    for seed, (make, specs, kind, n, k) in enumerate(CASES):
        matrix = torch.from_numpy(values(kind, seed, n * k).reshape(n, k))
        for spec in specs.split():
            case = {"spec": spec, "kind": kind, "seed": seed, "n": n, "k": k}
            make(blob, case, matrix)
            cases.append(case)
    index = {"cases": cases, "codebooks": codebooks(blob)}
    lines = ",\n".join(json.dumps(case) for case in cases)
    books = json.dumps(index["codebooks"])
    (folder / "quantize_oracles.json").write_text(f'{{"cases": [\n{lines}],\n"codebooks": {books}}}\n')
    (folder / "quantize_oracles.bin").write_bytes(blob.data)


if __name__ == "__main__":
    main()
