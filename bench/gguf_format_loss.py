#!/usr/bin/env python3
"""Measures what rounding to each GGUF format costs: the KL divergence of the default model with its layers'
matrices rounded and decoded again, from the model before.

Rows of 576 weights do not hold blocks of 256, so four rows are rounded as one. The model is a Q4_1 file:
its weights are moved by up to half a step at random first, or formats with minima would meet their own
grid again. llama.cpp does both: its quantizers with an importance matrix, and llama-perplexity, which
scores the second half of each text of 512 tokens.

Needs: numpy, a gguf that knows NVFP4, and llama.cpp's build folder.
Usage: gguf_format_loss.py MODEL.gguf IMATRIX.gguf TEXT LLAMA_CPP_BUILD_BIN [FORMAT...]
"""
import ctypes
import pathlib
import re
import subprocess
import sys
import tempfile

import gguf
import numpy as np

FORMATS = ["Q8_0", "Q6_K", "Q5_K", "Q4_K", "IQ4_NL", "IQ4_XS", "Q4_0", "MXFP4", "NVFP4", "IQ3_S", "Q3_K", "IQ3_XXS",
           "IQ2_S", "Q2_K", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"]
FLOATS = ctypes.POINTER(ctypes.c_float)


def importance_of(path):
    tensors = {t.name: np.array(t.data, np.float32).ravel() for t in gguf.GGUFReader(path).tensors}
    ends = ".in_sum2"
    return {name[: -len(ends)]: sums / max(tensors[name[: -len(ends)] + ".counts"][0], 1)
            for name, sums in tensors.items() if name.endswith(ends)}


def dithered(tensor, values):
    """Moved by up to half of Q4_1's step."""
    steps = np.array(tensor.data).reshape(-1, 20)[:, :2].copy().view(np.float16).astype(np.float32)
    random = np.random.default_rng(sum(map(ord, tensor.name))).random(values.shape, np.float32)
    return values + np.repeat(np.abs(steps).reshape(len(values), -1), 32, axis=1) * (random - np.float32(0.5))


def rounded(ggml, kind, values, importance):
    n, k = values.shape
    rows = 1 if k % 256 == 0 else 4
    weights = np.ascontiguousarray(np.tile(importance, rows), np.float32)
    out = ctypes.create_string_buffer(values.size * 4)
    size = ggml.ggml_quantize_chunk(kind.value, values.ctypes.data_as(FLOATS), out, 0, n // rows, k * rows,
                                    weights.ctypes.data_as(FLOATS))
    blocks = np.frombuffer(out.raw[:size], np.uint8).reshape(n // rows, -1)
    return gguf.dequantize(blocks, kind).reshape(n, k).astype(np.float32)


def write(source, path, change):
    """The model in floats."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=field.types[-1] if array else None)
    for tensor in reader.tensors:
        shape = [int(extent) for extent in tensor.shape][::-1]
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
        if tensor.name.startswith("blk.") and len(shape) == 2:
            values = change(tensor.name, np.ascontiguousarray(dithered(tensor, values), np.float32))
        writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    source, imatrix, text, bin_folder, *formats = sys.argv[1:]
    ggml = ctypes.CDLL(f"{bin_folder}/libggml-base.so")
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, FLOATS, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [FLOATS]
    importance = importance_of(imatrix)
    with tempfile.TemporaryDirectory() as folder:
        made, logits = f"{folder}/made.gguf", f"{folder}/logits"

        def perplexity(*more):
            command = [f"{bin_folder}/llama-perplexity", "-m", made, "-f", text, "-c", "512", "--chunks", "4",
                       "--kl-divergence-base", logits, *more]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        write(source, made, lambda name, values: values)
        perplexity()
        for name in formats or FORMATS:
            kind = gguf.GGMLQuantizationType[name]
            ggml.ggml_quantize_init(kind.value)
            write(source, made, lambda tensor, values: rounded(ggml, kind, values, importance[tensor]))
            found = re.search(r"Mean\s+KLD:\s+([0-9.]+)", perplexity("--kl-divergence"))
            elements, size = gguf.GGML_QUANT_SIZES[kind]
            print(f"{name} {8 * size / elements:.4g} {found.group(1)}", flush=True)


if __name__ == "__main__":
    main()
