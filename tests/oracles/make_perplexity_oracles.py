#!/usr/bin/env python3
"""Writes tests/testdata/perplexity.json: transformers' loss of the small checkpoints of make_logit_oracles.py on random tokens, by both
protocols of `treadle perplexity`.

Run from the repository's root, with torch and transformers installed. Losses are computed in float64; how far float32 is from that is kept
beside them.
"""
import json

import torch
import transformers

from make_logit_oracles import OUT, VOCAB, in_double

CONTEXT = 24
BOS = 0
CASES = ["llama-grouped", "gpt2"]


def window_losses(model, ids):
    """Of each whole window: the sum of -log p of all its tokens but the first."""
    return [model(torch.tensor([ids[i:i + CONTEXT]]), labels=torch.tensor([ids[i:i + CONTEXT]])).loss.item() * (CONTEXT - 1)
            for i in range(0, len(ids) - CONTEXT + 1, CONTEXT)]


def half_losses(model, ids):
    """llama-perplexity: BOS in place of each chunk's first token; tokens after position context / 2 are predicted."""
    losses = []
    for i in range(0, len(ids) - CONTEXT + 1, CONTEXT):
        chunk = [BOS] + ids[i + 1:i + CONTEXT]
        first = CONTEXT // 2 + 1
        labels = [-100] * first + chunk[first:]
        losses.append(model(torch.tensor([chunk]), labels=torch.tensor([labels])).loss.item() * (CONTEXT - first))
    return losses


@torch.no_grad()
def main():
    result = {"context": CONTEXT, "bos": BOS, "cases": {}}
    for index, name in enumerate(CASES):
        generator = torch.Generator().manual_seed(400 + index)
        ids = torch.randint(0, VOCAB, (3 * CONTEXT + 7,), generator=generator).tolist()
        model = transformers.AutoModelForCausalLM.from_pretrained(f"{OUT}/{name}", dtype=torch.float32, attn_implementation="sdpa").eval()
        single = window_losses(model, ids) + half_losses(model, ids)
        # The loss function computes in float32 whatever the model's type: close enough, and kept as the tolerance.
        model = in_double(model)
        double = window_losses(model, ids) + half_losses(model, ids)
        windows = len(ids) // CONTEXT
        result["cases"][name] = {"token_ids": ids, "window": double[:windows], "llama.cpp": double[windows:],
                                 "fp32_rounding": max(abs(a - b) for a, b in zip(single, double))}
        print(name, result["cases"][name]["fp32_rounding"], double)
    with open("tests/testdata/perplexity.json", "w") as file:
        json.dump(result, file)
        file.write("\n")


if __name__ == "__main__":
    main()
