#!/usr/bin/env python3
"""What the prefix cache brings and costs, over HTTP: servers of one model take turns with the same requests.

usage: bench/prefix_cache.py MODEL [--llama-server PROGRAM] [--openvino] [--rounds N] [--only WHAT,...]
                             [--treadle PROGRAM] [--serve-flags "FLAG ..."]

--llama-server adds llama.cpp's server with 16 slots and its prompt cache, --openvino OpenVINO GenAI's continuous batching
with its prefix cache, in this process: run it with a Python that has the package openvino-genai.

second turn   time to first token of a conversation's second turn, whose first had 1,024 tokens, by that of the first
shared        32 requests at once that share 1,024 tokens and have 32 of their own, 16 new tokens each
apart         the same requests with nothing in common, where the cache brings nothing
alike         time to first token of three requests in turn that share 2,000 tokens and have 200 of their own
"""
import argparse, collections, concurrent.futures, json, random, statistics, subprocess, time, urllib.request

SHARED, OWN, REQUESTS, NEW = 1024, 32, 32, 16
MEASURES = ("second turn", "shared", "apart", "alike")


class Server:
    def __init__(self, name, port, command, more):
        self.name, self.url, self.more = name, f"http://127.0.0.1:{port}", more
        self.process = subprocess.Popen([*command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/v1/models").read()
                return
            except OSError:
                if self.process.poll() is not None:
                    raise SystemExit(f"{command}: ended with {self.process.returncode}")
                time.sleep(0.2)

    def ask(self, prompt, new=NEW):
        """Seconds to the first token and in all, and the answer's tokens or text."""
        body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True, "ignore_eos": True,
                **self.more}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        began, first, answer = time.monotonic(), None, []
        for line in urllib.request.urlopen(request):
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:]).get("choices", []):
                first = first or time.monotonic() - began
                answer += choice.get("token_ids") or [choice.get("text")]
        return first, time.monotonic() - began, answer

    def stop(self):
        self.process.terminate()
        self.process.wait()

    def second_turn(self, draw):
        prompt = draw(SHARED)
        first, _, answer = self.ask(prompt)
        said = [token for token in answer if isinstance(token, int)] or draw(NEW)
        second, _, _ = self.ask(prompt + said + draw(OWN))
        return second / first

    def alike(self, draw):
        shared = draw(2000)
        return {f"{which} alike": self.ask(shared + draw(200))[0] for which in ("1st", "2nd", "3rd")}

    def burst(self, prompts):
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(REQUESTS) as clients:
            answers = [answer for _, _, answer in clients.map(self.ask, prompts)]
        return REQUESTS / (time.monotonic() - began), answers


class OpenVino:
    """The same requests, in this process: the package has no server."""
    name = "openvino"

    def __init__(self, model):
        import numpy, openvino, openvino_genai
        self.genai, self.asked = openvino_genai, 0
        self.tensor = lambda ids: openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
        settings = openvino_genai.SchedulerConfig()
        settings.cache_size, settings.max_num_batched_tokens, settings.enable_prefix_caching = 4, 512, True
        self.pipe = openvino_genai.ContinuousBatchingPipeline(model, settings, "CPU")

    def ask(self, prompts):
        """Seconds to the first token of any, and in all."""
        how = self.genai.GenerationConfig()
        how.max_new_tokens, how.ignore_eos, how.do_sample = NEW, True, False
        began, first = time.monotonic(), None
        handles = [self.pipe.add_request(self.asked + i, self.tensor(ids), how) for i, ids in enumerate(prompts)]
        self.asked += len(prompts)
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
            if first is None and any(handle.can_read() for handle in handles):
                first = time.monotonic() - began
        return first, time.monotonic() - began, [each.generated_ids for handle in handles for each in handle.read_all()]

    def alike(self, draw):
        shared = draw(2000)
        return {f"{which} alike": self.ask([shared + draw(200)])[0] for which in ("1st", "2nd", "3rd")}

    def second_turn(self, draw):
        prompt = draw(SHARED)
        first, _, answers = self.ask([prompt])
        second, _, _ = self.ask([prompt + list(answers[0]) + draw(OWN)])
        return second / first

    def burst(self, prompts):
        _, seconds, answers = self.ask(prompts)
        return REQUESTS / seconds, answers

    def stop(self):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--llama-server")
    parser.add_argument("--openvino", action="store_true")
    parser.add_argument("--treadle", type=str.split, default=["build/treadle"])
    parser.add_argument("--serve-flags", type=str.split, default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=lambda text: text.split(","), default=MEASURES)
    options = parser.parse_args()
    treadle = [*options.treadle, "serve", "--model", options.model, "--metrics-listen", "none", "--listen",
               "127.0.0.1:0", "--log-requests", "off", "--kv-memory", "4G", *options.serve_flags]
    servers = [Server(name, port, [*treadle, "--http-listen", f"127.0.0.1:{port}", "--prefix-cache", name],
                      {"return_token_ids": True}) for name, port in (("on", 18590), ("off", 18591))]
    if options.llama_server:
        servers.append(Server("llama-server", 18592, [
            options.llama_server, "-m", options.model, "--port", "18592", "-t", "2", "-np", "16", "-c", str(16 * 2048),
            "--cache-reuse", "0"], {"cache_prompt": True}))
    if options.openvino:
        servers.append(OpenVino(options.model))
    seeds = random.Random(1)
    draw = lambda count: [seeds.randrange(100, 1000) for _ in range(count)]
    found = collections.defaultdict(list)
    for number in range(options.rounds + 1):
        shared = draw(SHARED)
        prompts = {"shared": [shared + draw(OWN) for _ in range(REQUESTS)],
                   "apart": [draw(SHARED + OWN) for _ in range(REQUESTS)]}
        prompts = {what: asked for what, asked in prompts.items() if what in options.only}
        answers = {}
        for server in sorted(servers, key=lambda server: server.name, reverse=number % 2 == 1):
            measured = {"second turn": server.second_turn(draw)} if "second turn" in options.only else {}
            if "alike" in options.only:
                measured |= server.alike(draw)
            for what, asked in prompts.items():
                measured[what], answers[server.name, what] = server.burst(asked)
            for what, value in measured.items():
                if number > 0:  # the first warms up
                    found[server.name, what].append(value)
            print(number, server.name, {what: round(value, 3) for what, value in measured.items()}, flush=True)
        for what in prompts:
            assert answers["on", what] == answers["off", what], f"{what}: the cache changes answers"
    for (name, what), values in sorted(found.items(), key=lambda entry: entry[0][1]):
        unit = "of the first's" if what == "second turn" else "s" if what.endswith("alike") else "requests/s"
        print(f"{what:12} {name:12} {statistics.median(values):8.3f} {unit} ({min(values):.3f} to {max(values):.3f})")
    for server in servers:
        server.stop()


if __name__ == "__main__":
    main()
