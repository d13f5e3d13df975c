#!/usr/bin/env python3
"""Writes tests/testdata/adapters/: random LoRA adapters and soft prompts for small checkpoints of tests/testdata/models,
saved by PEFT, with the logits that PEFT gives the models with them; with their names as arguments, those alone. A soft
prompt's logits are those of its own positions, then the text's; beside those of soft-llama are the 13 tokens that follow the text.

Run from the repository's root, with torch, transformers, peft and safetensors installed, and LLAMA_CPP naming a
checkout of llama.cpp, whose converter makes the .gguf files.

Logits are in float64; beside them is how far PEFT's own float32 logits are from those (make_logit_oracles.py).
"""
import json
import os
import subprocess
import sys

import numpy as np
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model

MODELS = "tests/testdata/models"
OUT = "tests/testdata/adapters"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# name: (base, settings of LoraConfig, type of the file)
CASES = {
    "llama": ("llama-grouped", dict(r=4, lora_alpha=6, target_modules=LINEARS), "float32"),
    "llama-second": ("llama-grouped", dict(r=18, lora_alpha=9, use_rslora=True, target_modules=LINEARS,
                                           rank_pattern={"down_proj": 3, "model.layers.1.self_attn.q_proj": 7},
                                           alpha_pattern={"^model.layers.0.mlp.up_proj": 2, "v_proj": 11}), "float32"),
    "llama-bf16": ("llama-grouped", dict(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]), "bfloat16"),
    "qwen3": ("qwen3-tied", dict(r=5, lora_alpha=5, target_modules=LINEARS + ["embed_tokens", "lm_head"]), "float16"),
    "gpt2": ("gpt2", dict(r=3, lora_alpha=4, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True),
             "float32"),
    "gptneox": ("gptneox", dict(r=4, lora_alpha=4, target_modules=["query_key_value", "dense", "dense_h_to_4h",
                                                                 "dense_4h_to_h"]), "float32"),
    "gemma3": ("gemma3", dict(r=4, lora_alpha=8, target_modules=LINEARS + ["embed_tokens"]), "float32"),
    "granite": ("granite", dict(r=4, lora_alpha=3, target_modules=LINEARS), "float32"),
    "deepseek3": ("deepseek3", dict(r=4, lora_alpha=8, target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
                                                                       "o_proj"]), "float32"),
    "phi3": ("phi3", dict(r=4, lora_alpha=8, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
             "float32"),
}
# name: (base, virtual tokens, type of the file)
SOFT_PROMPTS = {
    "soft-llama": ("llama-grouped", 11, "float32"),
    "soft-gemma3": ("gemma3", 5, "float16"),
    "soft-gemma4": ("gemma4-large", 3, "float32"),
    "soft-granite": ("granite", 9, "bfloat16"),
    "soft-gpt2": ("gpt2", 4, "float32"),
    "soft-qwen35": ("qwen35", 6, "float32"),
}
GGUF = ["llama", "qwen3", "granite"]


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double().numpy()


def main():
    for name in sys.argv[1:] or CASES | SOFT_PROMPTS:
        soft = name in SOFT_PROMPTS
        base, settings, dtype = (SOFT_PROMPTS if soft else CASES)[name]
        folder = f"{OUT}/{name}"
        torch.manual_seed(sum(map(ord, name)))
        ids = json.load(open(f"{MODELS}/{base}/oracle.json"))["token_ids"]
        how = dict(experts_implementation="eager") if base == "deepseek3" else {}
        config = (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=settings) if soft else
                  LoraConfig(base_model_name_or_path=base, task_type="CAUSAL_LM", **settings))
        model = get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(
            f"{MODELS}/{base}", dtype=torch.float32, attn_implementation="eager", **how), config)
        for key, value in model.named_parameters():
            if "lora_" in key:
                inner = "lora_A" in key or "embedding_A" in key
                value.data = torch.randn_like(value) * (0.3 if inner else 0.1)
                value.data = value.data.to(getattr(torch, dtype)).float()
            elif "prompt_encoder" in key:  # of an embedding's size
                size = model.get_input_embeddings()(torch.tensor(ids)).std().item()
                value.data = (torch.randn_like(value) * size).to(getattr(torch, dtype)).float()
        model.eval()
        single = logits_of(model, ids)
        exact = logits_of(model.double(), ids)
        follows = {}
        for penalty in (1.0, 1.3) if name == "soft-llama" else ():
            # generate() of peft 0.21 and transformers 5.24 gives other tokens with its cache than without.
            text, penalize = list(ids), transformers.RepetitionPenaltyLogitsProcessor(penalty)
            while len(text) < len(ids) + 13:
                scores = torch.tensor(logits_of(model, text)[-1:])
                text.append(penalize(torch.tensor([text]), scores).argmax().item())
            follows[f"penalty {penalty}"] = text[len(ids):]
        with model.disable_adapter():
            plain = logits_of(model, ids)
        state_type = getattr(torch, dtype)
        model.to(state_type).save_pretrained(folder)
        exact.astype(np.float32).tofile(f"{folder}/logits.f32")
        effect = np.abs(exact[-len(ids):] - plain).max()
        json.dump({"base": base, "token_ids": ids, "fp32_rounding": float(np.abs(single - exact).max()),
                   "effect": float(effect)} | follows, open(f"{folder}/oracle.json", "w"))
        if os.path.exists(f"{folder}/README.md"):
            os.remove(f"{folder}/README.md")
        if name in GGUF and "LLAMA_CPP" in os.environ:
            subprocess.run([sys.executable, os.environ["LLAMA_CPP"] + "/convert_lora_to_gguf.py", folder, "--base",
                            f"{MODELS}/{base}", "--outfile", f"{folder}/adapter.gguf", "--outtype", "f32"], check=True)
        print(name, "changes logits by up to", effect, "fp32", np.abs(single - exact).max())


if __name__ == "__main__":
    main()
