#!/usr/bin/env python3
"""Writes tests/testdata/chat_templates.json: templates, chats, and what transformers renders.

The templates are this project's own. Each speaks the prompt format of one model family and uses the
constructs that family's template uses. Run from the repository's root, with transformers installed.
"""
import json
from datetime import datetime

from transformers.utils.chat_template_utils import _compile_jinja_template

NOW = datetime(2026, 1, 2, 3, 4, 5)

TEMPLATES = {
"chatml": "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
"llama-2": """{% if messages and messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}{% else %}{% set turns = messages %}{% set system = false %}{% endif %}
{% for turn in turns %}
{% if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate, found ' ~ turn.role) }}{% endif %}
{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + turn['content'] %}{% else %}{% set content = turn['content'] %}{% endif %}
{% if turn['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif turn['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
"llama-3": """{% for message in messages %}{% set block = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set block = bos_token + block %}{% endif %}{{ block }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
"llama-3.2": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "1 Jan 2000" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{#- The first message may be the system's. -#}
{%- if messages|length > 0 and messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: tools\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}{{- call.name }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
"mistral-v1": """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must take turns') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Unknown role') }}{% endif %}{% endfor %}""",
"mistral-v3": """{%- if messages and messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in rest if message.role != "tool" %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("turns") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}
{{- users|length }}""",
"zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
""",
"gemma": """{{ bos_token }}{% if messages and messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}""",
"phi-3": """{% for message in messages %}{% if message['role'] in ['user', 'system'] %}{{'<|' ~ message['role'] ~ '|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}""",
"phi-4": """{% for message in messages %}{% if (message['role'] == 'system') %}{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'assistant') %}{{'<|im_start|>assistant<|im_sep|>'}}{% generation %}{{message['content'] + '<|im_end|>'}}{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}""",
"qwen2.5": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- else %}
    {%- if messages and messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
"qwen3": """{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not(message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning is string %}
            {%- set thought = message.reasoning %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
"deepseek": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(is_first=false, is_tool=false, system_prompt='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<|User|>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{'<|Assistant|>' + content + '<|end|>'}}{%- endif %}{%- endfor -%}{% if add_generation_prompt and not ns.is_tool %}{{'<|Assistant|>'}}{% endif %}""",
"command-r": """{{ bos_token }}{%- macro turn(kind, content, close=true) -%}
{{ '<|START_OF_TURN_TOKEN|><|' ~ kind|upper ~ '_TOKEN|>' ~ content }}{% if close %}{{ '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{%- endmacro %}
{%- set names = {'user': 'user', 'assistant': 'chatbot', 'system': 'system'} %}
{%- for message in messages %}{{ turn(names.get(message.role, 'user'), message.content|trim) }}{% endfor %}
{%- if add_generation_prompt %}{{ turn('chatbot', '', close=false) }}{% endif %}""",
"olmo": """{{ eos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
"vicuna": """{%- for message in messages -%}
  {%- if message.role == 'system' -%}{{ message.content ~ ' ' }}
  {%- elif message.role == 'user' -%}{{ 'USER: ' ~ message.content ~ ' ' }}
  {%- else -%}{{ 'ASSISTANT: ' ~ message.content ~ eos_token }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}""",
"granite": """{%- if messages and messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set system %}
Today is {{ strftime_now('%B %d, %Y') }}.
   You are a model.
{%- endset %}{%- set loop_messages = messages %}{%- endif %}
{{- '<|role|>system<|end|>' + system + '\\n' }}
{%- for message in loop_messages %}{%- if loop.previtem is defined and loop.previtem.role == message.role %}{%- continue %}{%- endif %}
{{- '<|role|>' + message['role'] + '<|end|>' + message['content'] + ('' if loop.nextitem is undefined else '|') }}
{%- if loop.index > 3 %}{%- break %}{%- endif %}
{%- else %}nothing{%- endfor %}""",
}

# One construct each; the chat does not matter.
SNIPPETS = {
"whitespace": "a\n  {% if true %}\n  b\n  {%- endif +%}\n c {#- gone -#} d\n{# line #}\n  {{ 1 }}\n  {%+ if true %}x{% endif %}\n\n",
"numbers": "{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 ** 10 }} {{ 1 + 2 * 3 }} {{ 1.5 + 1 }} {{ 1e20 }} {{ 0.1 + 0.2 }} {{ 1e-5 }} {{ 10 / 5 }} {{ -3|abs }} {{ 3.7|int }} {{ '12'|int + 1 }} {{ 'x'|int }} {{ '2.5'|float }}",
"strings": "{{ 'a' 'b' ~ 1 ~ none ~ true }} {{ 'x' * 3 }} {{ '\\u00e9\\x41\\t|' }} {{ 'héllo'[1:3] }} {{ 'héllo'[::-1] }} {{ 'abc'[-1] }} {{ 'abc'|first }}{{ 'abc'|last }} {{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a-b-c'.split('-', 1) }} {{ 'a-b-c'.rsplit('-', 1)[0] }}",
"cases": "{{ 'hELLO wORLD-x it\\'s'|title }} {{ 'hELLO wORLD-x it\\'s'.title() }} {{ 'hELLO'|capitalize }} {{ 'a'.upper() }} {{ 'ABC'|lower }} {{ 'x'.isdigit() }}",
"methods": "{{ 'xxaxx'.strip('x') }} {{ '\\u00a0\\u3000a\\x1f '|trim }}| {{ 'aXbX'.replace('X', 'yy', 1) }} {{ 'abc'.find('c') }} {{ 'abcabc'.count('bc') }} {{ '{} and {1} {name}'.replace('{1}', '').format('p', name='q') }} {{ ', '.join(['a', 'b']) }} {{ 'prefix-x'.removeprefix('prefix-') }} {{ 'a\\nb\\r\\nc'.splitlines() }} {{ 'abc'.startswith(('x', 'a')) }}",
"lists": "{{ [1, 'two', none, true, 2.5, [], {'a': 1}] }} {{ [3, 1, 2]|sort }} {{ ['b', 'A', 'a']|sort }} {{ [1, 2, 3]|reverse|list }} {{ [1, 1, 2]|unique|list }} {{ [1, 2] + [3] }} {{ (1, 2)|join('-') }} {{ [1, 2, 3, 4][1:-1] }} {{ [1, 2, 3, 4][::2] }} {{ [1, 2, 3][5:] }} {{ [4, 9, 2]|min }}{{ [4, 9, 2]|max }} {{ range(3)|list }} {{ range(5, 0, -2)|list }}",
"dicts": "{% set d = {'b': 1, 'a': 'x'} %}{{ d }} {{ d.b }} {{ d['a'] }} {{ d.get('z') }} {{ d.get('z', 5) }} {{ d|length }} {{ d|dictsort|map('first')|list }} {% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %} {{ d.keys()|list }} {{ d.values()|list }} {{ d|items|map('last')|list }} {{ 'a' in d }} {{ d.zz is defined }} {{ dict(q=1) }}",
"json": "{{ {'a': [1, 2.0, none, true, 'é\"\\\\\\n\\t\\x01/<>&\\u2028'], 'b': {}, 'c': []}|tojson }} {{ {'a': [1, {'b': 2}], 'c': []}|tojson(indent=2) }} {{ {'b': 1, 'a': 'é😀'}|tojson(ensure_ascii=true, sort_keys=true) }} {{ {'a': [1, {'b': 2}], 'c': []}|tojson(separators=(',', ':')) }} {{ {'a': [1, 2], 'c': 3}|tojson(indent=1, separators=(' ;', ' = ')) }}",
"json-separators": "{{ [1]|tojson(separators=(',', )) }}",
"maps": "{{ messages|map(attribute='role')|join(',') }} {{ messages|map(attribute='x', default='-')|list }} {{ ['a', 'b']|map('upper')|list }} {{ [1, 2, 3]|select('odd')|list }} {{ [1, 2, 3]|reject('odd')|list }} {{ [0, 1, '']|select|list }} {{ messages|rejectattr('role', 'equalto', 'user')|map(attribute='role')|list }} {{ messages|selectattr('nothing')|list|length }} {{ messages|selectattr('role', 'in', ['user'])|list|length }}",
"tests": "{{ [1 is number, 1 is integer, 1.0 is integer, true is boolean, 'a' is string, [] is iterable, {} is mapping, [] is sequence, none is none, x is undefined, 3 is odd, 4 is divisibleby 2, 1 is eq 1, 'a' is in ['a'], 2 is gt 1, true is true, 1 is true, x is not defined, 'a' is not string] }}",
"logic": "{{ 1 and 'x' }} {{ 0 or 'y' }} {{ not 1 }} {{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 'b' > 'a' }} {{ 1 == 1.0 }} {{ 1 == true }} {{ '1' == 1 }} {{ 'a' not in 'cab' }} {{ not 'a' in 'cab' }} {{ 'yes' if 0 else 'no' }} {{ 'only' if 0 }}| {{ -1|abs }} {{ 2 * 3 ~ 4 * 1 }} {{ [1, 2] == [1, 2] }} {{ {'a': 1} == {'a': 1} }} {{ x == y }} {{ none == x }}",
"defaults": "{{ x|default('d') }} {{ ''|default('d') }}| {{ ''|default('d', true) }} {{ none|default('d', boolean=true) }} {{ x }}|{{ x|trim }}|{{ x|length }}{% for i in x %}{% endfor %} {{ x|join }}| {{ x|list }}",
"scopes": "{% set x = 1 %}{% for i in [1, 2] %}{{ x }}{% set x = 5 %}{{ x }}{% endfor %}{{ x }}{% if true %}{% set x = 7 %}{% endif %}{{ x }}{% set ns = namespace(a=1, b='q') %}{% for i in [1, 2] %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}{{ ns.b }}{% set p, q = 1, 2 %}{{ p + q }}{% set ns.c %}cap{{ 1 }}{% endset %}{{ ns.c }}{% set u | upper %}loud{% endset %}{{ u }}{% filter trim %}  f  {% endfilter %}",
"macros": "{% macro f(a, b='d', c=a) %}[{{ a }}{{ b }}{{ c }}{{ x }}]{% endmacro %}{% set x = 'g' %}{{ f(1) }}{{ f(1, 2) }}{{ f(b=3, a=4) }}{% macro deep(n) %}{{ n }}{% if n > 0 %}{{ deep(n - 1) }}{% endif %}{% endmacro %}{{ deep(5) }}{% for x in [1] %}{{ f(9) }}{% endfor %}{{ f() }}",
"loops": "{% for i in range(4) %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.cycle('a', 'b') }};{% endfor %}{% for i in [] %}x{% else %}empty{% endfor %}{% for i in range(9) if i is even %}{{ i }}{{ loop.index }}{% if i > 5 %}{% break %}{% endif %}{% endfor %}{% for a, b in [[1, 2], [3, 4]] %}{{ a * b }}{% endfor %}{% for c in 'héy' %}{{ c }}.{% endfor %}{% for i in [1, 2] %}{% for j in [1, 2] %}{{ i }}{{ j }}{% if loop.last %}!{% endif %}{% endfor %}{{ loop.index }}{% endfor %}",
"indent": "{{ 'a\\nb\\n\\nc'|indent }}|{{ 'a\\nb\\n\\nc'|indent(2, true, true) }}|{{ 'a\\nb'|indent('>>') }}|{{ 'x'|string|safe }}{{ [1, 2]|count }}",
"int-keys": "{% set d = {0: 'a', 512: 'b', 1.5: none, none: 2, true: 'c', 'k': []} %}{{ d }} {{ d[0] }}{{ d[512.0] }}{{ d[1] }}{{ d[7] }} {{ 512 in d }} {{ '0' in d }} {{ d.get(0) }} {% for k, v in d.items() %}{{ k }}:{{ v }};{% endfor %}{{ d|tojson }} {{ {2: 'x', 10: 'y', 1: 'z'}|dictsort }} {{ {1: 'a', 1.0: 'b', true: 'c'} }} {{ {3: 1, 2: 2}|tojson(sort_keys=true) }}",
"tuples": "{{ (1, 'a') }} {{ (1,) }} {{ () }} {{ 1, 2 }} {% set t = 3, 4 %}{{ t }} {{ t + (5,) }} {{ t[1:] }} {{ [t] }} {{ (1, 2) == [1, 2] }} {{ (1, 2) == (1, 2) }} {{ t|tojson }} {{ t|list }} {{ t * 2 }} {{ [0] * 2 }} {{ {'a': 1}.items()|list }} {{ {'a': 1}|dictsort }} {{ 3 in t }} {{ (1, 2) < (1, 3) }}",
"views": "{% set d = {'a': 1, 'b': 2} %}{{ d.keys() }} {{ d.values() }} {{ d.items() }} {{ d.keys()[0] }}| {{ range(3) }} {{ range(2, 9, 3) }} {{ range(1, 4)[1] }} {{ range(3) == range(0, 3) }} {{ d.keys() is sequence }} {{ range(3) is sequence }} {{ d.items() is iterable }} {{ d.copy() }} {{ (range(5))[2:] | list }}",
"tuple-sum": "{{ (1, 2) + [3] }}",
"view-slice": "{{ {'a': 1}.keys()[1:] }}",
"json-range": "{{ range(2)|tojson }}",
"dict-call": "{{ dict({'a': 1, 'b': 2}, b=3, c=4) }} {{ dict([('x', 1), ('y', 2)], x=5) }} {{ dict() }} {% set n = namespace({'a': 1}, a=2) %}{{ n.a }}",
"macro-arguments": "{% macro f(a, b='q') %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1) }} {{ f(1, 2, 3, 4, x=5) }} {{ f(b=1, z='w', a=2) }} {{ f.name }} {{ f.arguments }} {{ f.catch_varargs }} {% macro g(x) %}{{ x }}{% endmacro %}{{ g.catch_kwargs }} {{ g.arguments }} {{ g.nothing is defined }}",
"macro-too-many": "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}",
"macro-other-name": "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, b=2) }}",
"macro-twice": "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, a=2) }}",
"loop-else": "{% for i in [1, 2] %}{{ i }}{% continue %}{% else %}A{% endfor %}{% for i in [1, 2] %}{% break %}{% else %}B{% endfor %}{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{% else %}C{% endfor %}{% for i in [1, 2] %}{% if i == 1 %}{% continue %}{% endif %}{% else %}D{% endfor %}{% for i in [1] if i > 1 %}{% else %}E{% endfor %}{% for i in [1] %}{% for j in [] %}{% else %}{{ loop.depth }}{{ loop.depth0 }}{% break %}{% endfor %}x{% endfor %}",
"from-right": "{{ 'a b  c d'.rsplit(none, 1) }} {{ ' a b '.rsplit(maxsplit=1) }} {{ ' a b '.rsplit(none, 0) }} {{ 'a b'.rsplit(none, 5) }} {{ ' \\u3000x y'.rsplit(none, 1) }} {{ 'a b c'.split(none, 1) }} {{ ''.rsplit(none, 1) }}",
"affixes": "{{ 'abc'.startswith(('x', 'ab')) }} {{ 'abc'.endswith(('x', 'bc')) }} {{ 'abc'.startswith('b', 1) }} {{ 'abc'.startswith('b', -2, 2) }} {{ 'abc'.endswith('b', 0, 2) }} {{ 'héé'.startswith('é', 1) }} {{ 'abc'.startswith('', 3) }} {{ 'abc'.startswith('', 4) }} {{ 'abc'.startswith(()) }} {{ 'abcabc'.find('c', 3) }} {{ 'abc'.find('a', 1) }}",
"affix-list": "{{ 'abc'.startswith(['a']) }}",
"replace-empty": "{{ 'abc'.replace('', '-') }} {{ 'abc'.replace('', '-', 2) }} {{ 'abc'.replace('', '-', 0) }} {{ 'ab'.replace('', '-', 3) }} {{ 'ab'.replace('', '-', 9) }} {{ ''.replace('', 'x') }} {{ ''.replace('', 'x', 0) }}| {{ 'éa'|replace('', '.', 1) }} {{ 'aaa'|replace('a', 'b', 2) }}",
"sorted-by": "{% set l = [{'a': {'b': 2}, 'n': 'x'}, {'a': {'b': 1}, 'n': 'Y'}, {'a': {'b': 1}, 'n': 'b'}] %}{{ l|sort(attribute='a.b')|map(attribute='n')|join }} {{ l|sort(attribute='a.b,n')|map(attribute='n')|join }} {{ l|sort(attribute='n', case_sensitive=true)|map(attribute='n')|join }} {{ l|sort(attribute='a.b', reverse=true)|map(attribute='n')|join }} {{ [[1, 'b'], [0, 'c']]|sort(attribute='0')|list }} {{ l|map(attribute='a.b')|list }} {{ l|map(attribute='a.c', default='-')|list }} {{ l|map(attribute='z.c', default={})|list }} {{ [[1, 2]]|map(attribute=1)|list }} {{ [['p', 'q']]|map(attribute='1')|list }}",
"cyclers": "{% set c = cycler('a', 'b', 'c') %}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.next() }}{{ c.next() }}{% set _ = c.reset() %}{{ c.next() }} {% set j = joiner() %}{% for i in range(3) %}{{ j() }}{{ i }}{% endfor %}{% set p = joiner(' | ') %}{{ p() }}x{{ p() }}y",
"callables": "{{ [range is callable, 'a'.upper is callable, 'a' is callable, {}.get is callable, {'items': 1}.items is callable, strftime_now is callable, loop is callable] }} {% set f = 'abc'.upper %}{{ f() }} {{ {'items': 7}['items'] }} {{ 'x'.nothing is defined }} {% macro m() %}{% endmacro %}{{ m is callable }}",
"escapes": "{{ '\\101\\60\\0601\\7\\x7e\\u00e9\\U0001f600\\e\\q' }}|{{ 'a\\\nb' }}",
"unicode-cases": "{{ 'straße ÀÉ ñ ŉ ﬁn ǆ ᾳ ΐ'.upper() }} {{ 'ÀÉÎ İ ΑΣ ΑΣΑ Σ Ǆ Ж'.lower() }} {{ 'ΟΔΥΣΣΕΥΣ ὈΔΟΣ. Σ'.lower() }} {{ 'élan vital ǆ ß'.title() }} {{ 'ÉCOLE ßA'.capitalize() }} {{ 'ßa'.capitalize() }} {{ 'ǆa ἈΙ ﬂ'.capitalize() }} {{ \"they're bill's ñandú x1y\".title() }} {{ 'élan-vital (ñu) \\u3000straße'|title }} {{ 'éÉ'|upper }}{{ 'éÉ'|lower }} {{ 'ÉCOLE'|capitalize }} {{ ['É', 'é', 'ß', 'e']|unique|list }} {{ ['é', 'É', 'z', 'a']|sort|list }} {{ 'Ωμέγα ω'|upper|lower }}",
"unicode-repr": "{{ ['é', '\\u00a0', '\\u00ad', '\\u200b', '\\u2028', '\\ue000', '\\U000e0001', '\\x7f', '\\x1c', '中', '😀', '\\u3000', '\\ufeff', \"it's\", 'q\\\"', '\\\\'] }}",
"unicode-spaces": "{{ '\\u2003\\x1c a \\u3000\\x85'.strip() }}|{{ '\\u00a0a '.lstrip() }}|{{ 'a\\u202f'.rstrip() }}|{{ '\\u200ba'.strip()|length }} x\u00a0\u3000{{- 1 -}}\u2003\u00a0y\u200b\n\u00a0\u2003{% if true %}z{% endif %}{{\u00a02\u3000}}",
"big-integers": "{{ 9223372036854775807 }} {{ -9223372036854775807 - 1 }} {{ 9223372036854775806 + 1 }} {{ '9223372036854775807'|int }} {{ 3037000499 * 3037000499 }} {{ {9223372036854775807: 1} }} {{ 1e15|int }}",
"undefined-member": "{{ x.y }}",
"undefined-sum": "{{ x + 'a' }}",
"mixed-sum": "{{ 1 + 'a' }}",
"none-loop": "{% for i in none %}{% endfor %}",
"bad-order": "{{ 1 < 'a' }}",
"json-undefined": "{{ x|tojson }}",
"raises": "{{ raise_exception('no ' ~ 'way') }}",
"division": "{{ 1 // 0 }}",
"unpack": "{% for a, b in [[1]] %}{% endfor %}",
}

# Templates of some formats of calls that are known (server/openai/tools/tool_calls.h).
TOOL_TEMPLATES = {
"tools-kimi": """{%- macro body(message) -%}
    {%- set c = message.get('content') -%}
    {%- if c is string -%}{{ c }}{%- elif c is not none -%}{% for part in c %}{{ part['text'] }}{% endfor %}{%- endif -%}
{%- endmacro -%}
{% macro head(message) -%}
    {%- set name = message.get('name') or message['role'] -%}
    {%- if message['role'] in ['user', 'assistant'] -%}<|im_{{ message['role'] }}|>{{ name }}<|im_middle|>
    {%- else -%}<|im_system|>{{ name }}<|im_middle|>{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for i in range(messages|length - 1, -1, -1) -%}
    {%- if messages[i]['role'] == 'assistant' and not messages[i].get('tool_calls') -%}{%- set ns.last = i -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{%- for message in messages[:ns.last + 1] + messages[ns.last + 1:] -%}
    {{ head(message) }}
    {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
        <think>{{ message.get('reasoning_content', '') }}</think>{{ body(message) }}<|tool_calls_section_begin|>
        {%- for call in message['tool_calls'] -%}
            {%- set id = call['id'] if ':' in call['id'] else 'functions.' + call['function']['name'] + ':' + (loop.index0 | string) -%}
            <|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>
        {%- endfor -%}
        <|tool_calls_section_end|>
    {%- elif message['role'] == 'tool' -%}
        ## Return of {{ message.tool_call_id }}
{{ body(message) }}
    {%- else -%}{{ body(message) }}{%- endif -%}
    <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}""",
"tools-lfm": """{{- bos_token -}}
{%- macro value(v) -%}
    {%- if v is string -%}{{- "'" + v + "'" -}}{%- elif v is mapping -%}{{- v | tojson -}}{%- else -%}{{- v | string -}}{%- endif -%}
{%- endmacro -%}
{%- macro calls(list) -%}
    {%- set ns = namespace(texts=[]) -%}
    {%- for call in list -%}
        {%- set own = namespace(texts=[]) -%}
        {%- for k, v in call["function"]["arguments"].items() -%}{%- set own.texts = own.texts + [k + "=" + value(v)] -%}{%- endfor -%}
        {%- set ns.texts = ns.texts + [call["function"]["name"] + "(" + (own.texts | join(", ")) + ")"] -%}
    {%- endfor -%}
    {{- "<|tool_call_start|>[" + (ns.texts | join(", ")) + "]<|tool_call_end|>" -}}
{%- endmacro -%}
{%- set keep = keep | default(false) -%}
{%- set ns = namespace(system="", last=-1) -%}
{%- if messages[0]["role"] == "system" -%}{%- set ns.system = messages[0]["content"] -%}{%- set messages = messages[1:] -%}{%- endif -%}
{%- if tools -%}
    {%- set ns.system = ns.system + ("\\n" if ns.system else "") + "Tools: [" -%}
    {%- for tool in tools -%}
        {%- if tool is not string -%}{%- set tool = tool | tojson -%}{%- endif -%}
        {%- set ns.system = ns.system + tool + ("" if loop.last else ", ") -%}
    {%- endfor -%}
    {%- set ns.system = ns.system + "]" -%}
{%- endif -%}
{%- if ns.system -%}{{- "<|im_start|>system\\n" + ns.system + "<|im_end|>\\n" -}}{%- endif -%}
{%- for message in messages -%}{%- if message["role"] == "assistant" -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
    {{- "<|im_start|>" + message.role + "\\n" -}}
    {%- if message.role == "assistant" -%}{%- generation -%}
        {%- set content = message.content or "" -%}
        {%- if not keep and loop.index0 != ns.last and "</think>" in content -%}{%- set content = content.split("</think>")[-1] | trim -%}{%- endif -%}
        {{- content -}}
        {%- if message.tool_calls is defined -%}{{- calls(message.tool_calls) -}}{%- endif -%}
        {{- "<|im_end|>\\n" -}}
    {%- endgeneration -%}
    {%- else %}{%- if message.get("content") -%}{{- message["content"] -}}{%- endif -%}{{- "<|im_end|>\\n" -}}{%- endif %}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}""",
"tools-hermes": """{%- if tools is iterable and tools | length > 0 %}{{- '<|im_start|>system\\nTools: <tools>' }}
    {%- for tool in tools %}{%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
        {{- '\\n' + tool.name + ': ' }}{{- tool | tojson }}
        {%- for name, field in (tool.parameters or {}).properties | default({}) | items %} {{ name }}={{ field.type }}{%- endfor %}
    {%- endfor %}{{- '</tools>\\nCall: <tool_call>{"name": <name>, "arguments": <object>}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role }}
    {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
        {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
    {%- if message.role == 'tool' %}{%- if message.name is not defined %}{{- raise_exception('no name') }}{%- endif %}
        {{- ' of ' + message.name + ' ' + message.tool_call_id }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}""",
"tools-llama": """{{- bos_token }}{%- if tools is not none %}
    {{- 'Answer {"name": NAME, "parameters": OBJECT}.' }}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at once") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot|>' }}
    {%- else %}
        {{- '<|start|>ipython<|end|>' }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot|>' }}
    {%- endif %}
{%- endfor %}""",
"tools-harmony": """{#- Types of arguments as TypeScript has them. #}
{%- macro type_of(spec, required, nullable=false) -%}
    {%- if spec.type == "array" -%}
        {{- (type_of(spec['items'], required) if spec['items'] else "any") + "[]" }}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping and spec.type[0] is defined -%}
        {%- if spec.type | length > 1 -%}{{- spec.type | join(" | ") }}{%- else -%}{{- spec.type[0] }}{%- endif -%}
    {%- elif spec.type == "string" -%}
        {%- if spec.enum -%}{{- '"' + spec.enum|join('" | "') + '"' -}}{%- else -%}{{- "string" }}{%- endif -%}
    {%- elif spec.type == "object" and spec.properties -%}
        {{- "{\\n" }}
        {%- for name, field in spec.properties.items() -%}
            {{- name -}}{%- if name not in (spec.required or []) -%}{{- "?" }}{%- endif -%}{{- ": " }}
            {{ type_of(field, spec.required or []) }}
            {%- if not loop.last -%}{{-", " }}{%- endif -%}
        {%- endfor -%}
        {{- "}" }}
    {%- else -%}{{- "any" }}{%- if nullable or spec.nullable %}{{- " | null" }}{%- endif -%}{%- endif -%}
{%- endmacro -%}
{%- macro space_of(name, tools) -%}
    {{- "namespace " + name + " {\\n" }}
    {%- for tool in tools %}{%- set tool = tool.function %}
        {{- "// " + (tool.description or "") + "\\ntype "+ tool.name + " = " + type_of(tool.parameters or {}, []) + ";\\n" }}
        {%- for name, field in (tool.parameters or {}).get("properties", {}).items() %}
            {%- if field.default is defined -%}{{- "// " + name + ": " + field.default|tojson }}{%- endif -%}
        {%- endfor %}
    {%- endfor %}
    {{- "}" }}
{%- endmacro -%}
{%- macro system() -%}
    {%- if effort is not defined %}{%- set effort = "medium" %}{%- endif %}
    {{- "Date: " + strftime_now("%Y-%m-%d") + "\\nReasoning: " + effort }}
    {%- if tools -%}{{- "\\nCalls go to 'functions'." }}{%- endif -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}{{- system() }}{{- "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set developer = "" %}{%- set rest = messages %}{%- endif %}
{%- if developer or tools %}
    {{- "<|start|>developer<|message|>" }}{{- developer }}
    {%- if tools -%}{{- space_of("functions", tools) }}{%- endif -%}{{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest -%}
    {%- if message.role == 'assistant' and "tool_calls" in message -%}
        {%- set future = namespace(found=false) %}
        {%- for later in rest[loop.index:] %}
            {%- if later.role == 'assistant' and "tool_calls" not in later %}{%- set future.found = true %}{%- endif %}
        {%- endfor %}
        {%- set call = message.tool_calls[0] %}{%- if call.function %}{%- set call = call.function %}{%- endif %}
        {%- if message.content and message.thinking %}{{- raise_exception("both") }}
        {%- elif message.content and not future.found %}{{- "<|channel|>analysis<|message|>" + message.content }}{%- endif %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary " }}
        {{- (call.content_type if call.content_type is defined else "json") + "<|message|>" }}
        {%- if call.arguments is string -%}{{- call.arguments }}{%- else -%}{{- call.arguments | tojson }}{%- endif -%}
        {{- "<|call|>" }}{%- set last.name = call.name %}
    {%- elif message.role == 'assistant' -%}
        {%- if "<|channel|>" in message.content %}{{- raise_exception("channels") }}{%- endif %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + ("<|return|>" if loop.last and not add_generation_prompt else "<|end|>") }}
        {%- set last.name = none %}
    {%- elif message.role == 'tool' -%}
        {%- if last.name is none %}{{- raise_exception("no call") }}{%- endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" + message.content + "<|end|>" }}
    {%- else -%}{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}""",
}

CHATS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "You are terse. "},
     {"role": "user", "content": " Who are you?\n"},
     {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA bot. "},
     {"role": "user", "content": "Ünïcode 😀 'q' \"d\" {{ x }}"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>t</think>b"},
     {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "\n"}],
    [],
]

# As texts, because the order of members counts.
TOOLS = """[{"type": "function", "function": {"name": "weather", "description": "Now, <there>.",
  "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Bern", "Zürich"]},
  "at": {"type": ["number", "null"], "minimum": -1.50, "default": 1e30}}, "required": ["city"],
  "additionalProperties": false}}}, {"type": "function", "function": {"name": "time", "x": [{}, [], null]}}]"""
TOOL_CHAT = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather"},
         "arguments": '{"city": "Z\\u00fcrich", "at": -3, "deep": {"z": [true, 9223372036854775807], "a": 2.50, "big": [18446744073709551615, -99999999999999999999999]}}'}]},
    {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "12 °C"},
    {"role": "assistant", "content": "Twelve."}]


def case(template, chat, prompt, tools=None):
    given = {"messages": chat, "add_generation_prompt": prompt, "bos_token": "<s>",
             "eos_token": "</s>", **({"tools": tools} if tools else {})}
    shown = [dict(message) for message in chat]
    for message in shown:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                {"id": call["id"], "type": call["type"],
                 "function": {**call["function"], "arguments": json.loads(call["arguments"])}} for call in calls]
    try:
        expected = template.render(documents=None, strftime_now=NOW.strftime, **{
            **given, "messages": shown, "tools": json.loads(tools) if tools else None})
    except Exception:  # whatever the template runs into, it must not be rendered
        expected = None
    return {**given, "expected": expected}


def write():
    entries = []
    for name, source in {**TEMPLATES, **SNIPPETS}.items():
        compiled = _compile_jinja_template(source)
        chats = CHATS if name in TEMPLATES else CHATS[1:2]
        prompts = (True, False) if name in TEMPLATES else (True,)
        entries.append({"name": name, "template": source,
                        "cases": [case(compiled, chat, prompt) for chat in chats for prompt in prompts]})
    for name, source in TOOL_TEMPLATES.items():
        compiled = _compile_jinja_template(source)
        entries.append({"name": name, "template": source,
                        "cases": [case(compiled, chat, True, tools) for chat in (TOOL_CHAT, CHATS[1])
                                  for tools in (TOOLS, None)]})
    with open("tests/testdata/chat_templates.json", "w", encoding="utf-8") as file:
        json.dump({"now": NOW.strftime("%Y-%m-%d %H:%M:%S"), "templates": entries}, file, indent=1,
                  ensure_ascii=True)
        file.write("\n")


if __name__ == "__main__":
    write()
