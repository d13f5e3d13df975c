// libFuzzer's end of the targets: TREADLE_FUZZ_TARGET says which one runs, on the corpus in the
// first folder of the command line; its seeds are written there. `--list` prints the names.
#include <google/protobuf/stubs/logging.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/fuzz/fuzz_target.h"

namespace treadle {
namespace {

const FuzzTarget* target = nullptr;

void WriteSeeds(const std::string& folder) {
  std::filesystem::create_directories(folder);
  int number = 0;
  for (const std::string& seed : target->seeds()) {
    std::ofstream(folder + "/seed-" + std::to_string(number++), std::ios::binary) << seed;
  }
}

}  // namespace
}  // namespace treadle

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  using treadle::target;
  const char* const named = std::getenv("TREADLE_FUZZ_TARGET");
  const bool list = *count > 1 && std::string_view((*arguments)[1]) == "--list";
  for (const treadle::FuzzTarget* one : treadle::FuzzTargets()) {
    if (list) std::printf("%.*s\n", static_cast<int>(one->name.size()), one->name.data());
    if (named != nullptr && one->name == named) target = one;
  }
  if (list) std::exit(0);
  if (target == nullptr) {
    std::fprintf(stderr, "TREADLE_FUZZ_TARGET names none of the targets that --list prints\n");
    std::exit(1);
  }
  for (int i = 1; i < *count; ++i) {
    const std::string argument = (*arguments)[i];
    if (argument.starts_with("-") || std::filesystem::is_regular_file(argument)) continue;
    treadle::WriteSeeds(argument);
    break;
  }
  google::protobuf::SetLogHandler(nullptr);  // it complains of every text that is not UTF-8
  // As if it stood on the command line: libFuzzer reads it after this.
  static std::string longest = "-max_len=" + std::to_string(target->max_bytes);
  static std::vector<char*> all(*arguments, *arguments + *count);
  all.insert(all.begin() + 1, longest.data());
  all.push_back(nullptr);
  *arguments = all.data();
  ++*count;
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  treadle::target->run({reinterpret_cast<const char*>(bytes), count});
  return 0;
}
