#!/usr/bin/env python3
"""Puts a library that has no server behind OpenAI's completions, so that the load client can measure it: OpenVINO
GenAI's or transformers' continuous batching. Only what `treadle bench serve --protocol openai` asks is there.

usage: bench/peer_server.py openvino|transformers MODEL.gguf --port PORT [--threads N] [--batch-tokens N]

Run it with a Python that has openvino-genai, or torch and transformers. Prompts are token ids; a chunk is a token. The
engine has a thread of its own, which takes what has come between two of its steps.
"""
import argparse, http.server, json, os, pathlib, queue, sys, threading, time


class OpenVino:
    def __init__(self, options):
        import numpy, openvino, openvino_genai as genai
        self.genai, self.version, self.number, self.running = genai, genai.__version__, 0, []
        self.tensor = lambda ids: openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
        settings = genai.SchedulerConfig()
        settings.cache_size, settings.max_num_batched_tokens = 4, options.batch_tokens
        settings.enable_prefix_caching = False
        self.pipe = genai.ContinuousBatchingPipeline(
            options.model, settings, "CPU", {"INFERENCE_NUM_THREADS": options.threads} if options.threads else {})

    def add(self, ids, new, tokens):
        how = self.genai.GenerationConfig()
        how.max_new_tokens, how.ignore_eos, how.do_sample = new, True, False
        self.running.append((self.pipe.add_request(self.number, self.tensor(ids), how), tokens))
        self.number += 1

    def step(self):
        self.pipe.step()
        for handle, tokens in list(self.running):
            while handle.can_read():
                for output in handle.read().values():
                    for _ in output.generated_ids:
                        tokens.put(1)
            if handle.get_status() != self.genai.GenerationStatus.RUNNING:
                tokens.put(None)
                self.running.remove((handle, tokens))

    def busy(self):
        return bool(self.running)


class Transformers:
    def __init__(self, options):
        import torch, transformers
        self.version, self.counts, self.waiting, self.number = transformers.__version__, {}, {}, 0
        if options.threads:
            torch.set_num_threads(options.threads)
        path = pathlib.Path(options.model)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.bfloat16, attn_implementation="sdpa")
        how = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1 << 16,
                                            max_batch_tokens=options.batch_tokens)
        self.manager = model.init_continuous_batching(generation_config=how)
        self.manager.start()

    def add(self, ids, new, tokens):
        name = f"request_{self.number}"
        self.number += 1
        self.counts[name], self.waiting[name] = 0, tokens
        self.manager.add_request(ids, request_id=name, max_new_tokens=new, streaming=True)

    def step(self):
        told = self.manager.get_result(timeout=1)
        if told is None or told.request_id not in self.waiting:
            return
        tokens = self.waiting[told.request_id]
        for _ in range(len(told.generated_tokens) - self.counts[told.request_id]):
            tokens.put(1)
        self.counts[told.request_id] = len(told.generated_tokens)
        if told.is_finished():
            tokens.put(None)
            del self.waiting[told.request_id], self.counts[told.request_id]

    def busy(self):
        return bool(self.waiting)


def drive(engine, arrivals):
    """The engine's thread. An engine that fails ends the process: its answers would never come."""
    try:
        while True:
            while not arrivals.empty() or not engine.busy():
                engine.add(*arrivals.get())
            engine.step()
    except BaseException as error:
        print(f"peer_server.py: the engine failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version, model, vocab, arrivals, disable_nagle_algorithm = "HTTP/1.1", "", 0, queue.Queue(), True

    def log_message(self, *_):
        pass

    def reply(self, code, body):
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        if self.path != "/v1/models":
            return self.reply(404, {"error": {"message": f"{self.path}: only /v1/models and /v1/completions are here"}})
        self.reply(200, {"data": [{"id": self.model, "vocab_size": self.vocab, "sampling_defaults": None}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = queue.SimpleQueue()
        self.arrivals.put((body["prompt"], body["max_tokens"], tokens))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while tokens.get() is not None:
            self.write('{"choices":[{"index":0,"text":"word"}]}')
        self.write("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def write(self, data):
        text = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))


class Server(http.server.ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=("openvino", "transformers"))
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=49152)
    options = parser.parse_args()
    began = time.monotonic()
    engine = (OpenVino if options.library == "openvino" else Transformers)(options)
    threading.Thread(target=drive, args=(engine, Handler.arrivals), daemon=True).start()
    Handler.model, Handler.vocab = pathlib.Path(options.model).name, options.vocab_size
    print(f"{options.library} {engine.version}: ready in {time.monotonic() - began:.1f} s", flush=True)
    Server(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
