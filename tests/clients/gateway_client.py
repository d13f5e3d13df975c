#!/usr/bin/env python3
"""Replicas of ours behind a gateway that is not: smg, which has no copy of the model, speaks
vllm.grpc.engine.VllmEngine to them and OpenAI's API to us. The protocol as the server describes it
is the package's; answers are those of a replica's own HTTP; a replica that is killed under load
costs no request that had not begun to stream.
Usage: gateway_client.py TREADLE MODEL (with the packages of gateway_requirements.txt on PYTHONPATH)"""

import collections
import contextlib
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile

import grpc
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

SERVICE = "vllm.grpc.engine.VllmEngine"
REPLICAS = 3
REQUESTS = 48  # under load
CLIENTS = 8
TOKENS = 48  # of each


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def field_of(field):
    """All of a field that is on the wire, and its name."""
    return (field.name, field.number, field.type, field.is_repeated, field.has_presence,
            field.containing_oneof and field.containing_oneof.name,
            field.message_type and field.message_type.full_name)


def check_protocol(channel):
    """What we describe is in the package, alike; and requests that we read have every field."""
    pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    ours, theirs = pool.FindServiceByName(SERVICE), vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
    for method in ours.methods:
        other = theirs.methods_by_name[method.name]
        assert method.server_streaming == other.server_streaming, method.name
        for one, two in ((method.input_type, other.input_type), (method.output_type, other.output_type)):
            assert one.full_name == two.full_name, method.name
    lacking = set(theirs.methods_by_name) - set(ours.methods_by_name)
    assert lacking == {"StartProfile", "StopProfile"}, lacking
    fields = 0
    for file, known in ((ours.file, vllm_engine_pb2), (ours.file.dependencies[0], common_pb2)):
        assert file.package == known.DESCRIPTOR.package, file.package
        for name, message in file.message_types_by_name.items():
            other = known.DESCRIPTOR.message_types_by_name[name]
            for field in message.fields:
                assert field_of(field) == field_of(other.fields_by_name[field.name]), field.full_name
                fields += 1
            if name in ("GenerateRequest", "SamplingParams", "TokenizedInput", "ChoiceConstraint", "AbortRequest"):
                assert set(message.fields_by_name) == set(other.fields_by_name), name
    print(f"protocol: {len(ours.methods)} methods and {fields} fields are those of the package")


def check_engine(stub):
    """What no gateway shows: the archive, and what is said of the server."""
    archive = b"".join(chunk.data for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=60))
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        assert files.testzip() is None
        config = json.loads(files.read("tokenizer_config.json"))
        vocabulary = json.loads(files.read("tokenizer.json"))["model"]["vocab"]
        names = files.namelist()
    info = stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), timeout=60)
    assert config["chat_template"] and len(vocabulary) == info.vocab_size, info
    assert stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest(), timeout=60).server_type == "vllm-grpc"
    assert stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=60).healthy
    print(f"engine: {info.served_model_name}, {len(archive)} bytes of {', '.join(names)}")
    return info.served_model_name


def check_events(stub):
    """Events of the prefix cache, in the package's messages: a prompt's whole blocks, each behind the one before."""
    prompt = [7 + token % 50 for token in range(100)]
    request = vllm_engine_pb2.GenerateRequest(request_id="events", tokenized={"input_ids": prompt},
                                              sampling_params={"max_tokens": 1})
    list(stub.Generate(request, timeout=60))
    chains = {}
    for number, batch in enumerate(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=60), 1):
        assert batch.sequence_number == number and (number > 1 or batch.events[0].HasField("cleared")), batch
        for stored in (event.stored for event in batch.events):
            parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
            for block in stored.blocks:
                chains[block.block_hash] = chains.get(parent, []) + list(block.token_ids)
                parent = block.block_hash
        if prompt[:len(prompt) // block.block_size * block.block_size] in chains.values():
            break
    print(f"events: {len(chains)} blocks of {block.block_size} tokens")


class BrokenStream(Exception):
    pass


def ask(port, path, body=None, events=None):
    """Status, and the answer's JSON; of a stream its events, which `events` has even if it breaks."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request("POST" if body else "GET", path, body and json.dumps(body),
                           {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if not (body or {}).get("stream") or answer.status != 200:
            return answer.status, json.loads(answer.read() or b"null")
        events = [] if events is None else events
        for line in answer:
            if line.strip() == b"data: [DONE]":
                return answer.status, events
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if event.get("error"):
                    raise BrokenStream(event)
                events.append(event)
        raise BrokenStream("no end")


def wait_until(what, check, timeout=120, pause=0.2):
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException, json.JSONDecodeError):
            if check():
                return
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(pause)


class Process:
    """One that is killed at the end, and whose log is shown if something failed."""

    def __init__(self, stack, name, *command, **environment):
        self.log = stack.enter_context(tempfile.NamedTemporaryFile("w+", prefix=name + "-"))
        self.child = subprocess.Popen(command, stdout=self.log, stderr=self.log, env={**os.environ, **environment})
        stack.callback(self.end)
        stack.push(self.show)

    def end(self):
        self.child.kill()
        self.child.wait()

    def show(self, kind, *_):
        if kind:
            sys.stderr.write(f"--- {self.log.name}\n{self.text()[-6000:]}\n")

    def text(self):
        with open(self.log.name, encoding="utf-8", errors="replace") as log:
            return log.read()


class Replica(Process):
    def __init__(self, stack, treadle, model, port):
        self.port, self.http = port, free_port()
        super().__init__(stack, f"replica-{port}", treadle, "serve", "--model", model, "--listen", f"127.0.0.1:{port}",
                         "--http-listen", f"127.0.0.1:{self.http}", "--metrics-listen", "none", "--kv-memory", "256M",
                         "--threads", "1", "--pin-threads", "off", "--max-batch-size", "4", "--log-format", "json",
                         "--kv-events", "on")

    def requests(self):
        """How many have ended."""
        return self.text().count('"event":"request_finished"')


def text_of(events):
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or ""
                   for event in events for choice in event["choices"])


def check_answers(gateway, replica, model):
    """The gateway's answers are the replica's."""
    status, models = ask(gateway, "/v1/models")
    assert status == 200 and model in [entry["id"] for entry in models["data"]], models
    chat = {"model": model, "messages": [{"role": "system", "content": "You are terse."},
                                         {"role": "user", "content": "Name three colours."}],
            "max_completion_tokens": 24, "temperature": 0}
    completion = {"model": model, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    for path, body, text in (
            ("/v1/chat/completions", chat, lambda choice: choice["message"]["content"]),
            ("/v1/completions", completion, lambda choice: choice["text"])):
        for extra in ({}, {"temperature": 0.9, "seed": 7}, {"stop": ["\n", " the"]}, {"ignore_eos": True},
                      {"top_p": 0.5, "seed": 3, "frequency_penalty": 0.5}):
            asked = {**body, **extra}
            expected = ask(replica, path, asked)[1]
            status, answer = ask(gateway, path, asked)
            assert status == 200, answer
            one, two = answer["choices"][0], expected["choices"][0]
            assert text(one) == text(two), (extra, one, two)
            assert one["finish_reason"] == two["finish_reason"], (extra, one, two)
            assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"], (answer, expected)
            assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"], (answer, expected)
            status, events = ask(gateway, path, {**asked, "stream": True})
            assert status == 200 and text_of(events) == text(two), (extra, events, two)
        print(f"{path}: {text(two)!r}, whole and streamed, as the replica's own")
    status, several = ask(gateway, "/v1/completions", {**completion, "n": 2, "temperature": 1, "seed": 1})
    assert status == 200 and [choice["index"] for choice in several["choices"]] == [0, 1], several
    scored, expected = (
        ask(port, "/v1/chat/completions", {**chat, "ignore_eos": True, "logprobs": True, "top_logprobs": 2})[1]
        ["choices"][0]["logprobs"]["content"] for port in (gateway, replica))
    for one, two in zip(scored, expected, strict=True):
        assert abs(one["logprob"] - two["logprob"]) < 1e-5 and len(one["top_logprobs"]) == 2, (one, two)
    status, error = ask(gateway, "/v1/completions", {**completion, "max_tokens": 9000})
    assert status == 400 and "sampling_params.max_tokens is 9000" in json.dumps(error), (status, error)
    print("n, log probabilities, and an error that names the field")


def check_loss(gateway, replicas, stub, model):
    """One of the replicas is killed while all of them work."""
    lock, outcomes = threading.Lock(), collections.Counter()
    numbers = iter(range(REQUESTS))

    def outcome(body):
        events = []
        try:
            status, answer = ask(gateway, "/v1/completions", body, events)
        except (BrokenStream, OSError, http.client.HTTPException) as error:
            return "broken when it had begun" if text_of(events) else f"lost: {error!r}"
        if status != 200:
            return f"refused: {status} {answer}"
        return "whole" if body["stream"] or answer["usage"]["completion_tokens"] == TOKENS else f"short: {answer}"

    def client():
        while (number := next_number()) is not None:
            found = outcome({"model": model, "prompt": f"Number {number} is", "max_tokens": TOKENS, "temperature": 0,
                             "ignore_eos": True, "stream": number % 2 == 0})
            with lock:
                outcomes[found] += 1

    def next_number():
        with lock:
            return next(numbers, None)

    before = [replica.requests() for replica in replicas]
    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    wait_until("work of the first replica", lambda: sum(outcomes.values()) >= CLIENTS and stub.GetLoads(
        vllm_engine_pb2.GetLoadsRequest(), timeout=60).loads[0].num_running_reqs >= 2, pause=0.01)
    replicas[0].child.send_signal(signal.SIGKILL)
    for thread in threads:
        thread.join(240)
    served = [replica.requests() - count for replica, count in zip(replicas, before)]
    print(f"one of {REPLICAS} replicas killed under load: {dict(outcomes)}; served by each: {served}")
    assert sum(outcomes.values()) == REQUESTS, outcomes
    assert set(outcomes) <= {"whole", "broken when it had begun"}, outcomes
    assert min(served[1:]) >= REQUESTS // 8, served


def main(treadle, model):
    with contextlib.ExitStack() as stack:
        replicas = [Replica(stack, treadle, model, free_port()) for _ in range(REPLICAS)]
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{replicas[0].port}"))
        grpc.channel_ready_future(channel).result(timeout=120)
        for replica in replicas:
            wait_until("a replica's readiness", lambda port=replica.http: ask(port, "/ready")[0] == 200)
        check_protocol(channel)
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        name = check_engine(stub)
        check_events(stub)
        gateway = free_port()
        router = Process(stack, "smg", sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1",
                         "--port", str(gateway), "--prometheus-host", "127.0.0.1",
                         "--prometheus-port", str(free_port()), "--backend", "vllm", "--policy", "round_robin",
                         "--worker-urls", *(f"grpc://127.0.0.1:{replica.port}" for replica in replicas),
                         HF_ENDPOINT="http://127.0.0.1:9")  # where no tokenizer is
        body = {"model": name, "prompt": "a", "max_tokens": 1}
        wait_until("an answer of the gateway", lambda: router.child.poll() is not None or
                   ask(gateway, "/v1/completions", body)[0] == 200)
        check_answers(gateway, replicas[0].http, name)
        check_loss(gateway, replicas, stub, name)


if __name__ == "__main__":
    begun = time.monotonic()
    main(*sys.argv[1:])
    print(f"gateway: smg, ok in {time.monotonic() - begun:.1f} s")
