// treadle: one binary, one table of subcommands.
#include <openssl/crypto.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/version.h"
#include "server/cli/command.h"
#include "server/cli/help/reference.h"

namespace treadle {
namespace {

int RunHelp(int argc, char** argv);
int RunCompletions(int argc, char** argv);

constexpr Command kCommands[] = {
    {"serve", "load a model and serve it over gRPC and HTTP", RunServe},
    {"worker", "hold one stage of a model for a server with --workers", RunWorker},
    {"generate", "generate text: from a server, or in process with --model", RunGenerate},
    {"chat", "a conversation with a server's model, in a terminal", RunChat},
    {"drain-worker", "ask a worker to leave its stage to another one", RunDrainWorker},
    {"replay", "run again what serve --record wrote, and compare every token", RunReplay},
    {"top", "a running server, live in a terminal", RunTop},
    {"bench", "load on a server, and the engine alone: benchmarks", RunBench},
    {"simulate", "a trace on hardware that is not here: the real scheduler, a model of time",
     RunSimulate},
    {"quantize", "write a checkpoint in other weight formats", RunQuantize},
    {"finetune", "train a LoRA adapter or a soft prompt over a frozen model", RunFinetune},
    {"inspect", "what is in a checkpoint, and what serving it costs", RunInspect},
    {"perplexity", "how well a model predicts a text", RunPerplexity},
    {"help", "flags of a command, or the man page of all", RunHelp},
    {"completions", "completions of commands and flags for a shell", RunCompletions},
};

void PrintHelp(std::FILE* out) {
  std::fprintf(out,
               "treadle %s: an iteration-level serving engine for transformer language models\n\n"
               "usage: treadle COMMAND [flags]; treadle COMMAND --help lists its flags\n\n",
               kVersion);
  for (const Command& command : kCommands) {
    std::fprintf(out, "  %-12s %s\n", command.name, command.help);
  }
  std::fprintf(out, "  %-12s %s\n  %-12s %s\n", "--version", "print the version", "--help",
               "print this");
}

int Run(const std::string& name, int argc, char** argv) {
  for (const Command& command : kCommands) {
    if (name == command.name) return command.run(argc, argv);
  }
  std::vector<std::string> names;
  for (const Command& command : kCommands) names.emplace_back(command.name);
  std::fprintf(stderr, "treadle: '%s' is no command, expected one of: %s\n", name.c_str(),
               absl::StrJoin(names, " ").c_str());
  return 2;
}

void PrintWhole(const ReferenceFormat& format) {
  std::fputs(format.begin().c_str(), stdout);
  PrintReference(format, "treadle", kCommands);
  std::fputs(format.end, stdout);
}

int RunHelp(int argc, char** argv) {
  std::string command;
  bool man = false;
  CLI::App app("Prints the flags of a command; without one, the commands.");
  CLI::Option* const name = app.add_option("command", command, "command, such as serve");
  app.add_flag("--man", man, "print the man page, treadle.1: all commands with all flags")
      ->excludes(name);
  if (auto code = ParseFlags(app, "help", argc, argv)) return *code;
  if (man) {
    PrintWhole(kManPage);
  } else if (command.empty()) {
    PrintHelp(stdout);
  } else {
    char flag[] = "--help";
    char* arguments[] = {command.data(), flag, nullptr};
    return Run(command, 2, arguments);
  }
  return 0;
}

int RunCompletions(int argc, char** argv) {
  const ReferenceFormat* const shells[] = {&kBash, &kZsh, &kFish};
  const ReferenceFormat* shell = nullptr;
  CLI::App app("Prints a script that completes commands, flags and their words in a shell.");
  app.footer("In bash: source <(treadle completions bash)");
  AddWords(
      app, "shell", {"bash", "zsh", "fish"}, [&](size_t index) { shell = shells[index]; },
      "the shell");
  app.get_option("shell")->required();
  if (auto code = ParseFlags(app, "completions", argc, argv)) return *code;
  PrintWhole(*shell);
  return 0;
}

int Main(int argc, char** argv) {
  // gRPC writes its own lines about things that we report ourselves.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  // gRPC's threads may outlive main and use OpenSSL still, so no exit handler takes it from them.
  OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  const std::string_view name = argc > 1 ? argv[1] : "";
  if (name == "--help" || name == "-h") {
    PrintHelp(stdout);
    return 0;
  }
  if (name == "--version") {
    std::printf("treadle %s\n", kVersion);
    return 0;
  }
  if (!name.empty()) return Run(std::string(name), argc - 1, argv + 1);
  PrintHelp(stderr);
  return 2;
}

}  // namespace
}  // namespace treadle

int main(int argc, char** argv) { return treadle::Main(argc, argv); }
