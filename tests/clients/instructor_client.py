#!/usr/bin/env python3
"""A server of ours as Instructor sees it: forms that answers must have, by tools and by schemas, whole and in parts,
through OpenAI's client (its second generation, which Instructor wants) and Anthropic's.
Usage: instructor_client.py TREADLE MODEL (with the packages of instructor_requirements.txt on PYTHONPATH)"""

import sys
import time
from importlib.metadata import version
from typing import Literal

import anthropic
import instructor
from openai_client import main
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int = Field(ge=0, le=150)


class Order(BaseModel):
    size: Literal["small", "large"]
    people: list[Person] = Field(min_length=1, max_length=2)
    note: str | None


def check(client, model):
    ask = dict(model=model, temperature=0, max_tokens=200, max_retries=0,
               messages=[{"role": "user", "content": "Ann is seven years old, Bob is nine."}])
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        patched = instructor.from_openai(client, mode=mode)
        for form in (Person, Order):
            found, whole = patched.chat.completions.create_with_completion(response_model=form, **ask)
            assert isinstance(found, form) and whole.usage.completion_tokens > 0, (mode, found)
        *parts, last = patched.chat.completions.create_partial(response_model=Person, **ask)
        assert parts and isinstance(last.name, str) and isinstance(last.age, int), (mode, last)
        print(f"Instructor, {mode.value}: {found!r}, in {len(parts) + 1} parts")

    own = anthropic.Anthropic(base_url=str(client.base_url).removesuffix("/v1/"), api_key=client.api_key, max_retries=0)
    patched = instructor.from_anthropic(own, mode=instructor.Mode.ANTHROPIC_TOOLS)
    found = patched.messages.create(response_model=Person, model=model, max_tokens=200, max_retries=0,
                                    messages=ask["messages"], extra_body={"temperature": 0})
    assert isinstance(found, Person), found
    print(f"Instructor, Anthropic's tools: {found!r}")


if __name__ == "__main__":
    began = time.monotonic()
    main(*sys.argv[1:], tools=check)
    print(f"Instructor: instructor {version('instructor')}, openai {version('openai')}, anthropic "
          f"{anthropic.__version__}, ok in {time.monotonic() - began:.1f} s")
