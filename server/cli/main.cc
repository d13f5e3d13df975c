// treadle: one binary, one table of subcommands.
#include <openssl/crypto.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "server/cli/command.h"

namespace treadle {
namespace {

constexpr Command kCommands[] = {
    {"serve", "load a model and serve it over gRPC and HTTP", RunServe},
    {"worker", "hold one stage of a model for a server with --workers", RunWorker},
    {"generate", "generate text: from a server, or in process with --model", RunGenerate},
    {"drain-worker", "ask a worker to leave its stage to another one", RunDrainWorker},
    {"replay", "run again what serve --record wrote, and compare every token", RunReplay},
    {"top", "a running server, live in a terminal", RunTop},
    {"bench", "load on a server, and the engine alone: benchmarks", RunBench},
    {"quantize", "write a checkpoint in other weight formats", RunQuantize},
    {"inspect", "what is in a checkpoint, and what serving it costs", RunInspect},
    {"perplexity", "how well a model predicts a text", RunPerplexity},
};

void PrintHelp(std::FILE* out) {
  std::fprintf(out,
               "treadle %s: an iteration-level serving engine for transformer language models\n\n"
               "usage: treadle COMMAND [flags]; treadle COMMAND --help lists its flags\n\n",
               TREADLE_VERSION);
  for (const Command& command : kCommands) {
    std::fprintf(out, "  %-12s %s\n", command.name, command.help);
  }
  std::fprintf(out, "  %-12s %s\n  %-12s %s\n", "--version", "print the version", "--help",
               "print this");
}

int Main(int argc, char** argv) {
  // gRPC writes its own lines about things that we report ourselves.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  // gRPC's threads may outlive main and use OpenSSL still, so no exit handler takes it from them.
  OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  const std::string_view name = argc > 1 ? argv[1] : "";
  if (name == "--help" || name == "-h" || name == "help") {
    PrintHelp(stdout);
    return 0;
  }
  if (name == "--version") {
    std::printf("treadle %s\n", TREADLE_VERSION);
    return 0;
  }
  for (const Command& command : kCommands) {
    if (name == command.name) return command.run(argc - 1, argv + 1);
  }
  if (name.empty()) {
    PrintHelp(stderr);
  } else {
    std::fprintf(stderr, "treadle: '%s' is no command, expected one of:", argv[1]);
    for (const Command& command : kCommands) std::fprintf(stderr, " %s", command.name);
    std::fprintf(stderr, "\n");
  }
  return 2;
}

}  // namespace
}  // namespace treadle

int main(int argc, char** argv) { return treadle::Main(argc, argv); }
