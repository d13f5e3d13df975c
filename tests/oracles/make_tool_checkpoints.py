#!/usr/bin/env python3
"""Writes tests/testdata/quantized/gptqmodel-*, autoawq: tiny Llama checkpoints of random weights that GPTQModel
quantizes and saves, or whose matrices AutoAWQ packs, with the logits of the weights as those tools read them back.

Run from the repository's root, with torch (CPU), transformers, bitsandbytes, safetensors, and gptqmodel (7.7.0)
installed. AutoAWQ (0.2.9) is asked for its packing alone, in a Python of its own if need be: pass its path with
--autoawq-python. The versions that made a folder stand in its oracle.json.

logits.f32 is computed in float64 from the tool's dequantized weights, scales taken as float32 (the tools would round
products to 16 bits); fp32_rounding is how far transformers' float32 logits are from those.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its default on two cores is too few for itself
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.insert(0, os.path.dirname(__file__))
from make_logit_oracles import in_double, logits, randomize
from make_quantized_checkpoints import CONFIG, OUT, VOCAB, plain_model, tidy

# The smallest that GPTQModel's groups of 32 fit.
SMALL = CONFIG | dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_attention_heads=4,
                      num_key_value_heads=2, head_dim=16)
# Its AWQ takes rows by 64.
WIDE = SMALL | dict(intermediate_size=128, num_key_value_heads=4)
EIGHT_BITS = {"bits": 8, "group_size": 16, "sym": False}
GPTQMODEL = {
    # Every kind of rule: a matrix with other bits and groups, one left alone.
    "gptqmodel-mixed": ("GPTQConfig", dict(bits=4, group_size=32, desc_act=True,
                                           dynamic={r"+:.*\.down_proj": EIGHT_BITS, r"-:.*\.k_proj": {}})),
    "gptqmodel-v2-8bit": ("GPTQConfig", dict(bits=8, group_size=-1, sym=False, act_group_aware=False, format="gptq_v2")),
    "gptqmodel-awq": ("AWQConfig", dict(bits=4, group_size=32, sym=False)),
}
# Scales are in the model's type with AWQ, in float16 with GPTQ.
DTYPES = {"gptqmodel-awq": torch.bfloat16}


def small_model(shape):
    generator = torch.Generator().manual_seed(80)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()
    randomize(model, generator)
    calibration = torch.randint(0, VOCAB, (64, 30), generator=generator).tolist()
    return model.half(), calibration, torch.randint(0, VOCAB, (24,), generator=generator).tolist()


def save_tokenizer(folder):
    """GPTQModel wants one; no checkpoint here keeps it."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w2"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w1",
                                         unk_token="w2").save_pretrained(folder)


def dequantized(folder):
    """Weights as GPTQModel reads the folder."""
    from gptqmodel import BACKEND, GPTQModel

    backend = BACKEND.TORCH_AWQ if "awq" in folder else BACKEND.TORCH
    dtype = DTYPES.get(os.path.basename(folder), torch.float16)
    model = GPTQModel.load(folder, device="cpu", backend=backend, dtype=dtype).model
    state = {name: value.float() for name, value in model.state_dict().items() if name.endswith(".weight")}
    for name, module in model.named_modules():
        if not hasattr(module, "qweight"):
            continue
        module.scales.data = module.scales.data.float()
        if "awq" not in folder:
            weight = module.dequantize_weight()
        else:
            from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

            weight = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, module.group_size)
        state[name + ".weight"] = weight.T.float().contiguous()
    return state


def write_oracle(folder, state, ids, versions):
    path = os.path.join(folder, "config.json")
    model = plain_model(folder, state)
    single, double = logits(model, ids), logits(in_double(model), ids)
    double.astype("<f4").tofile(os.path.join(folder, "logits.f32"))
    with open(os.path.join(folder, "oracle.json"), "w") as file:
        json.dump({"token_ids": ids, "fp32_rounding": float(np.abs(single - double).max()), "made_by": versions}, file)
        file.write("\n")
    print(folder, json.load(open(path))["quantization_config"], "largest logit", np.abs(double).max())


def keep_only_weights(folder):
    tidy(folder)
    for name in os.listdir(folder):
        if name not in ("config.json", "model.safetensors"):
            os.remove(os.path.join(folder, name))
    path = os.path.join(folder, "config.json")
    config = json.load(open(path))
    del config["quantization_config"]["meta"]["uri"]
    with open(path, "w") as file:
        json.dump(config, file, indent=2)
        file.write("\n")


def gptqmodel_checkpoint(base, name, calibration, ids):
    import gptqmodel
    from gptqmodel.quantization import config as configurations

    kind, options = GPTQMODEL[name]
    quantization = getattr(configurations, kind)(offload_to_disk=False, device="cpu", **options)
    model = gptqmodel.GPTQModel.load(base, quantization, dtype=DTYPES.get(name, torch.float16))
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in calibration], batch_size=4)
    folder = os.path.join(OUT, name)
    shutil.rmtree(folder, ignore_errors=True)
    model.save(folder)
    state = dequantized(folder)
    keep_only_weights(folder)
    write_oracle(folder, state, ids, {"gptqmodel": gptqmodel.__version__, "torch": torch.__version__})


AUTOAWQ = r"""
import sys, types
import torch
from safetensors.torch import load_file, save_file
import awq
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm

source, target, plain, group = sys.argv[1], sys.argv[2], sys.argv[3], 32
entries, state = {}, {}
for name, weight in load_file(source).items():
    if "proj" not in name:
        entries[name] = weight
        state[name] = weight.float()
        continue
    n, k = weight.shape
    parts = weight.float().reshape(n, k // group, group)
    low, high = parts.amin(2), parts.amax(2)
    scales = ((high - low) / 15).half()
    zeros = torch.clamp(-torch.round(low / scales.float()), 0, 15)
    linear = torch.nn.Linear(k, n, bias=False).half()
    linear.weight.data = weight
    packed = WQLinear_GEMM.from_linear(linear, 4, group, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    layer = name[:-len("weight")]
    entries |= {layer + key: value for key, value in packed.state_dict().items()}
    state[name] = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, group).T.contiguous()
save_file(entries, target, metadata={"format": "pt"})
save_file(state, plain)
print(awq.__version__)
"""


def autoawq_checkpoint(base, python, ids):
    folder = os.path.join(OUT, "autoawq")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    with tempfile.TemporaryDirectory() as scratch:
        plain = os.path.join(scratch, "plain.safetensors")
        done = subprocess.run([python, "-c", AUTOAWQ, os.path.join(base, "model.safetensors"),
                               os.path.join(folder, "model.safetensors"), plain],
                              check=True, stdout=subprocess.PIPE, text=True)
        state = load_file(plain)
    config = json.load(open(os.path.join(base, "config.json")))
    # As AwqConfig.to_transformers_dict() of the same package says it.
    config["quantization_config"] = {"quant_method": "awq", "zero_point": True, "group_size": 32, "bits": 4,
                                     "version": "gemm", "modules_to_not_convert": ["lm_head"]}
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file, indent=2)
        file.write("\n")
    tidy(folder)
    write_oracle(folder, state, ids, {"autoawq": done.stdout.split()[-1], "torch": torch.__version__})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--autoawq-python", default=sys.executable)
    parser.add_argument("--only", help="this folder alone")
    arguments = parser.parse_args()
    for name in ("autoawq", *GPTQMODEL):
        if arguments.only not in (None, name):
            continue
        model, calibration, ids = small_model(WIDE if name == "gptqmodel-awq" else SMALL)
        with tempfile.TemporaryDirectory() as base:
            model.save_pretrained(base)
            save_tokenizer(base)
            if name == "autoawq":
                autoawq_checkpoint(base, arguments.autoawq_python, ids)
            else:
                gptqmodel_checkpoint(base, name, calibration, ids)


if __name__ == "__main__":
    main()
