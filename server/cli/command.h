// The program's subcommands, one row each, and what they share: parsing flags and saying what went
// wrong in one line.
//
// Exit codes: kExitCodes.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/choice.h"
#include "server/observe/log.h"

namespace CLI {
class App;
}

namespace treadle {

struct ReferenceFormat;

inline constexpr char kExitCodes[] =
    "Exit codes: 0 done, or drained after a signal, or stopped by one while loading; 1 something "
    "failed; 2 wrong flags or files; 3 "
    "drained, but requests were cut off at --drain-timeout; 128 + N a second signal N.";

struct Command {
  const char* name;
  const char* help;                   // one line
  int (*run)(int argc, char** argv);  // argv[0] is the command's name
};

int RunServe(int argc, char** argv);
int RunWorker(int argc, char** argv);
int RunGenerate(int argc, char** argv);
int RunChat(int argc, char** argv);
int RunDrainWorker(int argc, char** argv);
int RunReplay(int argc, char** argv);
int RunTop(int argc, char** argv);
int RunInspect(int argc, char** argv);
int RunQuantize(int argc, char** argv);
int RunFinetune(int argc, char** argv);
int RunPerplexity(int argc, char** argv);
int RunBench(int argc, char** argv);
int RunSimulate(int argc, char** argv);

// An option that takes one of `words`, and gives its index to `take`.
void AddWords(CLI::App& app, const char* name, std::vector<std::string> words,
              std::function<void(size_t)> take, const char* help);
// An option that takes a word of the table; `target` is what it stands for.
template <typename Target, typename T, size_t N>
void AddChoice(CLI::App& app, const char* name, Target& target, const Choice<T> (&choices)[N],
               const char* help) {
  std::vector<std::string> words;
  for (const Choice<T>& choice : choices) words.emplace_back(choice.word);
  AddWords(
      app, name, std::move(words), [&](size_t index) { target = choices[index].value; }, help);
}

// Runs the row that argv[1] names; else prints the table and gives 2, or 0 after --help. program:
// as users type it, "treadle bench".
int RunBenchmark(const char* program, std::span<const Command> benchmarks, int argc, char** argv);

// A `command` below is as users type it after "treadle": "serve"; or, of the other program, all of
// it: "treadle-bench kernels".

// Prints the names of a program's commands and every command's part of a reference
// (help/reference.h). program: as for RunBenchmark, or "treadle".
void PrintReference(const ReferenceFormat& format, const char* program,
                    std::span<const Command> commands);

// Nothing if the command should go on; else the exit code (0 after --help).
std::optional<int> ParseFlags(CLI::App& app, const char* command, int argc, char** argv);

// Prints "treadle <command>: <message>" and gives the exit code that fits.
int Fail(const char* command, const absl::Status& status);
// 0 if all went well; else as Fail. The second prints `output` first, as whole lines.
int Finish(const char* command, const absl::Status& status);
int Finish(const char* command, const absl::StatusOr<std::string>& output);
// Writes a file that a flag asks for; nothing if the path is empty.
absl::Status WriteTo(const char* flag, const std::string& path, const std::string& text);
// The same as Fail in a log, as the event `failed`; if that is a file, on stderr as well.
int Fail(const char* command, const absl::Status& status, Log& log);

}  // namespace treadle
