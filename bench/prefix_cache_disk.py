#!/usr/bin/env python3
"""What --prefix-cache-disk brings after a restart: time to first token of a conversation's second turn, whose first
had 1,024 tokens, from a server that was started in between, with files and without, in turns.

usage: bench/prefix_cache_disk.py MODEL [--rounds N]
"""
import argparse, random, statistics, tempfile

from prefix_cache import OWN, SHARED, Server

PORT = 18593


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    command = ["build/treadle", "serve", "--model", options.model, "--metrics-listen", "none", "--listen",
               "127.0.0.1:0", "--http-listen", f"127.0.0.1:{PORT}", "--log-requests", "off", "--kv-memory", "1G"]
    seeds = random.Random(1)
    draw = lambda count: [seeds.randrange(1000, 40000) for _ in range(count)]
    found = {"with": [], "without": [], "first with": [], "first without": []}
    with tempfile.TemporaryDirectory() as folder:
        sides = {"with": ["--prefix-cache-disk", f"{folder}:2G"], "without": []}
        for number in range(options.rounds + 1):
            prompt, more, second_answers = draw(SHARED), draw(OWN), []
            for side in sorted(sides, reverse=number % 2 == 1):
                server = Server(side, PORT, command + sides[side], {"return_token_ids": True})
                first, _, answer = server.ask(prompt)
                server.stop()
                server = Server(side, PORT, command + sides[side], {"return_token_ids": True})
                second, _, again = server.ask(prompt + [token for token in answer if isinstance(token, int)] + more)
                server.stop()
                second_answers.append(again)
                if number > 0:  # the first warms up
                    found[side].append(second)
                    found["first " + side].append(first)
                print(number, side, f"first turn {first:.3f} s, second {second:.3f} s", flush=True)
            assert second_answers[0] == second_answers[1], "the files change answers"
    for name, values in found.items():
        print(f"{name:14} {statistics.median(values):7.3f} s ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
