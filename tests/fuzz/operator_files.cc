// Files that an operator writes for `serve`: API keys and settings; the first byte says which. What
// was read of settings and is printed again means the same.
#include "base/status.h"
#include "server/access/api_keys.h"
#include "server/configuration_sources.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/models/checkpoint_files.h"

namespace treadle {
namespace {

const ScratchFolder& Folder() {
  static const ScratchFolder* const folder = new ScratchFolder;
  return *folder;
}

void ReadKeys(std::string_view bytes) {
  const std::string path = Folder().Write("keys", bytes);
  const auto keys = ApiKeys::Open(path, [](const LogEvent&) {});
  const auto first = ReadFirstKey(path);
  if (!keys.ok() || !first.ok()) return;
  const auto found = (*keys)->Find("Bearer " + *first);
  TREADLE_CHECK(found.ok() || absl::IsPermissionDenied(found.status()));
  TREADLE_CHECK(!(*keys)->Find("Bearer " + *first + "x").ok() || bytes.size() > first->size());
}

void ReadSettings(std::string_view bytes) {
  ServeOptions options, again;
  const auto settings = ApplySources({}, Folder().Write("settings", bytes), options);
  if (!settings.ok()) return;
  CheckServeOptions(options).IgnoreError();
  const std::string printed = PrintSettings(*settings, options);
  const auto second = ApplySources({}, Folder().Write("printed", printed), again);
  TREADLE_CHECK(second.ok());
  for (const ServeFlag& flag : ServeFlags()) {
    TREADLE_CHECK(flag.value.show(options) == flag.value.show(again));
  }
}

void Run(std::string_view bytes) {
  FuzzInput input(bytes);
  return input.Choose(2) == 0 ? ReadKeys(input.Rest()) : ReadSettings(input.Rest());
}

std::vector<std::string> Seeds() {
  using namespace std::string_literals;
  return {
      "\0# keys\nalice-0123456789abcdef alice 60 10000\nbob-0123456789abcdef bob - 5\n"
      "carol-0123456789abcdef carol 0\n"s,
      "\1# settings\nlisten = 127.0.0.1:1\nmax-queue=7\nkv-memory = 2G\ndrain-timeout = 3s\n"
      "http-allow-origins = https://a.b,http://c\nweights = nf4,lm_head=int8\n"s,
      "\1" + PrintSettings({}, ServeOptions())};
}

}  // namespace

const FuzzTarget kOperatorFilesTarget = {"operator_files", 16384, Seeds, Run};

}  // namespace treadle
