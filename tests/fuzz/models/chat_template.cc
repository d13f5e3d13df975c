// Chat templates: an input is a template and messages, each up to a zero. Whatever a template does,
// it stays within what its budget allows it of memory and time, and what comes out is UTF-8.
#include "models/text/jinja/chat_template.h"

#include <time.h>

#include <atomic>
#include <nlohmann/json.hpp>

#include "base/json_file.h"
#include "base/status.h"
#include "base/utf8.h"
#include "models/text/jinja/value.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

// Functions of the sanitizers' library, where there is one.
extern "C" {
__attribute__((weak)) int __sanitizer_install_malloc_and_free_hooks(
    void (*on_malloc)(const volatile void*, size_t), void (*on_free)(const volatile void*));
__attribute__((weak)) size_t __sanitizer_get_allocated_size(const volatile void*);
}

namespace treadle {
namespace {

// A step takes a tenth of a microsecond, and this many times as long under a sanitizer and on a
// busy machine. A value that is charged with its own bytes, or is scalar, lies in a shared or a
// vector's block of at most so many, and a step makes at most a few.
constexpr double kSecondsPerStep = 1e-7 * 100;
constexpr size_t kBytesPerByte = 4;
constexpr size_t kBytesPerStep = 256;

// Bytes that this thread has taken and not given back.
thread_local int64_t held = 0, most_held = 0;
// Nested, `held` counts what others made; so it may go below zero.
void OnMalloc(const volatile void*, size_t bytes) {
  held += static_cast<int64_t>(bytes);
  most_held = std::max(most_held, held);
}
void OnFree(const volatile void* block) {
  held -= static_cast<int64_t>(__sanitizer_get_allocated_size(block));
}

double ThreadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void Run(std::string_view bytes) {
  static const bool hooked = __sanitizer_install_malloc_and_free_hooks != nullptr &&
                             __sanitizer_install_malloc_and_free_hooks(OnMalloc, OnFree) != 0;
  FuzzInput input(bytes);
  ChatOptions options;
  options.bos_token = "<s>";
  options.eos_token = "</s>";
  options.add_generation_prompt = input.Byte() % 2 != 0;
  const auto parsed = ChatTemplate::Parse(input.Part());
  if (!parsed.ok()) return;
  std::vector<ChatMessage> messages;
  size_t text = 0;
  while (!input.empty()) {
    ChatMessage& message = messages.emplace_back();
    message.role = input.Part();
    message.content = input.Part();
    text += message.role.size() + message.content->size();
  }
  jinja::Budget budget;
  budget.Add(messages.size(), text);
  held = most_held = 0;
  const double began = ThreadSeconds();
  const auto rendered = parsed->Render(messages, options);
  const double seconds = ThreadSeconds() - began;
  const auto steps = static_cast<size_t>(budget.steps);
  TREADLE_CHECK(seconds < kSecondsPerStep * static_cast<double>(steps));
  if (hooked) {
    TREADLE_CHECK(most_held <
                  static_cast<int64_t>(kBytesPerByte * budget.bytes + kBytesPerStep * steps));
  }
  if (!rendered.ok()) return;
  TREADLE_CHECK(rendered->size() <= budget.bytes);
  TREADLE_CHECK(FindInvalidUtf8(*rendered) == std::string::npos);
}

// Templates that the models of the tests came with, and what is not in any of them.
std::vector<std::string> Seeds() {
  using namespace std::string_literals;
  const std::string chat = "\0user\0How are you?\0assistant\0Fine.\0user\0Good."s;
  std::vector<std::string> seeds = {
      "\1{% set ns = namespace(a=[1, 2.5], b='x') %}{% for k, v in {'a': 1, 'b': [None]}.items() %}"
      "{{ loop.index0 ~ k ~ v|tojson(indent=2) }}{% endfor %}{{ ns.b * 3 + 'ab'[::-1] }}"s +
          chat,
      "\0{% macro m(x, y=2) %}{% if x > 0 %}{{ m(x - 1) }}{% endif %}{{ y ** x // 3 % 7 }}"
      "{% endmacro %}{{ m(3) | upper | trim | replace('1', 'two') }}{{ messages | length }}"s +
          chat,
      "\1{{ messages[0].content.split(' ')|join('-') }}{{ 'abc'.find('c') }}{{ range(9)|list }}"
      "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list|tojson }}"
      "{{ raise_exception('no') if not 'a' in 'cab' else strftime_now('%Y') }}"s +
          chat};
  const auto file = ReadJsonFile(TREADLE_TESTDATA "/chat_templates.json");
  TREADLE_CHECK(file.ok());
  for (const auto& one : file->at("templates")) {
    const std::string source = one.at("template");
    if (source.size() < 6000) seeds.push_back("\1" + source + chat);
  }
  return seeds;
}

}  // namespace

const FuzzTarget kChatTemplateTarget = {"chat_template", 8192, Seeds, Run};

}  // namespace treadle
