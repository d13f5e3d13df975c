#!/usr/bin/env python3
"""Tokens/s with guesses of the next tokens (--speculate ngram) and without, one and the same server.

    bench/speculation.py --model MODEL.gguf [--draft DRAFT.gguf] [--treadle build/treadle] [--rounds 5] [--json FILE]
                         [--serve-flags "FLAG ..."]

With a draft model (--speculate draft:DRAFT) instead of n-grams where --draft names one (draft_pair.py makes one).

Three kinds of text: one that copies from its prompt (an edit of a function, an answer from a passage), a greedy one
that runs into repetition as small models do, and sampled text, which does not repeat itself. Each round asks every
batch with and without; an even number of rounds is fair. Ratios are medians over rounds. Answers are compared: they are the same.
"""

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import time
import urllib.request

FUNCTION = '''def total_price(items, discount):
    """Adds the prices of all items."""
    result = 0.0
    for item in items:
        if item.price is None:
            raise ValueError("item without a price: " + item.name)
        result += item.price * item.count
    if discount > 0:
        result -= result * discount
    return round(result, 2)


def average_price(items):
    """The mean price of all items."""
    if not items:
        return 0.0
    return total_price(items, 0) / len(items)
'''
PASSAGE = ("The ferry between the two islands runs every forty minutes from six in the morning until eleven at night. "
           "It carries up to three hundred passengers and sixty cars, and in winter, when storms are frequent, the "
           "harbour master may cancel single crossings without notice. Tickets are sold on board.")
COPY = [
    "A file:\n\n" + FUNCTION + "\nThe same file, once more:\n\n" + FUNCTION[:35],
    "Passage: " + PASSAGE + "\n\nThe passage again, word for word: The ferry between",
]
OTHER = ["Once upon a time there was a fisherman who", "The history of the printing press begins with",
         "Dear Sir or Madam, I am writing to you because", "A list of things that one should know about bees:"]
CASES = [("copy", COPY, 0.0), ("greedy", OTHER, 0.0), ("sampled", OTHER, 1.0)]


def ask(port, model, prompt, temperature, seed, speculate, tokens):
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": temperature, "seed": seed,
            "ignore_eos": True, "speculate": speculate}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def run(port, model, prompts, temperature, batch, speculate, tokens, seed):
    """Tokens/s of `batch` requests at once, their texts, and the shares of guesses."""
    began = time.time()
    with concurrent.futures.ThreadPoolExecutor(batch) as pool:
        answers = list(pool.map(lambda i: ask(port, model, prompts[i % len(prompts)], temperature, seed + i, speculate,
                                              tokens), range(batch)))
    seconds = time.time() - began
    details = [answer["usage"].get("completion_tokens_details", {}) for answer in answers]
    accepted = sum(each.get("accepted_prediction_tokens", 0) for each in details)
    rejected = sum(each.get("rejected_prediction_tokens", 0) for each in details)
    return batch * tokens / seconds, [answer["choices"][0]["text"] for answer in answers], accepted, rejected


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--treadle", default="build/treadle")
    parser.add_argument("--port", type=int, default=18970)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--draft")
    parser.add_argument("--serve-flags", type=str.split, default=[])
    parser.add_argument("--json")
    options = parser.parse_args()
    way = "draft" if options.draft else "ngram"
    server = subprocess.Popen([options.treadle, "serve", "--model", options.model, "--listen", "127.0.0.1:0",
                               "--http-listen", f"127.0.0.1:{options.port}", "--metrics-listen", "none",
                               "--speculate", f"draft:{options.draft}" if options.draft else "ngram",
                               "--max-batch-size", "32", *options.serve_flags],
                              stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{options.port}/v1/models") as models:
                    model = json.load(models)["data"][0]["id"]
                break
            except OSError:
                time.sleep(0.1)
        rows = []
        print(f"| Text | Batch | Tokens/s off | {way} | Ratio | Guesses a token | Right |")
        print("|---|---|---|---|---|---|---|")
        for name, prompts, temperature in CASES:
            for batch in map(int, options.batches.split(",")):
                off, on, accepted, rejected = [], [], 0, 0
                for turn in range(options.rounds + 1):
                    # They take turns at being the first one, since the second one of a pair is slower.
                    order = ("off", way) if turn % 2 == 0 else (way, "off")
                    ran = {each: run(options.port, model, prompts, temperature, batch, each, options.tokens, turn * 1000)
                           for each in order}
                    plain, guess = ran["off"], ran[way]
                    if plain[1] != guess[1]:
                        raise SystemExit(f"{name}, batch {batch}: the answers differ")
                    if turn == 0:
                        continue  # prompts are cached from now on
                    off.append(plain[0])
                    on.append(guess[0])
                    accepted += guess[2]
                    rejected += guess[3]
                guesses = accepted + rejected
                row = {"text": name, "batch": batch, "off": statistics.median(off), way: statistics.median(on),
                       "ratio": statistics.median(b / a for a, b in zip(off, on)),
                       "guesses": guesses / (options.rounds * batch * options.tokens),
                       "right": accepted / guesses if guesses else None}
                rows.append(row)
                right = "-" if row["right"] is None else f"{row['right']:.2f}"
                print(f"| {name} | {batch} | {row['off']:.0f} | {row[way]:.0f} | {row['ratio']:.2f} | "
                      f"{row['guesses']:.2f} | {right} |", flush=True)
        if options.json:
            with open(options.json, "w", encoding="utf-8") as out:
                json.dump({"cores": os.cpu_count(), "rows": rows}, out, indent=1)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
