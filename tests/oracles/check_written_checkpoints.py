#!/usr/bin/env python3
"""Checks by hand what `treadle quantize` writes with the programs that it is written for.

Run from the repository's root with torch (CPU), transformers, accelerate and bitsandbytes installed:

    tests/oracles/check_written_checkpoints.py build/treadle MODEL

MODEL is a Llama with a tokenizer: a .gguf file or a Hugging Face folder. For nf4, nf4-dq, fp4 and int8:
transformers loads the folder with bitsandbytes; every matrix that bitsandbytes dequantizes equals
quantize_4bit's own result on the source's weights (codes and scales bit for bit, but for the mean that double
quantization subtracts); and greedy tokens, from a float32 model of the dequantized weights, are those of `treadle generate --compute exact`
(4-bit types; LLM.int8() is compared in text only, because bitsandbytes computes in 16 bits on CPU).
"""
import json
import subprocess
import sys
import tempfile

import bitsandbytes as bnb
import torch
import transformers
from bitsandbytes.functional import QuantState
from safetensors.torch import load_file

PROMPT = "The three largest cities of Europe are"
TOKENS = 24
# Double quantization subtracts the mean of all scales, which bitsandbytes sums in another order: its last bit
# may differ, and with it, rarely, the 8-bit code of a scale.
LARGEST_SCALE_DIFFERENCE = 0.02


def treadle(binary, *arguments):
    return subprocess.run([binary, *arguments], check=True, capture_output=True, text=True).stdout


def four_bit_parts(tensors, name):
    return {key[len(name) + 1:]: value for key, value in tensors.items() if key.startswith(name + ".")}


def compare_codes(tensors, floats, spec):
    """Matrices whose codes or scales are not bitsandbytes' own from the same floats, bit for bit; and the
    largest difference of a scale in units of its block's."""
    wrong, worst = 0, 0.0
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        state = QuantState.from_dict(four_bit_parts(tensors, name), torch.device("cpu"))
        codes, theirs = bnb.functional.quantize_4bit(floats[name], blocksize=state.blocksize, quant_type=spec[:3],
                                                     compress_statistics=state.nested)
        same = torch.equal(codes.flatten(), tensors[name].flatten()) and torch.equal(theirs.absmax, state.absmax)
        if state.nested:
            same = same and torch.equal(theirs.state2.absmax, state.state2.absmax)
            mine, other = (bnb.functional.dequantize_blockwise(s.absmax, s.state2) + s.offset for s in (state, theirs))
            worst = max(worst, float(((mine - other).abs() / other.abs()).max()))
        wrong += not same
    return wrong, worst


def greedy(model, ids):
    """As with --ignore-eos: an end token is a token like others."""
    found = list(ids)
    with torch.no_grad():
        for _ in range(TOKENS):
            found.append(int(model(torch.tensor([found]), use_cache=False).logits[0, -1].argmax()))
    return found[len(ids):]


def dequantized(folder, tensors):
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    state = {}
    for name, tensor in tensors.items():
        parts = four_bit_parts(tensors, name)
        if name.endswith(".weight"):
            state[name] = bnb.functional.dequantize_4bit(
                tensor, QuantState.from_dict(parts, torch.device("cpu"))) if parts else tensor
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model


def check(binary, source, floats, folder, spec):
    treadle(binary, "quantize", source, folder, "--weights", spec)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
    kind = type(model.model.layers[0].mlp.up_proj).__name__
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT).input_ids
    tensors = load_file(folder + "/model.safetensors")
    ours = json.loads(treadle(binary, "generate", "--model", folder, "--compute", "exact", "--kv-dtype", "f32", "--json",
                              "--token-ids", ",".join(map(str, ids)), "--max-new-tokens", str(TOKENS), "--ignore-eos"))
    ours = ours["token_ids"]
    if spec == "int8":
        print(f"{spec}: {kind}; transformers: {tokenizer.decode(greedy(model, ids))!r}; treadle: {tokenizer.decode(ours)!r}")
        return True
    wrong, worst = compare_codes(tensors, floats, spec)
    theirs = greedy(dequantized(folder, tensors), ids)
    print(f"{spec}: {kind}; matrices that differ from bitsandbytes': {wrong} (scales by {worst:.2g}); "
          f"greedy tokens equal: {ours == theirs}")
    return worst < LARGEST_SCALE_DIFFERENCE and (spec == "nf4-dq" or wrong == 0) and ours == theirs


def main():
    binary, source = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        treadle(binary, "quantize", source, scratch + "/f32", "--weights", "f32,embedding=f32")
        floats = load_file(scratch + "/f32/model.safetensors")
        good = [check(binary, source, floats, f"{scratch}/{spec}", spec) for spec in ("nf4", "nf4-dq", "fp4", "int8")]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
