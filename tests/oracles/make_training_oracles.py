#!/usr/bin/env python3
"""Writes tests/testdata/training_oracles.json: gradients of ops by PyTorch's autograd in float64, steps of
torch.optim.AdamW and bitsandbytes' AdamW8bit, losses of 50 steps of peft and PyTorch in float32 on small models, and gradients of soft prompts in
float64.

Needs: torch, transformers, peft, bitsandbytes.  Usage: make_training_oracles.py [OUTPUT]
"""
import json
import math
import pathlib
import sys

import bitsandbytes
import torch
import torch.nn.functional as F
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

TESTDATA = pathlib.Path(__file__).parents[1] / "testdata"
STEPS, BATCH, LENGTH = 50, 2, 24


def flat(tensor):
    return [float(f"{x:.9g}") for x in tensor.detach().double().flatten().tolist()]


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float32).double().requires_grad_()


def gradients(output, **inputs):
    """The inputs, a gradient of the output, and those of the inputs that follow from it."""
    given = torch.randn(output.shape, dtype=torch.float32).double()
    found = torch.autograd.grad(output, list(inputs.values()), given)
    return ({name: flat(value) for name, value in inputs.items()} | {"given": flat(given)}
            | {"d" + name: flat(value) for name, value in zip(inputs, found)})


def rms_norm():
    x, weight = normal(3, 37), normal(37)
    out = gradients(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight, x=x)
    return out | {"weight": flat(weight)}


def product():
    """A linear layer with an update of rank 5, scaled by 1.5."""
    x, a, b, weight = normal(9, 37), normal(5, 37), normal(43, 5), normal(43, 37)
    out = gradients(F.linear(x, weight) + 1.5 * F.linear(F.linear(x, a), b), x=x, a=a, b=b)
    return out | {"weight": flat(weight)}


def attention(window=0):
    """Rotation, then causal attention: two sequences of 70 and 9, 4 query heads on 2 K/V heads of 6."""
    heads, kv_heads, dim, lengths = 4, 2, 6, (70, 9)
    rows = sum(lengths)
    q, k, v = normal(rows, heads * dim), normal(rows, kv_heads * dim), normal(rows, kv_heads * dim)
    positions = torch.cat([torch.arange(n) for n in lengths]).double()
    angles = positions[:, None] * (0.3 ** torch.arange(dim // 2)).double()
    cos, sin = angles.cos().float().double(), angles.sin().float().double()
    split = lambda x: x.view(1, rows, -1, dim).transpose(1, 2)
    whole = lambda x: torch.cat([x, x], -1)[None]
    rotated_q, rotated_k = apply_rotary_pos_emb(split(q), split(k), whole(cos), whole(sin))
    out, begin = [], 0
    for length in lengths:
        part = slice(begin, begin + length)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        mask = (distance >= 0) & ((distance < window) if window else (distance >= 0))
        out.append(F.scaled_dot_product_attention(
            rotated_q[:, :, part], rotated_k[:, :, part], split(v)[:, :, part], attn_mask=mask,
            scale=0.4, enable_gqa=True))
        begin += length
    out = torch.cat(out, 2).transpose(1, 2).reshape(rows, heads * dim)
    return gradients(out, q=q, k=k, v=v)


def gated(activation):
    gate, up = normal(3, 37), normal(3, 37)
    return gradients(activation(gate) * up, gate=gate, up=up)


def cross_entropy():
    logits, targets = normal(4, 131), torch.tensor([3, 130, 0, 77])
    loss = F.cross_entropy(logits * 4, targets, reduction="sum")
    return {"x": flat(logits * 4), "targets": targets.tolist(), "loss": loss.item(),
            "dx": flat(torch.autograd.grad(loss, logits)[0] / 4)}


def adamw():
    """Ten steps on 7 numbers, of which the gradients are given: bounded to a norm of 1, decayed by 0.1."""
    values = torch.nn.Parameter(torch.randn(7))
    begin = flat(values)
    optimizer = torch.optim.AdamW([values], lr=0.01, weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, 3, 10)
    given, rates = [], []
    for step in range(10):
        values.grad = torch.randn(7) * (step + 1) / 5
        given.append(flat(values.grad))
        rates.append(schedule.get_last_lr()[0])
        torch.nn.utils.clip_grad_norm_([values], 1.0)
        optimizer.step()
        schedule.step()
    return {"begin": begin, "given": given, "rates": rates, "end": flat(values)}


def adamw8bit():
    """Ten steps of bitsandbytes on a tensor of 17 blocks, of which the last is short, and one that keeps 32 bits.

    Its code for CPUs rounds moments to 65,536 even steps before it rounds them to the map, which that for GPUs and the
    paper do not: here the nearest value of the map is taken."""
    def nearest(values, code, absmax, out, blocksize):
        for i in range(0, values.numel(), blocksize):
            block = values[i:i + blocksize]
            absmax[i // blocksize] = block.abs().max()
            out[i:i + blocksize] = torch.bucketize(block * (1 / block.abs().max()), (code[:-1] + code[1:]) / 2)
    bitsandbytes.backends.cpu.ops._quant_blockwise_fp32_direct = nearest
    values = [torch.nn.Parameter(wave((size,), 1.0).float()) for size in (16 * 256 + 44, 100)]
    optimizer = bitsandbytes.optim.AdamW8bit(values, lr=0.01, weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, 3, 10)
    for step in range(10):
        for value in values:
            sizes = 10.0 ** -(torch.arange(value.numel()).double() % 5)
            value.grad = (wave(value.shape, step * 0.37) * sizes).float()
        optimizer.step()
        schedule.step()
    state = optimizer.state[values[0]]
    assert state["state1"].dtype == torch.uint8 and optimizer.state[values[1]]["state1"].dtype == torch.float32
    return {"sizes": [v.numel() for v in values], "end": flat(torch.cat([v.data for v in values])[::7]),
            "codes": [state[name][::7].tolist() for name in ("state1", "state2")]}


def wave(shape, phase):
    """Numbers that a test makes again without a generator of random ones."""
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(i * 0.7 + phase).reshape(shape)


def ruled_loss(model, step):
    """The mean loss of a step's sequences, whose tokens a rule makes, of all that follow something."""
    vocab = model.config.vocab_size
    rows = [[(17 * (step * BATCH + b) + 5 * i + i * i * (b + 1)) % vocab for i in range(LENGTH - 3 * b)]
            for b in range(BATCH)]
    total, count = 0.0, 0
    for row in rows:
        logits = model(input_ids=torch.tensor([row])).logits[0, :-1]
        targets = row[max(0, len(row) - len(logits)):]
        total = total + F.cross_entropy(logits[-len(targets):], torch.tensor(targets), reduction="sum")
        count += len(targets)
    return total / count


def losses_of(model, parameters, rate):
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, 5, STEPS)
    losses = []
    for step in range(STEPS):
        loss = ruled_loss(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.3)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(model.config.model_type, losses[0], losses[-1])
    return [float(f"{x:.7g}") for x in losses]


def load(name, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(TESTDATA / "models" / name, dtype=dtype, attn_implementation="eager")


def soft_prompt(name):
    """The gradient of a soft prompt of 6 rows in float64, and losses of a run."""
    def peft(dtype):
        model = get_peft_model(load(name, dtype), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6))
        rows = model.prompt_encoder["default"].embedding.weight
        rows.data = wave(rows.shape, 1.0).float().to(dtype)
        return model, rows
    model, rows = peft(torch.float64)
    loss = ruled_loss(model, 0)
    gradient = torch.autograd.grad(loss, rows)[0]
    model, rows = peft(torch.float32)
    return {"model": name, "loss": loss.item(), "gradient": flat(gradient), "losses": losses_of(model, [rows], 0.05)}


def training(name, targets):
    """Losses of a run on a model of tests/testdata/models."""
    torch.manual_seed(1)
    model = load(name)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    for n, p in parameters:
        if ".lora_A." in n:
            p.data = (wave(p.shape, 1.0) / math.sqrt(p.shape[1])).float()
    return {"model": name, "losses": losses_of(model, [p for _, p in parameters], 0.02)}


def main():
    torch.manual_seed(20261127)
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    oracles = {
        "rms_norm": rms_norm(), "product": product(), "attention": attention(),
        "window": attention(window=5), "swiglu": gated(F.silu),
        "geglu": gated(lambda x: F.gelu(x, approximate="tanh")), "cross_entropy": cross_entropy(),
        "adamw": adamw(), "adamw8bit": adamw8bit(),
        "training": [training(name, every)
                     for name in ("llama-grouped", "qwen2", "qwen3", "gemma3", "granite")],
        "soft_prompts": [soft_prompt(name) for name in ("llama-grouped", "gemma3", "granite", "phi3")],
    }
    output = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else TESTDATA / "training_oracles.json"
    output.write_text(json.dumps(oracles) + "\n")


if __name__ == "__main__":
    main()
