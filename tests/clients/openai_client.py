#!/usr/bin/env python3
"""A server of ours as OpenAI's own Python client sees it: every endpoint and parameter, whole and
streamed, tools, errors and cancellation; answers are those that gRPC's client gets.
Usage: openai_client.py TREADLE MODEL (with the packages of openai_requirements.txt on PYTHONPATH)"""

import array
import json
import re
import subprocess
import sys
import tempfile
import time

import openai

PROMPT = "Once upon a time"
MESSAGES = [{"role": "system", "content": "You are terse."},
            {"role": "user", "content": [{"type": "text", "text": "Name a colour."}]}]


def generate(grpc, *flags):
    """What gRPC answers."""
    return subprocess.check_output([*grpc, *flags], text=True, timeout=300,
                                   stderr=subprocess.DEVNULL).removesuffix("\n")


def joined(stream, text_of):
    """The texts of a stream, choice by choice, and its last chunk."""
    texts, last = {}, None
    for last in stream:
        for choice in last.choices:
            texts[choice.index] = texts.get(choice.index, "") + (text_of(choice) or "")
    return texts, last


def expect_error(kind, words, call):
    try:
        call()
    except kind as error:
        assert words in str(error), error
        return error
    raise AssertionError(f"no {kind.__name__} where one was due")


def check_completions(client, model, grpc):
    ask = dict(model=model, prompt=PROMPT, max_tokens=12, temperature=0.9, seed=7, extra_body={"ignore_eos": True})
    expected = generate(grpc, "--prompt", PROMPT, "--max-new-tokens", "12", "--temperature", "0.9",
                        "--seed", "7", "--ignore-eos")
    whole = client.completions.create(**ask)
    assert whole.choices[0].text == expected, (whole.choices[0].text, expected)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 12, whole
    assert re.fullmatch("fp_[0-9a-f]{10}", whole.system_fingerprint), whole
    texts, last = joined(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}),
                         lambda choice: choice.text)
    assert texts == {0: expected} and last.usage == whole.usage, (texts, last)
    ids = client.post("/../tokenize", cast_to=object, body={"prompt": PROMPT})["tokens"]
    assert client.post("/../detokenize", cast_to=object, body={"tokens": ids})["prompt"] == PROMPT
    several = client.completions.create(**{**ask, "prompt": [ids, ids], "n": 2})
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3], several
    assert several.choices[0].text == several.choices[2].text == expected, several
    print(f"completions: {expected!r}, whole, streamed, from ids, of several prompts and candidates")

    scored = client.completions.create(model=model, prompt=ids, max_tokens=0, echo=True, logprobs=3)
    logprobs = scored.choices[0].logprobs
    assert scored.choices[0].text == PROMPT and "".join(logprobs.tokens) == PROMPT, scored
    assert logprobs.token_logprobs[0] is None and all(value <= 0 for value in logprobs.token_logprobs[1:]), scored
    assert len(logprobs.top_logprobs[1]) in (3, 4) and logprobs.text_offset[0] == 0, scored
    greedy = dict(model=model, prompt=PROMPT, max_tokens=20, temperature=0)
    text = client.completions.create(**greedy).choices[0].text
    stop = text[4:8]
    stopped = client.completions.create(**greedy, stop=[stop, "\n\n\n"]).choices[0]
    assert stopped.text == text[:text.index(stop)] and stopped.finish_reason == "stop", (text, stopped)
    biased = client.completions.create(**greedy, logit_bias={str(ids[0]): 100}).choices[0].text
    assert biased == "Once" * 20, biased
    extras = client.completions.create(
        **{**greedy, "temperature": 1}, seed=3, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.5, user="someone",
        extra_body={"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 3, "stop_token_ids": [0],
                    "prompt_logprobs": 1, "return_token_ids": True, "add_special_tokens": False})
    assert extras.choices[0].prompt_token_ids == ids and len(extras.choices[0].prompt_logprobs) == len(ids), extras
    print("completions: echo, log probabilities, stop, logit_bias, penalties, and what vLLM's users add")


def check_chat(client, model, grpc):
    ask = dict(model=model, messages=MESSAGES, max_completion_tokens=10, temperature=0, seed=1)
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2, n=2)
    message = whole.choices[0].message
    assert message.role == "assistant" and message.content == whole.choices[1].message.content, whole
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens // 2 and len(content[0].top_logprobs) == 2, whole
    assert bytes(content[0].bytes).decode() == content[0].token, content[0]
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant", chunks[0]
    texts, last = joined(chunks, lambda choice: choice.delta.content)
    assert texts == {0: message.content} and last.choices[0].finish_reason, (texts, last)
    one = [{"role": "user", "content": "Name a colour."}]
    expected = generate(grpc, "--chat", "Name a colour.", "--temperature", "0", "--max-new-tokens", "10")
    plain = client.chat.completions.create(model=model, messages=one, max_tokens=10, temperature=0)
    assert plain.choices[0].message.content.strip() == expected.strip(), (plain, expected)
    print(f"chat: {message.content!r}, whole, streamed, with log probabilities")


def check_embeddings(client, model):
    ids = client.post("/../tokenize", cast_to=object, body={"prompt": PROMPT})["tokens"]
    create = client.embeddings.create
    several = create(model=model, input=[PROMPT, "A colour."])  # in base64: the client's default
    assert [entry.index for entry in several.data] == [0, 1], several.usage
    numbers = create(model=model, input=ids, encoding_format="float")
    texts, sent = (array.array("f", answer.data[0].embedding) for answer in (numbers, several))
    assert texts == sent, "numbers as text and in base64 differ"
    assert numbers.usage.prompt_tokens == numbers.usage.total_tokens == len(ids), numbers.usage
    for entry in several.data:
        assert abs(sum(value * value for value in entry.embedding) - 1) < 1e-5, entry.index
    short = create(model=model, input=ids, encoding_format="float", dimensions=8).data[0].embedding
    length = sum(value * value for value in numbers.data[0].embedding[:8]) ** 0.5
    assert all(abs(a * length - b) < 1e-5 for a, b in zip(short, numbers.data[0].embedding, strict=False)), short
    assert len(short) == 8, short
    error = expect_error(openai.BadRequestError, "dimensions is 1000000, expected 1 to",
                         lambda: create(model=model, input="a", dimensions=1000000))
    assert error.param == "dimensions", error.body
    print(f"embeddings: of {len(several.data[0].embedding)} numbers, in base64 and not, from texts and ids")


# As long as the default model's own, in whose place it is put.
TOOL_TEMPLATE = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": \
{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def with_tools(model, folder):
    """A copy of a GGUF file, with a chat template that knows tools."""
    data = bytearray(open(model, "rb").read())
    at = data.index(b"tokenizer.chat_template") + len(b"tokenizer.chat_template") + 4
    length = int.from_bytes(data[at:at + 8], "little")
    text = TOOL_TEMPLATE.encode()
    data[at + 8:at + 8 + length] = text + b"{#" + b" " * (length - len(text) - 4) + b"#}"
    with open(f"{folder}/tools.gguf", "wb") as file:
        file.write(data)
    return file.name


TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]


def conversation():
    """What a small model goes on with by the call of a tool."""
    messages = []
    for city, weather in (("Bern", "rain"), ("Oslo", "snow"), ("Lima", "fog")):
        call = {"id": city, "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "%s"}' % city}}
        messages += [{"role": "user", "content": f"What is the weather in {city}?"},
                     {"role": "assistant", "content": None, "tool_calls": [call]},
                     {"role": "tool", "tool_call_id": city, "content": weather},
                     {"role": "assistant", "content": f"The weather in {city} is {weather}."}]
    return [*messages, {"role": "user", "content": "What is the weather in Rome?"}]


def check_tools(client, model):
    messages = conversation()
    ask = dict(model=model, messages=messages, tools=TOOLS, temperature=0, max_tokens=60)
    whole = client.chat.completions.create(**ask).choices[0]
    call = whole.message.tool_calls[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None, whole
    assert call.type == "function" and call.function.name == "weather", whole
    assert json.loads(call.function.arguments) == {"city": "Rome"}, whole
    with client.chat.completions.stream(**ask) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls" and not streamed.message.content, streamed
    assert [found.function.arguments for found in streamed.message.tool_calls] == [call.function.arguments], streamed
    messages += [whole.message, {"role": "tool", "tool_call_id": call.id, "content": "hail"}]
    told = client.chat.completions.create(**{**ask, "messages": messages, "tool_choice": "none"}).choices[0]
    assert told.finish_reason == "stop" and not told.message.tool_calls and "hail" in told.message.content, told
    print(f"tools: {call.function.name}({call.function.arguments}), whole and streamed; then {told.message.content!r}")

    check_demanded_calls(client, model)


def check_demanded_calls(client, model):
    # Nothing in these messages would lead a small model to a call.
    tools = [*TOOLS, {"type": "function", "function": {"name": "add", "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": [1, 2]}}, "required": ["a", "b"],
        "additionalProperties": False}}}]
    demand = dict(model=model, messages=MESSAGES, tools=tools, temperature=1, seed=3, max_tokens=200)
    named = {"type": "function", "function": {"name": "add"}}
    called = set()
    for choice in ("required", named):
        for seed in range(5):
            found = client.chat.completions.create(**{**demand, "seed": seed}, tool_choice=choice,
                                                   parallel_tool_calls=False).choices[0]
            if found.finish_reason == "length":  # within a name of a city without end
                continue
            assert found.finish_reason == "tool_calls" and not found.message.content, found
            (call,) = found.message.tool_calls
            called.add(call.function.name)
            arguments = json.loads(call.function.arguments)
            if call.function.name == "add":
                assert isinstance(arguments["a"], int) and arguments["b"] in (1, 2) and len(arguments) == 2, found
            else:
                assert choice == "required" and isinstance(arguments["city"], str), found
    assert "add" in called, called
    print(f"tools: demanded calls of {sorted(called)}, all by their schemas")


def check_errors(client, model):
    create = client.chat.completions.create
    error = expect_error(openai.BadRequestError, "top_p is 2, expected (0, 1]",
                         lambda: create(model=model, messages=MESSAGES, top_p=2.0))
    assert error.param == "top_p" and error.type == "invalid_request_error", error.body
    expect_error(openai.BadRequestError, 'modalities is ["text","audio"], expected ["text"]',
                 lambda: create(model=model, messages=MESSAGES, modalities=["text", "audio"]))
    expect_error(openai.BadRequestError, 'tool_choice is "any", expected "auto"',
                 lambda: create(model=model, messages=MESSAGES, tools=TOOLS, tool_choice="any"))
    assert expect_error(openai.NotFoundError, "does not exist",
                        lambda: create(model="gpt-5", messages=MESSAGES)).code == "model_not_found"
    expect_error(openai.AuthenticationError, "",
                 lambda: client.with_options(api_key="stranger-0123456789").models.list())
    late = {"X-Request-Timeout": "0.3", "X-Request-Id": "late"}
    error = expect_error(openai.InternalServerError, "deadline", lambda: client.completions.create(
        model=model, prompt=PROMPT, max_tokens=4000, extra_body={"ignore_eos": True}, extra_headers=late))
    assert error.status_code == 504 and error.response.headers["x-request-id"] == "late", error.response.headers
    stream = client.completions.create(model=model, prompt=PROMPT, max_tokens=4000, stream=True,
                                       extra_body={"ignore_eos": True}, extra_headers={"X-Request-Id": "left"})
    next(iter(stream))
    stream.close()
    print("errors: 400, 401, 404, 504; and a stream that its reader left")


def main(treadle, model, tools=None):
    """`tools`: what to check of a model that knows tools, by its client and name, instead of all else."""
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w+") as log:
        with open(f"{folder}/keys", "w") as keys:
            keys.write("client-0123456789abcdef client\n")
        if tools:
            model = with_tools(model, folder)
        server = subprocess.Popen(
            [treadle, "serve", "--model", model, "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0",
             "--metrics-listen", "none", "--kv-memory", "256M", "--embedding-pooling", "mean",
             "--api-keys-file", f"{folder}/keys"], stderr=log)

        def logged(pattern):
            for _ in range(1200):
                if found := re.search(pattern, open(f"{folder}/log").read()):
                    return found
                time.sleep(0.1)
            raise AssertionError(f"not in the log: {pattern}")

        try:
            base, target = logged(r"listening on (http://\S+) \(page and OpenAI API\), gRPC on (\S+),").groups()
            logged("ready: ")
            grpc = [treadle, "generate", "--target", target, "--api-key-file", f"{folder}/keys"]
            client = openai.OpenAI(base_url=base + "/v1", api_key="client-0123456789abcdef", max_retries=0, timeout=120)
            name = client.models.list().data[0].id
            assert client.models.retrieve(name).id == name
            if tools:
                return tools(client, name)
            check_completions(client, name, grpc)
            check_chat(client, name, grpc)
            check_embeddings(client, name)
            check_demanded_calls(client, name)  # its template knows no tools
            check_errors(client, name)
            logged("request_id=left .*status=CANCELLED")
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
    main(*sys.argv[1:], tools=check_tools)
    print(f"OpenAI's client: openai {openai.__version__}, ok in {time.monotonic() - began:.1f} s")
