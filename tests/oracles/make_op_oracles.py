#!/usr/bin/env python3
"""Writes tests/testdata/op_oracles.json: small inputs of the backend's ops and what PyTorch and
transformers make of them in float64 (sampling: the distribution that transformers' processors leave).

Needs: numpy, torch, transformers.  Usage: make_op_oracles.py [OUTPUT]
"""
import json
import pathlib
import sys

import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.activations import XIELUActivation
from transformers.generation.logits_process import (
    MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper,
    TopPLogitsWarper)
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb)

OUTPUT = pathlib.Path(__file__).parents[1] / "testdata" / "op_oracles.json"


def flat(tensor):
    return [float(f"{x:.9g}") for x in tensor.detach().double().flatten().tolist()]


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float32).double()


def xielu(positive, negative):
    """transformers' activation with these factors, whose parameters are softplus' inverses of them."""
    module = XIELUActivation(positive, negative, dtype=torch.float64)
    module.eps.copy_(torch.tensor(-1e-6, dtype=torch.float32))  # as we have it
    return module


def features():
    x, weight, bias = normal(3, 40) * 4, normal(40), normal(40)
    rms = LlamaRMSNorm(40, eps=1e-5).double()
    rms.weight.data = weight
    # LlamaRMSNorm computes in float32 whatever its input; the formula again, in float64.
    exact = weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    assert torch.allclose(rms(x), exact, rtol=1e-5)
    up = normal(3, 40)
    matrix = normal(11, 40)
    return {
        "x": flat(x), "weight": flat(weight), "bias": flat(bias), "up": flat(up),
        "matrix": flat(matrix),
        "rms_norm": flat(exact),
        "layer_norm": flat(F.layer_norm(x, (40,), weight, bias, 1e-5)),
        "linear": flat(F.linear(x, matrix, bias[:11])),
        "swiglu": flat(F.silu(x) * up),
        "gelu": flat(F.gelu(x, approximate="tanh")),
        "gelu_erf": flat(F.gelu(x)),
        "relu": flat(F.relu(x)),
        "soft_cap": flat(1.5 * torch.tanh(x / 1.5)),
        "xielu": flat(xielu(0.75, 1.25)(x)),
    }


def attention():
    """A prompt of 70 positions, 4 query heads on 2 K/V heads of 16: rotation, then causal attention."""
    heads, kv_heads, dim, rows = 4, 2, 16, 70
    q, k, v = normal(1, rows, heads, dim), normal(1, rows, kv_heads, dim), normal(1, rows, kv_heads, dim)
    config = LlamaConfig(hidden_size=heads * dim, num_attention_heads=heads, head_dim=dim,
                         rope_theta=10000.0, max_position_embeddings=128)
    positions = torch.arange(rows)[None]
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    q_turned, k_turned = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    out = F.scaled_dot_product_attention(q_turned, k_turned, v.transpose(1, 2), is_causal=True,
                                         enable_gqa=True)
    def rows_of(x):
        return flat(x.transpose(1, 2).reshape(rows, -1))
    half = dim // 2
    return {
        "heads": heads, "kv_heads": kv_heads, "head_dim": dim, "rows": rows,
        "q": flat(q), "k": flat(k), "v": flat(v),
        "cos": flat(cos[0, :, :half]), "sin": flat(sin[0, :, :half]),
        "q_turned": rows_of(q_turned), "out": rows_of(out),
    }


def sampling():
    logits = (normal(24) * 2.5).float()
    cases = []
    for temperature, top_k, top_p, min_p, penalty in [
            (1.0, 0, 1.0, 0.0, 1.0), (0.7, 0, 1.0, 0.0, 1.0), (1.3, 5, 1.0, 0.0, 1.0),
            (1.0, 0, 0.8, 0.0, 1.0), (1.0, 0, 0.01, 0.0, 1.0), (0.9, 8, 0.9, 0.0, 1.0),
            (1.2, 0, 1.0, 0.1, 1.0), (1.0, 10, 0.95, 0.05, 1.3), (0.8, 0, 1.0, 0.0, 0.8)]:
        seen = [0, 3, 9, 23]
        scores = logits[None].double()
        chain = [RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature)]
        chain += [TopKLogitsWarper(top_k)] if top_k else []
        chain += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        chain += [MinPLogitsWarper(min_p)] if min_p else []
        for step in chain:
            scores = step(torch.tensor([seen]), scores)
        cases.append({"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
                      "repetition_penalty": penalty, "seen": seen,
                      "probabilities": flat(scores.softmax(-1))})
    return {"logits": flat(logits), "logprobs": flat(logits.double().log_softmax(-1)), "cases": cases}


def main():
    torch.manual_seed(7)
    oracles = {"features": features(), "attention": attention(), "sampling": sampling()}
    path = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else OUTPUT)
    path.write_text(json.dumps(oracles, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
