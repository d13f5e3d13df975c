#!/usr/bin/env python3
"""A server of ours as LangChain sees it, which is told an address and no more: chats, streams, tools,
forms, embeddings.
Usage: langchain_client.py TREADLE MODEL (with the packages of langchain_requirements.txt on PYTHONPATH)"""

import sys
import time

import langchain_openai
from langchain_core.messages import ToolMessage
from openai_client import PROMPT, TOOLS, conversation, main
from pydantic import BaseModel


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


def check(client, model):
    server = dict(base_url=str(client.base_url), api_key=client.api_key, model=model)
    chat = langchain_openai.ChatOpenAI(**server, temperature=0, seed=1, max_tokens=60)
    answer = chat.invoke("Name a colour.")
    assert answer.content and answer.usage_metadata["output_tokens"] > 0, answer
    assert "".join(chunk.content for chunk in chat.stream("Name a colour.")) == answer.content, answer
    assert [one.content for one in chat.batch(["Name a colour."] * 3)] == [answer.content] * 3, answer

    messages = conversation()
    with_tools = chat.bind_tools(TOOLS)
    called = with_tools.invoke(messages)
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [("weather", {"city": "Rome"})], called
    streamed = None
    for chunk in with_tools.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    assert [call["args"] for call in streamed.tool_calls] == [{"city": "Rome"}], streamed
    told = chat.invoke([*messages, called, ToolMessage("hail", tool_call_id=called.tool_calls[0]["id"])])
    assert "hail" in told.content, told

    forms = []
    for method in ("json_schema", "function_calling"):
        form = chat.with_structured_output(Person, method=method)
        forms.append(form.invoke("Ann is seven years old."))
        assert isinstance(forms[-1], Person), forms
    *_, last = chat.with_structured_output(Person, method="json_schema").stream("Ann is seven years old.")
    assert last == forms[0], (last, forms)

    embeddings = langchain_openai.OpenAIEmbeddings(**server, check_embedding_ctx_length=False)
    texts = [PROMPT, *(f"Number {i}." for i in range(199))]
    vectors = embeddings.embed_documents(texts)  # in one call
    assert len(vectors) == 200 and vectors[0] == embeddings.embed_query(PROMPT), len(vectors)
    print(f"LangChain: {answer.content[:30]!r}..., streamed, in a batch; weather(Rome), then {told.content!r}; {forms[0]!r}; "
          f"{len(vectors)} embeddings of {len(vectors[0])} numbers")


if __name__ == "__main__":
    began = time.monotonic()
    main(*sys.argv[1:], tools=check)
    version = langchain_openai.__version__
    print(f"LangChain's client: langchain-openai {version}, ok in {time.monotonic() - began:.1f} s")
