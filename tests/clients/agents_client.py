#!/usr/bin/env python3
"""A server of ours as agents see it: OpenAI's Responses API by its own client and its agents SDK, and Anthropic's
Messages API by Anthropic's client, all unchanged; whole, streamed, with tools, forms and errors.
Usage: agents_client.py TREADLE MODEL (with the packages of agents_requirements.txt on PYTHONPATH)"""

import asyncio
import json
import sys
import time

import agents
import anthropic
import openai
from openai_client import conversation, expect_error, main
from pydantic import BaseModel

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
          "additionalProperties": False}


class Person(BaseModel):
    name: str
    age: int


def check_responses(client, model):
    responses = client.responses
    ask = dict(model=model, input="Name a colour.", instructions="You are terse.", temperature=0, max_output_tokens=20)
    first = responses.create(**ask)
    assert first.output_text and first.usage.output_tokens > 0 and first.error is None, first
    chat = client.chat.completions.create(model=model, temperature=0, max_tokens=20, messages=[
        {"role": "system", "content": ask["instructions"]}, {"role": "user", "content": ask["input"]}])
    assert chat.choices[0].message.content == first.output_text, (chat, first)
    assert responses.retrieve(first.id) == first

    with responses.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events))), events
    assert final.output_text == first.output_text and final.status == first.status, final
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == final.output_text

    second = responses.create(model=model, input="Another one.", previous_response_id=first.id, max_output_tokens=20)
    assert second.previous_response_id == first.id and second.usage.input_tokens > first.usage.input_tokens, second
    responses.delete(first.id)
    expect_error(openai.NotFoundError, "is not kept", lambda: responses.retrieve(first.id))
    error = expect_error(openai.BadRequestError, "previous_response_id is", lambda: responses.create(
        model=model, input="More.", previous_response_id=first.id))
    assert error.param == "previous_response_id", error.body
    not_kept = responses.create(**ask, store=False)
    expect_error(openai.NotFoundError, "is not kept", lambda: responses.retrieve(not_kept.id))

    parsed = responses.parse(model=model, input="Ann is seven years old.", text_format=Person, temperature=0,
                             max_output_tokens=60).output_parsed
    assert isinstance(parsed, Person), parsed
    expect_error(openai.BadRequestError, 'input[0].content[0].type is "input_image"', lambda: responses.create(
        model=model, input=[{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]))
    print(f"responses: {first.output_text!r}, streamed in {len(events)} events, gone on from, deleted; {parsed!r}")


def items():
    """The conversation of the other checks as items of the Responses API."""
    for message in conversation():
        for call in message.get("tool_calls", []):
            yield {"type": "function_call", "call_id": call["id"], **call["function"]}
        if message["role"] == "tool":
            yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
        elif message["content"]:
            yield {"role": message["role"], "content": message["content"]}


def check_response_tools(client, model):
    tool = {"type": "function", "name": "weather", "description": "The weather in a city.", "parameters": SCHEMA,
            "strict": True}
    ask = dict(model=model, input=list(items()), tools=[tool], temperature=0, max_output_tokens=60)
    called = client.responses.create(**ask)
    (call,) = called.output
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Rome"}, called
    with client.responses.stream(**ask) as stream:
        streamed = stream.get_final_response().output
    assert [(item.type, item.arguments) for item in streamed] == [("function_call", call.arguments)], streamed
    told = client.responses.create(**{**ask, "tool_choice": "none"} | dict(
        previous_response_id=called.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "hail"}]))
    assert "hail" in told.output_text, told
    print(f"responses: {call.name}({call.arguments}), whole and streamed; then {told.output_text!r}")


def check_agents(client, model):
    asked = []

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "hail"

    own = openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0)
    agents.set_tracing_disabled(True)
    settings = dict(name="Forecaster", model_settings=agents.ModelSettings(temperature=0, max_tokens=60))
    agent = agents.Agent(**settings, tools=[weather], model=agents.OpenAIResponsesModel(model=model, openai_client=own))
    chat = agents.OpenAIChatCompletionsModel(model=model, openai_client=own)  # the API that other servers have

    async def run():
        older = await agents.Runner.run(agents.Agent(**settings, tools=[weather], model=chat), list(items()), max_turns=3)
        formed = await agents.Runner.run(agents.Agent(**settings, output_type=Person, model=chat), "Ann is seven.")
        assert asked.pop() == "Rome" and "hail" in older.final_output, older
        assert isinstance(formed.final_output, Person), formed
        whole = await agents.Runner.run(agent, list(items()), max_turns=3)
        streamed = agents.Runner.run_streamed(agent, list(items()), max_turns=3)
        kinds = [event.type async for event in streamed.stream_events()]
        return whole.final_output, streamed.final_output, kinds

    whole, streamed, kinds = asyncio.run(run())
    assert asked == ["Rome", "Rome"] and "hail" in whole and streamed == whole, (asked, whole, streamed)
    assert "raw_response_event" in kinds and "run_item_stream_event" in kinds, kinds
    print(f"agents SDK: weather(Rome), then {whole!r}; the same streamed")


def turns():
    """The conversation of the other checks as Anthropic's messages."""
    for message in conversation():
        if message["role"] == "tool":
            yield {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}]}
        elif message["content"]:
            yield {"role": message["role"], "content": message["content"]}
        else:
            yield {"role": "assistant", "content": [
                {"type": "tool_use", "id": call["id"], "name": call["function"]["name"],
                 "input": json.loads(call["function"]["arguments"])} for call in message["tool_calls"]]}


def anthropics(client):
    return anthropic.Anthropic(base_url=str(client.base_url).removesuffix("/v1/"), api_key=client.api_key,
                               max_retries=0, timeout=120)


def check_messages(client, model):
    messages = anthropics(client).messages
    ask = dict(model=model, max_tokens=20, temperature=0, messages=[{"role": "user", "content": "Name a colour."}],
               system=[{"type": "text", "text": "You are terse.", "cache_control": {"type": "ephemeral"}}])
    ask["extra_body"] = {"temperature": ask.pop("temperature")}
    whole = messages.create(**ask, metadata={"user_id": "u"})
    (block,) = whole.content
    assert block.text and whole.role == "assistant" and whole._request_id, whole
    chat = client.chat.completions.create(model=model, temperature=0, max_tokens=20, messages=[
        {"role": "system", "content": "You are terse."}, {"role": "user", "content": "Name a colour."}])
    assert chat.choices[0].message.content == block.text, (chat, whole)
    with messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text == final.content[0].text and final.stop_reason == whole.stop_reason, final
    usage = whole.usage
    counted = messages.count_tokens(model=model, messages=ask["messages"], system=ask["system"]).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens, (counted, usage)
    stopped = messages.create(**ask, stop_sequences=[text[3:5]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[3:5]), stopped
    # More than the context has.
    assert messages.create(**{**ask, "max_tokens": 64000, "stop_sequences": [text[3:5]]}).content == stopped.content
    parsed = messages.parse(model=model, max_tokens=60, output_format=Person, extra_body=ask["extra_body"], messages=[
        {"role": "user", "content": "Ann is seven years old."}]).parsed_output
    assert isinstance(parsed, Person), parsed

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
    error = expect_error(anthropic.BadRequestError, 'messages[0].content[0].type is "image"', lambda: messages.create(
        **{**ask, "messages": [{"role": "user", "content": [image]}]}))
    assert error.body["error"]["type"] == "invalid_request_error", error.body
    expect_error(anthropic.NotFoundError, "does not exist", lambda: messages.create(**{**ask, "model": "claude"}))
    expect_error(anthropic.AuthenticationError, "authentication_error",
                 lambda: anthropics(client).with_options(api_key="stranger-0123456789").messages.create(**ask))
    print(f"messages: {text!r}, whole and streamed, {counted} tokens; {parsed!r}; errors 400, 401, 404")


def check_message_tools(client, model):
    messages = anthropics(client).messages
    tool = {"name": "weather", "description": "The weather in a city.", "input_schema": SCHEMA}
    talk = list(turns())
    ask = dict(model=model, max_tokens=60, messages=talk, tools=[tool], extra_body={"temperature": 0})
    called = messages.create(**ask)
    (use,) = called.content
    assert called.stop_reason == "tool_use" and (use.type, use.input) == ("tool_use", {"city": "Rome"}), called
    with messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    assert [block.input for block in streamed.content] == [use.input], streamed
    talk += [called.to_param(), {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "hail"}]}]}]
    told = messages.create(**{**ask, "messages": talk, "tool_choice": {"type": "none"}})
    assert told.stop_reason == "end_turn" and "hail" in told.content[0].text, told
    forced = messages.create(**{**ask, "messages": talk, "tool_choice": {"type": "tool", "name": "weather"}})
    assert forced.stop_reason in ("tool_use", "max_tokens"), forced
    print(f"messages: {use.name}({json.dumps(use.input)}), whole and streamed; then {told.content[0].text!r}")


def check(client, model):
    check_responses(client, model)
    check_response_tools(client, model)
    check_agents(client, model)
    check_messages(client, model)
    check_message_tools(client, model)


if __name__ == "__main__":
    began = time.monotonic()
    main(*sys.argv[1:], tools=check)
    print(f"Agents: openai {openai.__version__}, openai-agents {agents.version.__version__}, "
          f"anthropic {anthropic.__version__}, ok in {time.monotonic() - began:.1f} s")
