#!/usr/bin/env python3
"""Writes tests/testdata/quantized/: tiny Llama checkpoints as transformers with bitsandbytes saves
them (and FP8, GPTQ and AWQ ones as their projects define them), with the logits of their dequantized weights.

Run from the repository's root, with torch (CPU), transformers, accelerate, bitsandbytes and
safetensors installed.

logits.f32 is computed in float64 from the weights that bitsandbytes itself dequantizes to float32;
fp32_rounding is how far transformers' float32 logits are from those. For LLM.int8() there is also
int8.f32: section 2 of the LLM.int8() paper in float64, outliers per row; int8_rounding is how far
the same program is in float32 (roundings that tip over included), and bitsandbytes how far
bitsandbytes' own CPU forward is (per call and with 16-bit activations: another rule, so only near).
"""
import json
import os
import shutil
import sys

import bitsandbytes as bnb
import numpy as np
import torch
import transformers
from bitsandbytes.functional import QuantState
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig

sys.path.insert(0, os.path.dirname(__file__))
from make_logit_oracles import in_double, logits, randomize

OUT = "tests/testdata/quantized"
VOCAB = 41
# Rows of 36 and 52: blocks of 64 straddle them.
CONFIG = dict(vocab_size=VOCAB, hidden_size=36, intermediate_size=52, num_hidden_layers=1, num_attention_heads=3,
              num_key_value_heads=1, head_dim=12, max_position_embeddings=32, tie_word_embeddings=False,
              bos_token_id=0, eos_token_id=1)
THRESHOLD = 2.5


def four_bits(kind, nested, **more):
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested,
                              bnb_4bit_compute_dtype=torch.float32, **more)


BITSANDBYTES = {
    "nf4": four_bits("nf4", False),
    "nf4-dq": four_bits("nf4", True),
    "fp4-dq": four_bits("fp4", True, bnb_4bit_quant_storage=torch.float32),
    "int8": BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=THRESHOLD),
}


def plain_model(folder, state):
    """A float32 model of these weights, with the folder's configuration."""
    config = transformers.LlamaConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._attn_implementation = "sdpa"
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    return model.float()


def dequantized(folder):
    """The checkpoint's weights as bitsandbytes, or an FP8 file's definition, turns them into float32."""
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    state = {}
    for name, tensor in tensors.items():
        if not name.endswith(".weight"):
            continue
        parts = {key[len(name) + 1:]: value for key, value in tensors.items() if key.startswith(name + ".")}
        layer = name[:-len("weight")]
        if parts:
            state[name] = bnb.functional.dequantize_4bit(tensor, QuantState.from_dict(parts, torch.device("cpu")))
        elif tensor.dtype == torch.int8:
            state[name] = tensor.double().mul(tensors[layer + "SCB"].double()[:, None] / 127)
        elif tensor.dtype == torch.float8_e4m3fn:
            scale = tensors.get(name + "_scale", tensors.get(name + "_scale_inv")).double()
            if scale.dim() == 1 and scale.numel() > 1:
                scale = scale[:, None]
            if scale.dim() == 2 and scale.shape[1] > 1:
                rows, columns = BLOCK
                scale = scale.repeat_interleave(rows, 0)[:tensor.shape[0]].repeat_interleave(columns, 1)[:, :tensor.shape[1]]
            state[name] = tensor.double() * scale
        else:
            state[name] = tensor
    return {name: value.float() for name, value in state.items()}


def emulate_int8(model, names):
    """LLM.int8() with outliers per row, in the model's own type."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name not in names:
            continue
        codes, absmax = names[name]

        def forward(x, codes=codes, absmax=absmax):
            outlier = x.abs() >= THRESHOLD
            rest = torch.where(outlier, torch.zeros_like(x), x)
            largest = rest.abs().amax(-1, keepdim=True)
            safe = torch.where(largest > 0, largest, torch.ones_like(largest))
            q = torch.round(rest * (127 / safe))
            scale = (absmax / 127).to(x.dtype)
            w = codes.to(x.dtype)
            return (q @ w.T) * (largest / 127) * scale + torch.where(outlier, x, torch.zeros_like(x)) @ (w * scale[:, None]).T

        module.forward = forward
    return model


def write_oracle(folder, ids, quantized=None):
    state = dequantized(folder)
    model = plain_model(folder, state)
    single = logits(model, ids)
    double = logits(in_double(model), ids)
    double.astype("<f4").tofile(os.path.join(folder, "logits.f32"))
    oracle = {"token_ids": ids, "fp32_rounding": float(np.abs(single - double).max())}
    if quantized is not None:
        tensors = load_file(os.path.join(folder, "model.safetensors"))
        parts = {name[:-len(".SCB")]: (tensors[name[:-len("SCB")] + "weight"], value)
                 for name, value in tensors.items() if name.endswith(".SCB")}
        single = logits(emulate_int8(plain_model(folder, state), parts), ids)
        double = logits(emulate_int8(in_double(plain_model(folder, state)), parts), ids)
        double.astype("<f4").tofile(os.path.join(folder, "int8.f32"))
        oracle["int8_rounding"] = float(np.abs(single - double).max())
        oracle["bitsandbytes"] = float(np.abs(logits(quantized, ids) - double).max())
    with open(os.path.join(folder, "oracle.json"), "w") as file:
        json.dump(oracle, file)
        file.write("\n")
    print(folder, "largest logit", np.abs(double).max(), {k: v for k, v in oracle.items() if k != "token_ids"})


def base_model():
    generator = torch.Generator().manual_seed(77)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
    randomize(model, generator)
    return model, torch.randint(0, VOCAB, (24,), generator=generator).tolist()


def tidy(folder):
    """As small as can be: no generation_config, and files that a checkout may read."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        os.chmod(path, 0o644)
        if name == "generation_config.json":
            os.remove(path)


def bitsandbytes_checkpoints(base, ids):
    for name, quantization in BITSANDBYTES.items():
        folder = os.path.join(OUT, name)
        shutil.rmtree(folder, ignore_errors=True)
        model = transformers.LlamaForCausalLM.from_pretrained(base, quantization_config=quantization,
                                                              dtype=torch.float32, device_map="cpu")
        model.save_pretrained(folder)
        tidy(folder)
        write_oracle(folder, ids, model if name == "int8" else None)


def blocks_of_128(base, ids):
    """transformers has no setting for the block size; bitsandbytes' own functions do."""
    folder = os.path.join(OUT, "nf4-128-dq")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(os.path.join(OUT, "nf4-dq"), folder)
    state = {}
    for name, tensor in load_file(os.path.join(base, "model.safetensors")).items():
        if "proj" not in name:
            state[name] = tensor
            continue
        codes, quant_state = bnb.functional.quantize_4bit(tensor, blocksize=128, compress_statistics=True, quant_type="nf4")
        state[name] = codes
        state |= {f"{name}.{key}": value for key, value in quant_state.as_dict(packed=True).items()}
    save_file(state, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    tidy(folder)
    write_oracle(folder, ids)


BLOCK = (16, 20)
FP8 = {
    "fp8-channel": ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "weight_scale", torch.bfloat16),
    "fp8-tensor": ({"quant_method": "fbgemm_fp8"}, "weight_scale", torch.float32),
    "fp8-block": ({"quant_method": "fp8", "weight_block_size": list(BLOCK)}, "weight_scale_inv", torch.float32),
}


def fp8_scale(name, weight):
    if name == "fp8-channel":
        return weight.abs().amax(1, keepdim=True) / 448
    if name == "fp8-tensor":
        return weight.abs().max().reshape(1) / 448
    rows, columns = BLOCK
    n, k = weight.shape
    padded = torch.zeros(-(-n // rows) * rows, -(-k // columns) * columns)
    padded[:n, :k] = weight
    return padded.reshape(-1, rows, padded.shape[1] // columns, columns).abs().amax((1, 3)) / 448


def fp8_checkpoints(base, ids):
    for name, (quantization, key, dtype) in FP8.items():
        folder = os.path.join(OUT, name)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        state = {}
        for tensor_name, weight in load_file(os.path.join(base, "model.safetensors")).items():
            if "proj" not in tensor_name:
                state[tensor_name] = weight
                continue
            scale = fp8_scale(name, weight).to(dtype)
            full = scale.float()
            if name == "fp8-block":
                full = full.repeat_interleave(BLOCK[0], 0)[:weight.shape[0]].repeat_interleave(BLOCK[1], 1)[:, :weight.shape[1]]
            state[tensor_name] = (weight / full).clamp(-448, 448).to(torch.float8_e4m3fn)
            state[tensor_name[:-len("weight")] + key] = scale
        save_file(state, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        path = os.path.join(folder, "config.json")
        config = json.load(open(path))
        config["quantization_config"] = quantization
        with open(path, "w") as file:
            json.dump(config, file, indent=2)
        tidy(folder)
        write_oracle_fp8(folder, ids, config, path)


def write_oracle_fp8(folder, ids, config, path):
    """transformers must not see the quantization: the weights come dequantized."""
    quantization = config.pop("quantization_config")
    with open(path, "w") as file:
        json.dump(config, file, indent=2)
    write_oracle(folder, ids)
    config["quantization_config"] = quantization
    with open(path, "w") as file:
        json.dump(config, file, indent=2)
        file.write("\n")


# Words hold eight codes, so sizes are multiples of eight. 48 is one and a half groups of 32.
GROUP_CONFIG = CONFIG | dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
GROUPS = {
    "gptq-v1": dict(quant_method="gptq", bits=4, group_size=16, sym=False, desc_act=False),
    "gptq-v2-8bit": dict(quant_method="gptq", bits=8, group_size=-1, sym=False, desc_act=False, checkpoint_format="gptq_v2"),
    "awq": dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm"),
}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the column in each nibble of a word, low first


def pack_words(values, bits, order=None):
    """[rows, columns] to int32 [rows, columns * bits / 32], low first."""
    per = 32 // bits
    fields = values.astype(np.uint32).reshape(values.shape[0], -1, per)[:, :, order or list(range(per))]
    return torch.from_numpy((fields << (np.arange(per, dtype=np.uint32) * bits)).sum(-1, dtype=np.uint32).view(np.int32).copy())


# Act-order: columns belong to groups in the order in which they were quantized. Groups of 32 stay whole on a CPU.
ACT_CONFIG = GROUP_CONFIG | dict(hidden_size=64, intermediate_size=96, head_dim=16)
ACT_ORDER = {
    "gptq-act-v1": dict(quant_method="gptq", bits=4, group_size=32, sym=False, desc_act=True),
    "gptq-act-v2-8bit": dict(quant_method="gptq", bits=8, group_size=32, sym=False, desc_act=True, checkpoint_format="gptq_v2"),
}


def importance(name, columns, shared):
    """An order of columns. GPTQ's is the same for the matrices that share an input; files may differ."""
    if shared:
        name = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
    return np.random.default_rng(list(name.encode())).permutation(columns)


def group_matrix(weight, quantization, order=None):
    """Entries of a matrix [out, in], and what they mean by the formula of AutoGPTQ and AutoAWQ."""
    bits, awq = quantization["bits"], quantization["quant_method"] == "awq"
    w = weight.double().numpy().T  # [k, n]
    k = w.shape[0]
    size = k if quantization["group_size"] == -1 else quantization["group_size"]
    group = np.arange(k) // size
    if order is not None:
        group[order] = np.arange(k) // size
    low = np.stack([w[group == g].min(0) for g in range(group.max() + 1)])
    high = np.stack([w[group == g].max(0) for g in range(group.max() + 1)])
    scale = ((high - low) / (2**bits - 1)).astype(np.float16)
    zero = np.clip(np.round(-low / scale.astype(np.float64)), 1, 2**bits - 1).astype(np.uint32)
    q = np.clip(np.round(w / scale.astype(np.float64)[group]) + zero[group], 0, 2**bits - 1).astype(np.uint32)
    meaning = (q.astype(np.float64) - zero[group]) * scale.astype(np.float64)[group]
    stored = zero if awq or quantization.get("checkpoint_format") == "gptq_v2" else zero - 1
    entries = {"qweight": pack_words(q, bits, AWQ_ORDER) if awq else pack_words(q.T, bits).T.contiguous(),
               "qzeros": pack_words(stored, bits, AWQ_ORDER if awq else None), "scales": torch.from_numpy(scale)}
    if not awq:
        entries["g_idx"] = torch.from_numpy(group.astype(np.int32))
    return entries, torch.from_numpy(meaning.T.astype(np.float32))


def group_checkpoints(configuration, kinds, seed):
    generator = torch.Generator().manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**configuration)).eval()
    randomize(model, generator)
    ids = torch.randint(0, VOCAB, (24,), generator=generator).tolist()
    for name, quantization in kinds.items():
        folder = os.path.join(OUT, name)
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        entries, state = {}, {}
        for tensor_name, weight in load_file(os.path.join(folder, "model.safetensors")).items():
            if "proj" not in tensor_name:
                entries[tensor_name] = state[tensor_name] = weight
                continue
            order = None
            if quantization.get("desc_act"):
                order = importance(tensor_name, weight.shape[1], quantization["bits"] == 4)
            parts, state[tensor_name] = group_matrix(weight, quantization, order)
            entries |= {tensor_name[:-len("weight")] + key: value for key, value in parts.items()}
        save_file(entries, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        path = os.path.join(folder, "config.json")
        config = json.load(open(path))
        plain = plain_model(folder, state)
        single, double = logits(plain, ids), logits(in_double(plain), ids)
        double.astype("<f4").tofile(os.path.join(folder, "logits.f32"))
        with open(os.path.join(folder, "oracle.json"), "w") as file:
            json.dump({"token_ids": ids, "fp32_rounding": float(np.abs(single - double).max())}, file)
            file.write("\n")
        config["quantization_config"] = quantization
        with open(path, "w") as file:
            json.dump(config, file, indent=2)
            file.write("\n")
        tidy(folder)


def main():
    base = os.path.join(OUT, "base")
    model, ids = base_model()
    shutil.rmtree(base, ignore_errors=True)
    model.save_pretrained(base)
    bitsandbytes_checkpoints(base, ids)
    blocks_of_128(base, ids)
    fp8_checkpoints(base, ids)
    group_checkpoints(GROUP_CONFIG, GROUPS, 78)
    group_checkpoints(ACT_CONFIG, ACT_ORDER, 79)
    shutil.rmtree(base)


if __name__ == "__main__":
    main()
