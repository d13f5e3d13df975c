#!/usr/bin/env python3
"""Compares servers whose requests have LoRA adapters of their own: Treadle and llama.cpp's server, in turns.

usage: bench/compare_adapters.py MODEL.gguf [--adapters 16] [--rank 16] [--prompt N] [--new N] [--rounds N] [--threads N]
                                 [--treadle PROGRAM] [--llama llama-server]

Makes random adapters of all linear layers (llama.cpp's files, which both servers read). A round asks for all of them at
once, a request each, without adapters and with them; its tokens/s are new tokens over the time until the last answer has
ended. Prints medians of the rounds. A peer that is missing is named. Needs the Python packages gguf and numpy.
"""
import argparse, concurrent.futures, json, os, pathlib, shutil, socket, statistics, subprocess, sys, tempfile, time
import urllib.request

import gguf, numpy

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def write_adapter(reader, path, rank, seed):
    draw = numpy.random.default_rng(seed)
    architecture = str(bytes(reader.fields["general.architecture"].parts[-1]), "utf-8")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))
    for tensor in reader.tensors:
        if tensor.name.split(".")[-2] in MATRICES:
            cols, rows = (int(size) for size in tensor.shape)
            writer.add_tensor(f"{tensor.name}.lora_a", draw.normal(0, cols**-0.5, (rank, cols)).astype(numpy.float32))
            writer.add_tensor(f"{tensor.name}.lora_b", draw.normal(0, 0.01, (rows, rank)).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=600))


class Server:
    """A server process, and how a request for adapter `i` (None: for the base) is written."""

    def __init__(self, name, command, path, body, folder):
        self.name, self.path, self.body = name, path, body
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [str(word).replace("PORT", str(self.port)) for word in command]
        self.log = folder / f"{name}.log"
        self.process = subprocess.Popen(command, stdout=self.log.open("w"), stderr=subprocess.STDOUT)

    def ask(self, prompt, new, adapter):
        post(f"http://127.0.0.1:{self.port}{self.path}", self.body(prompt, new, adapter))

    def wait(self):
        for _ in range(600):
            try:
                return self.ask([1, 2, 3], 1, None)
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.2)
        sys.exit(f"{self.name} does not serve:\n{self.log.read_text()[-2000:]}")

    def measure(self, prompts, new, with_adapters):
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as threads:
            began = time.perf_counter()
            list(threads.map(lambda i: self.ask(prompts[i], new, i if with_adapters else None), range(len(prompts))))
            return len(prompts) * new / (time.perf_counter() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--treadle", default=pathlib.Path(__file__).resolve().parents[1] / "build/treadle")
    parser.add_argument("--llama", default="llama-server")
    options = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="compare_adapters."))
    reader = gguf.GGUFReader(options.model)
    files = [folder / f"a{i}.gguf" for i in range(options.adapters)]
    for i, file in enumerate(files):
        write_adapter(reader, file, options.rank, i)

    treadle = [options.treadle, "serve", "--model", options.model, "--threads", options.threads, "--listen", "127.0.0.1:0",
               "--http-listen", "127.0.0.1:PORT", "--metrics-listen", "none", "--log-requests", "off", "--max-loras",
               options.adapters, "--served-model-name", "base", "--lora",
               ",".join(f"a{i}={file}" for i, file in enumerate(files))]
    servers = [Server("Treadle", treadle, "/v1/completions", lambda prompt, new, i: {
        "model": "base" if i is None else f"a{i}", "prompt": prompt, "max_tokens": new, "temperature": 0,
        "ignore_eos": True}, folder)]
    if shutil.which(options.llama):
        llama = [options.llama, "-m", options.model, "-t", options.threads, "--host", "127.0.0.1", "--port", "PORT", "-np",
                 options.adapters, "-c", options.adapters * 2 * (options.prompt + options.new), "--lora-init-without-apply",
                 "--lora", ",".join(map(str, files))]
        servers.append(Server("llama.cpp", llama, "/completion", lambda prompt, new, i: {
            "prompt": prompt, "n_predict": new, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
            "lora": [] if i is None else [{"id": i, "scale": 1.0}]}, folder))
    else:
        print(f"MISSING llama.cpp: no program {options.llama}")
    draw = numpy.random.default_rng(1)
    found = {}
    try:
        for server in servers:
            server.wait()
            server.measure(draw.integers(1000, 20000, (options.adapters, 8)).tolist(), 2, True)  # loads the adapters
        for number in range(options.rounds):
            prompts = draw.integers(1000, 20000, (options.adapters, options.prompt)).tolist()
            for server in servers:
                for with_adapters in (False, True):
                    speed = server.measure(prompts, options.new, with_adapters)
                    found.setdefault(server.name, {}).setdefault(with_adapters, []).append(speed)
                    print(number + 1, server.name, "adapters" if with_adapters else "base", round(speed), file=sys.stderr)
    finally:
        for server in servers:
            server.process.terminate()
            server.process.wait()
        shutil.rmtree(folder)
    print(f"{pathlib.Path(options.model).name}, {options.threads} threads; {options.adapters} requests at once, prompts of "
          f"{options.prompt}, {options.new} new tokens; adapters of rank {options.rank}; medians of {options.rounds} rounds\n")
    print("| tokens/s | base | an adapter each | of the base |\n|---|---|---|---|")
    for name, row in found.items():
        base, adapters = (statistics.median(row[key]) for key in (False, True))
        print(f"| {name} | {base:,.0f} | {adapters:,.0f} | {adapters / base:.2f} |")


main()
