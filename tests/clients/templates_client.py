#!/usr/bin/env python3
"""Chat templates of real models (those that a source package of llama.cpp's bindings brings, and any files that are
named) render as Jinja2, set up as transformers does it, renders them: seven conversations each.
Usage: templates_client.py TREADLE MODEL [TEMPLATE...] (with the packages of templates_requirements.txt on PYTHONPATH)"""

import datetime
import glob
import json
import os
import subprocess
import sys
import tempfile

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATES = ["scripts/fetch_source.sh", "llama_cpp_python", "0.3.36",
             "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e", "scikit_build_core",
             "vendor/llama.cpp/models/templates"]
# These ask for a text that is marked as safe, added to which others are escaped for HTML; here nothing is escaped.
ESCAPED = ["meetkai-functionary-medium-v3.1.jinja"]
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)
TOOLS = """[{"type": "function", "function": {"name": "weather", "description": "Now, <there>.", "parameters":
  {"type": "object", "properties": {"city": {"type": "string", "description": "The city", "enum": ["Bern", "Zürich"]},
  "at": {"type": ["number", "null"], "default": 1.5}}, "required": ["city"]}}}]"""


def call(**content):
    arguments = '{"city": "Z\\u00fcrich", "at": 3, "deep": {"z": [true, null], "big": 18446744073709551616}}'
    return {"role": "assistant", **content, "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "weather"}, "arguments": arguments}]}


def said(role, content):
    return {"role": role, "content": content}


RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "12 °C"}
CHATS = {  # messages, tools
    "plain": ([said("user", "Hello")], None),
    "system": ([said("system", "You are terse. "), said("user", " Who?\n")], None),
    "turns": ([said("system", "Be kind."), said("user", "a"), said("assistant", "<think>\nhm\n</think>\n\nb"),
               said("user", "c"), said("assistant", "d"), said("user", "e")], None),
    "tools": ([said("user", "Weather?"), call(content="Let me see."), RESULT, said("assistant", "Twelve."),
               said("user", "Thanks")], TOOLS),
    "empty": ([said("user", "Weather?"), call(content=""), RESULT], TOOLS),
    "none": ([said("user", "Weather?"), call(content=None), RESULT], TOOLS),
    "unicode": ([said("user", "Ünïcode 😀 'q' \"d\" {{ x }} \u00a0\u2028e\u0301"), said("assistant", "日本語 ½"),
                 said("user", "\u3000 ok ")], None),
}


class Generation(Extension):
    """{% generation %} only marks what it holds."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class Raised(Exception):
    """What a template says by raise_exception."""


def raise_exception(message):
    raise Raised(message)


def environment():
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    made.globals.update(raise_exception=raise_exception, strftime_now=NOW.strftime)
    return made


def shown(messages, content):
    """As a template gets them: arguments as objects; `content` where there is none."""
    made = []
    for message in messages:
        message = dict(message)
        if message["content"] is None:
            message["content"] = content
        if "tool_calls" in message:
            message["tool_calls"] = [{**{key: made[key] for key in ("id", "type")}, "function": {
                **made["function"], "arguments": json.loads(made["arguments"])}} for made in message["tool_calls"]]
        made.append(message)
    return made


def expected(template, messages, given):
    """The text, or None where the template refuses; none where it can be rendered, else an empty text."""
    problem = None
    for content in (None, ""):
        try:
            return template.render(**{**given, "messages": shown(messages, content), "documents": None})
        except Raised:
            return None
        except Exception as error:  # such as a sum of texts and none
            problem = error
    raise problem


def cases(source):
    template = environment().from_string(source)
    rows, failed = [], 0
    for messages, tools in CHATS.values():
        given = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>",
                 "tools": json.loads(tools) if tools else None}
        try:
            row = {**given, "messages": messages, "expected": expected(template, messages, given)}
        except Exception:  # not by the template's will: nobody can say what is right
            failed += 1
            continue
        row.pop("tools")
        rows.append({**row, "tools": tools} if tools else row)
    return rows, failed


def main():
    folder = subprocess.check_output(TEMPLATES, text=True).strip()
    paths = sorted(glob.glob(f"{folder}/vendor/llama.cpp/models/templates/*.jinja")) + sys.argv[3:]
    entries, failed = [], 0
    for path in paths:
        if os.path.basename(path) in ESCAPED:
            continue
        with open(path, encoding="utf-8") as file:
            source = file.read()
        rows, failures = cases(source)
        entries.append({"name": os.path.basename(path), "template": source, "cases": rows})
        failed += failures
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump({"now": NOW.strftime("%Y-%m-%d %H:%M:%S"), "templates": entries}, file)
        file.flush()
        build = os.path.dirname(sys.argv[1])
        subprocess.check_call(["cmake", "--build", build, "--target", "chat_template_test"], stdout=subprocess.DEVNULL)
        test = f"{build}/tests/models/chat_template_test"
        ran = subprocess.run([test, "--gtest_filter=*RendersWhatTransformersRenders", "--gtest_brief=1"], check=False,
                             env={**os.environ, "TREADLE_CHAT_TEMPLATES": file.name})
    count = sum(len(entry["cases"]) for entry in entries)
    print(f"{len(entries)} templates, {count} conversations; {failed} fail in Jinja2 itself, {len(ESCAPED)} templates "
          f"that escape for HTML are left out: {'all agree' if ran.returncode == 0 else 'FAILED, see above'}")
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
