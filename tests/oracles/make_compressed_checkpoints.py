#!/usr/bin/env python3
"""Writes folders of tests/testdata/quantized/: tiny Llama checkpoints as compressed-tensors packs them (and NVFP4 as
NVIDIA's Model Optimizer does), with what the package decodes of each matrix, and the logits of that.

Run from the repository's root, with torch (CPU), transformers, compressed-tensors and safetensors installed.

decoded.safetensors holds the matrices in float32: the package's own dequantization, of scales in float32.
"""
import json
import os
import shutil
import sys

import numpy as np
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file

sys.path.insert(0, os.path.dirname(__file__))
from make_logit_oracles import in_double, logits, randomize

OUT = "tests/testdata/quantized"
VOCAB = 41
CONFIG = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
              num_key_value_heads=2, head_dim=8, max_position_embeddings=32, tie_word_embeddings=False,
              bos_token_id=0, eos_token_id=1)
LAYER = "model.layers.0."


def integers(bits, **more):
    return QuantizationArgs(num_bits=bits, type="int", **more)


GROUPS = dict(strategy="group", group_size=16)
NVFP4 = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
TOKENS = integers(8, symmetric=True, strategy="token", dynamic=True)  # of W8A8's activations
# name: (format, what is said of weights, of activations)
CASES = {
    "compressed-w4a16": ("pack-quantized", integers(4, symmetric=True, **GROUPS), None),
    "compressed-w4a16-asymmetric": ("pack-quantized", integers(4, symmetric=False, **GROUPS), None),
    "compressed-w4a16-order": ("pack-quantized", integers(4, symmetric=False, **GROUPS), None),
    "compressed-w8a16": ("pack-quantized", integers(8, symmetric=True, strategy="channel"), None),
    "compressed-w8a8": ("int-quantized", integers(8, symmetric=True, strategy="channel"), TOKENS),
    "compressed-nvfp4": ("nvfp4-pack-quantized", NVFP4, None),
    "modelopt-nvfp4": ("modelopt", NVFP4, None),
}


def pieces(weight, args):
    """The weight as [rows, groups, columns of a group]."""
    return weight.reshape(weight.shape[0], -1, args.group_size if args.group_size and args.group_size > 0 else weight.shape[1])


def integer_entries(weight, kind, scheme, ordered):
    args = scheme.weights
    order = torch.arange(weight.shape[1])
    if ordered:  # act-order by groups, which versions before 0.15 wrote
        order = torch.from_numpy(np.random.default_rng(5).permutation(weight.shape[1]))
    groups = pieces(weight[:, order], args)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    top = 2**args.num_bits - 1
    zero = torch.zeros_like(low, dtype=torch.int8)
    if args.symmetric:
        scale = (torch.maximum(-low, high) / (top / 2)).to(torch.bfloat16)
    else:
        scale = ((high - low) / top).to(torch.bfloat16)
        zero = (torch.round(-low / scale.float()) - (top + 1) // 2).clamp(-(top + 1) // 2, top // 2).to(torch.int8)
    state = {"weight": weight[:, order], "weight_scale": scale.float(), "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(kind)
    entries = compressor.compress(state, scheme)
    decoded = compressor.decompress(entries, scheme)["weight"]
    back = torch.argsort(order)
    if ordered:  # columns as the model has them, and the group of each
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
        codes = unpack_from_int32(entries["weight_packed"], args.num_bits, weight.shape)[:, back]
        entries["weight_packed"] = pack_to_int32(codes.contiguous(), args.num_bits)
        entries["weight_g_idx"] = (torch.argsort(order) // args.group_size).to(torch.int32)
    entries["weight_scale"] = scale
    return entries, decoded[:, back]


def nvfp4_entries(weight, kind, scheme):
    """Scales of 16 weights in E4M3, which one number of the whole matrix divides (or, of Model Optimizer's, multiplies)."""
    groups = pieces(weight, scheme.weights)
    whole = 448.0 * 6.0 / weight.abs().max()
    scale = (whole * groups.abs().amax(-1) / 6.0).to(torch.float8_e4m3fn)
    state = {"weight": weight, "weight_scale": scale.float(), "weight_global_scale": whole.reshape(1)}
    entries = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").compress(state, scheme)
    codes = unpack_fp4_from_uint8(entries["weight_packed"], *weight.shape, dtype=torch.float32)
    if kind != "modelopt":
        decoded = dequantize(x_q=codes, scale=scale.float(), args=scheme.weights, dtype=torch.float32,
                             global_scale=entries["weight_global_scale"])
        return entries | {"input_global_scale": torch.tensor([3.0])}, decoded
    # Its NVFP4QTensor.dequantize: the product of both scales in float32, and that of the value with it.
    second = 1 / whole
    decoded = (pieces(codes, scheme.weights) * (scale.float() * second)[..., None]).reshape(weight.shape)
    return {"weight": entries["weight_packed"], "weight_scale": scale, "weight_scale_2": second,
            "input_scale": torch.tensor(0.25)}, decoded


def quantization_config(kind, scheme):
    if kind == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    said = json.loads(scheme.model_dump_json(exclude_none=True)) | {"targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": said}, "ignore": ["lm_head"]}


def write(name, kind, weights, activations):
    generator = torch.Generator().manual_seed(90)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
    randomize(model, generator)
    ids = torch.randint(0, VOCAB, (24,), generator=generator).tolist()
    folder = os.path.join(OUT, name)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)
    entries, decoded, state = {}, {}, {}
    for tensor, weight in load_file(os.path.join(folder, "model.safetensors")).items():
        if "proj" not in tensor:
            entries[tensor] = state[tensor] = weight
            continue
        if weights.type == "float":
            own, state[tensor] = nvfp4_entries(weight, kind, scheme)
        else:
            own, state[tensor] = integer_entries(weight, kind, scheme, ordered=name.endswith("-order"))
        decoded[tensor] = state[tensor].contiguous()
        entries |= {tensor[:-len("weight")] + key: value.contiguous() for key, value in own.items()}
    save_file(entries, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    save_file(decoded, os.path.join(folder, "decoded.safetensors"))
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG, attn_implementation="sdpa")).eval()
    plain.load_state_dict(state)
    single = logits(plain, ids)
    double = logits(in_double(plain), ids)
    double.astype("<f4").tofile(os.path.join(folder, "logits.f32"))
    with open(os.path.join(folder, "oracle.json"), "w", encoding="utf-8") as file:
        json.dump({"token_ids": ids, "fp32_rounding": float(np.abs(single - double).max())}, file)
        file.write("\n")
    path = os.path.join(folder, "config.json")
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    config["quantization_config"] = quantization_config(kind, scheme)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
        file.write("\n")
    for left in os.listdir(folder):
        os.chmod(os.path.join(folder, left), 0o644)
    os.remove(os.path.join(folder, "generation_config.json"))
    print(name, "largest logit", np.abs(double).max())


if __name__ == "__main__":
    for case, (kind, weights, activations) in CASES.items():
        if len(sys.argv) == 1 or case in sys.argv:
            write(case, kind, weights, activations)
