// Text between the marks of a call where models do not write {"name": ..., "arguments": ...}. Each
// function reads all that stands there; nothing unless it is whole calls. Sources: the models'
// chat templates, and the pages of vLLM's tool parsers.
//
// Pure functions; any thread.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "models/text/jinja/chat_template.h"

namespace treadle {

// By function: its parameters that are texts. Some models write values without quotes.
using TextParameters = std::map<std::string, std::set<std::string>, std::less<>>;
using Calls = std::optional<std::vector<ToolCall>>;

// {"name": TEXT, "arguments": OBJECT}, or with "parameters". Nothing for other JSON. `marked`: it
// can be nothing but a call, so the arguments may be missing.
std::optional<ToolCall> CallInJson(std::string_view text, bool marked);

// The end of the first JSON object or array in `text`, by its brackets; npos: it has not come.
size_t JsonEnd(std::string_view text);

// Mistral's [{"name": ..., "arguments": ...}, ...], or NAME[ARGS]OBJECT of the newer ones.
Calls MistralCalls(std::string_view text, const TextParameters& texts);
size_t MistralEnd(std::string_view text);
// Qwen3-Coder's NAME><parameter=KEY>VALUE</parameter>...
Calls QwenCoderCalls(std::string_view text, const TextParameters& texts);
// GLM 4.5's NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...
Calls GlmCalls(std::string_view text, const TextParameters& texts);
// DeepSeek V3's TYPE<|tool_sep|>NAME and OBJECT in a fence, or V3.1's NAME<|tool_sep|>OBJECT.
Calls DeepSeekCalls(std::string_view text, const TextParameters& texts);
// Gemma's call:NAME{KEY:VALUE,...}, with marks of its own around texts.
Calls GemmaCalls(std::string_view text, const TextParameters& texts);
// Kimi K2's functions.NAME:NUMBER<|tool_call_argument_begin|>OBJECT, of which the name with its
// number is the call's id.
Calls KimiCalls(std::string_view text, const TextParameters& texts);
// LFM2.5's [NAME(KEY=VALUE, ...), ...] with values as Python writes them, or an array as Mistral's.
// Its template escapes no quotes: a text ends with one behind which no value goes on.
Calls LfmCalls(std::string_view text, const TextParameters& texts);

}  // namespace treadle
