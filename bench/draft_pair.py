#!/usr/bin/env python3
"""Two models whose agreement is made to measure: for benchmarks of a draft model.

    bench/draft_pair.py MODEL.gguf SERVED.gguf DRAFT.gguf [--layers 6] [--scale 0]

The served one is a copy of a Llama model of Q4_1 or Q8_0 blocks, in which what the layers behind the first ones add to
the residual stream is scaled: 0 adds nothing, 1 leaves the model as it is. The draft is those first layers alone (the
same file with another number of layers). So with 0 the two give the same tokens, and the more the scale grows, the less
often they do. The texts make no sense.
"""

import argparse
import shutil

import gguf
import numpy as np

BLOCKS = {gguf.GGMLQuantizationType.Q4_1: (20, 2), gguf.GGMLQuantizationType.Q8_0: (34, 1)}  # bytes, scales in front


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("served")
    parser.add_argument("draft")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--scale", type=float, default=0)
    options = parser.parse_args()
    shutil.copyfile(options.model, options.served)
    shutil.copyfile(options.model, options.draft)
    reader = gguf.GGUFReader(options.model)
    served = np.memmap(options.served, dtype=np.uint8, mode="r+")
    for tensor in reader.tensors:
        part = tensor.name.split(".")
        if part[0] != "blk" or int(part[1]) < options.layers or part[2] not in ("attn_output", "ffn_down"):
            continue
        size, scales = BLOCKS[tensor.tensor_type]
        blocks = served[tensor.data_offset:tensor.data_offset + tensor.n_bytes].reshape(-1, size)
        halves = blocks[:, :2 * scales].copy().view(np.float16)
        blocks[:, :2 * scales] = (halves * np.float16(options.scale)).view(np.uint8)
    served.flush()
    count = reader.fields["llama.block_count"].parts[-1]
    draft = np.memmap(options.draft, dtype=np.uint8, mode="r+")
    at = count.__array_interface__["data"][0] - reader.data.__array_interface__["data"][0]
    draft[at:at + count.nbytes] = np.array([options.layers], count.dtype).view(np.uint8)
    draft.flush()


if __name__ == "__main__":
    main()
