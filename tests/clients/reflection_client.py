#!/usr/bin/env python3
"""A server of ours as a client sees it that nobody here wrote: grpcio, which knows nothing of our
.proto files and learns every message by server reflection.
Usage: reflection_client.py TREADLE MODEL (with the packages of reflection_requirements.txt on PYTHONPATH)"""

import socket
import subprocess
import sys
import tempfile
import time

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVICE = "treadle.v1.Inference"
PROMPT = "Once upon a time"
TOKENS = 8


class Client:
    """Calls methods by name with dictionaries; what they mean is asked of the server."""

    def __init__(self, channel):
        self.channel = channel
        self.database = ProtoReflectionDescriptorDatabase(channel)
        self.service = descriptor_pool.DescriptorPool(self.database).FindServiceByName(SERVICE)

    def call(self, method, timeout=120, **request):
        """The answer; a list of them if the method streams."""
        described = self.service.methods_by_name[method]
        inputs, outputs = (message_factory.GetMessageClass(one)
                           for one in (described.input_type, described.output_type))
        make = self.channel.unary_stream if described.server_streaming else self.channel.unary_unary
        call = make(f"/{SERVICE}/{method}", request_serializer=inputs.SerializeToString,
                    response_deserializer=outputs.FromString)
        answer = call(json_format.ParseDict(request, inputs()), timeout=timeout)
        return list(answer) if described.server_streaming else answer


def expect_status(code, words, call):
    """An error is a gRPC status that says what was wrong."""
    try:
        call()
    except grpc.RpcError as error:
        assert error.code() == code and words in error.details(), (error.code(), error.details())
        return
    raise AssertionError(f"no error where {code} was due")


def check(client, expected):
    services = set(client.database.get_services())
    assert {SERVICE, "grpc.health.v1.Health"} <= services, services
    print(f"reflection: {', '.join(sorted(services))}; {len(client.service.methods)} methods of {SERVICE}")

    info = client.call("GetModelInfo")
    assert info.architecture and info.vocab_size > 0 and info.parameters > 0, info
    print(f"GetModelInfo: {info.architecture}, {info.parameters} parameters, context {info.max_context}")

    request = {"text": PROMPT, "sampling": {"temperature": 0},
               "stopping": {"max_new_tokens": TOKENS, "ignore_eos": True}}
    whole = client.call("Generate", **request)
    assert whole.usage.completion_tokens == TOKENS, whole
    assert len(whole.output.token_ids) == TOKENS, whole
    assert whole.output.text == expected, (whole.output.text, expected)
    stream = client.call("GenerateStream", **request)
    assert "".join(one.output.text for one in stream) == expected, stream
    assert stream[0].prompt_info.prompt_tokens == stream[-1].usage.prompt_tokens > 0, stream
    print(f"Generate, GenerateStream: {len(stream)} messages, {expected!r}")

    ids = client.call("Tokenize", text=expected).token_ids.ids
    assert client.call("Detokenize", token_ids={"ids": list(ids)}).text == expected, ids
    expect_status(grpc.StatusCode.INVALID_ARGUMENT, "temperature",
                  lambda: client.call("Generate", text=PROMPT, sampling={"temperature": -1}))
    expect_status(grpc.StatusCode.DEADLINE_EXCEEDED, "", lambda: client.call(
        "Generate", timeout=0.001, text=PROMPT, stopping={"max_new_tokens": 500, "ignore_eos": True}))
    print("Tokenize, Detokenize, and the statuses of a bad request and of a deadline")


def main(treadle, model):
    expected = subprocess.check_output(
        [treadle, "generate", "--model", model, "--temperature", "0", "--ignore-eos", "--prompt", PROMPT,
         "--max-new-tokens", str(TOKENS)], stderr=subprocess.DEVNULL, text=True, timeout=300).removesuffix("\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen([treadle, "serve", "--model", model, "--listen", address, "--http-listen",
                                   "none", "--metrics-listen",
                                   "none", "--kv-memory", "256M"], stderr=log)
        try:
            with grpc.insecure_channel(address) as channel:
                grpc.channel_ready_future(channel).result(timeout=120)
                check(Client(channel), expected)
            server.terminate()
            assert server.wait(timeout=60) == 0, server.returncode
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read())
            raise
        finally:
            server.kill()


if __name__ == "__main__":
    began = time.monotonic()
    main(*sys.argv[1:])
    print(f"foreign client: grpcio {grpc.__version__}, ok in {time.monotonic() - began:.1f} s")
