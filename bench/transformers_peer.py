#!/usr/bin/env python3
"""Measures Hugging Face transformers as `treadle bench iteration` measures Treadle: random bf16 weights of a llama's shape, prompts of one
length, greedy decoding of one batch. Prints one line of JSON for each way: eager, and compiled (a static cache, which lets `generate` compile
decoding).

    treadle inspect --json random:llama-3.1-8b >shape.json
    transformers_peer.py --shape shape.json --device cuda --batch-sizes 1,32 --prompt-tokens 128 --new-tokens 64

Needs torch and transformers; `gpu_run.sh --only iteration_bf16,transformers` runs both.
"""
import argparse
import json
import statistics
import sys
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
numbers = lambda text: [int(n) for n in text.split(",")]
parser.add_argument("--shape", required=True, help="what `treadle inspect --json` said of the model")
parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
parser.add_argument("--batch-sizes", type=numbers, default=[1, 32])
parser.add_argument("--prompt-tokens", type=numbers, default=[128])
parser.add_argument("--new-tokens", type=int, default=64)
parser.add_argument("--repeats", type=int, default=3)
parser.add_argument("--modes", type=lambda text: text.split(","), default=["eager", "compiled"])
args = parser.parse_args()

try:
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"transformers_peer.py: this Python ({sys.executable}) has no {error.name}; torch and transformers are needed")

shape = json.load(open(args.shape))
if shape["architecture"] != "llama":
    sys.exit(f"transformers_peer.py: {shape['name']} is a {shape['architecture']}, expected a llama")
torch.manual_seed(1)
torch.set_default_dtype(torch.bfloat16)
with torch.device(args.device):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=shape["vocab"], hidden_size=shape["hidden"], intermediate_size=shape["ffn_hidden"], num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"], head_dim=shape["head_dim"],
        max_position_embeddings=shape["context"], tie_word_embeddings=shape["tied_head"], eos_token_id=None, bos_token_id=None,
        pad_token_id=0)).eval()


def seconds(prompts, new_tokens, mode):
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    out = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                         do_sample=False, **({"cache_implementation": "static"} if mode == "compiled" else {}))
    wait()
    assert out.shape[1] == prompts.shape[1] + new_tokens
    return time.perf_counter() - begin


for mode in args.modes:
    rows = []
    for batch in args.batch_sizes:
        for length in args.prompt_tokens:
            prompts = torch.randint(1, shape["vocab"], (batch, length), device=args.device)
            with torch.inference_mode():
                for new_tokens in (1, args.new_tokens):  # compiles
                    seconds(prompts, new_tokens, mode)
                first = statistics.median(seconds(prompts, 1, mode) for _ in range(args.repeats))
                total = statistics.median(seconds(prompts, args.new_tokens, mode) for _ in range(args.repeats))
            decode = (total - first) / (args.new_tokens - 1)
            if decode <= 0:
                sys.exit(f"transformers_peer.py: {args.new_tokens} tokens took no longer than one; more --new-tokens are needed to time them")
            rows.append({"batch_size": batch, "prompt_tokens": length, "new_tokens": args.new_tokens, "prefill_seconds": first,
                         "prefill_tokens_per_second": batch * length / first, "decode_iteration_seconds": decode,
                         "decode_tokens_per_second": batch / decode, "total_seconds": total})
    print(json.dumps({"model": shape["name"], "mode": mode, "rows": rows,
                      "backend": f"transformers {transformers.__version__}, torch {torch.__version__}, {args.device}"}), flush=True)
