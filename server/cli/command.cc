#include "server/cli/command.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/nearest.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/cli/help/reference.h"
#include "server/cli/help/terminal.h"

namespace treadle {
namespace {

std::string Invocation(std::string_view command) {
  return Str(command.starts_with("treadle-") ? "" : "treadle ", command);
}

// In one line.
std::string Complaint(const char* command, std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  return Invocation(command) + ": " + Printable(message);
}

int Complain(const char* command, const std::string& message, int code) {
  const std::string line = Complaint(command, message);
  const size_t name = Invocation(command).size() + 1;
  std::fprintf(stderr, "%s%s\n",
               Styled(line.substr(0, name), kRed, HasColours(STDERR_FILENO)).c_str(),
               line.substr(name).c_str());
  return code;
}

constexpr std::string_view kHelpFormat = "--help=";
constexpr int kWidestHelp = 100;

// The format of --help=FORMAT; null: the command line asks for something else.
const ReferenceFormat* FormatAsked(int argc, char** argv) {
  const std::string_view word = argc == 2 ? argv[1] : "";
  return word.starts_with(kHelpFormat) ? FindReferenceFormat(word.substr(kHelpFormat.size()))
                                       : nullptr;
}

void PrintHelp(const CLI::App& app, const std::string& name) {
  const int width = std::min(ColumnsOf(STDOUT_FILENO, kWidestHelp), kWidestHelp);
  std::fputs(HelpText(Describe(app, name), width, HasColours(STDOUT_FILENO)).c_str(), stdout);
}

// The complaint about the first word that is a flag, but none of the command's; empty: there is no
// such word.
std::string UnknownFlag(const CLI::App& app, int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--") break;
    if (!word.starts_with("--")) continue;
    const std::string flag(word.substr(0, word.find('=')));
    if (const CLI::Option* const option = app.get_option_no_throw(flag)) {
      if (flag == word && option->get_type_size_min() > 0) ++i;  // its value
      continue;
    }
    std::vector<std::string> names;
    for (const CLI::Option* option : app.get_options()) {
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
    const std::vector<std::string_view> known(names.begin(), names.end());
    return Str("'", flag, "' is no flag of this command", DidYouMean(flag, known));
  }
  return "";
}

int CodeOf(const absl::Status& status) {
  const bool input =
      absl::IsInvalidArgument(status) || absl::IsNotFound(status) || absl::IsUnimplemented(status);
  return input ? 2 : 1;
}

}  // namespace

void AddWords(CLI::App& app, const char* name, std::vector<std::string> words,
              std::function<void(size_t)> take, const char* help) {
  const CLI::IsMember one_of_them(words);
  app.add_option_function<std::string>(
         name,
         [words = std::move(words), take = std::move(take)](const std::string& word) {
           take(static_cast<size_t>(std::ranges::find(words, word) - words.begin()));
         },
         help)
      ->check(one_of_them);
}

void PrintReference(const ReferenceFormat& format, const char* program,
                    std::span<const Command> commands) {
  CommandNames names;
  for (const Command& command : commands) names.emplace_back(command.name, command.help);
  std::fputs(format.names(program, names).c_str(), stdout);
  for (const Command& command : commands) {
    std::string name = command.name, flag = Str(kHelpFormat, format.name);
    char* arguments[] = {name.data(), flag.data(), nullptr};
    command.run(2, arguments);
  }
}

int RunBenchmark(const char* program, std::span<const Command> benchmarks, int argc, char** argv) {
  if (const ReferenceFormat* const format = FormatAsked(argc, argv)) {
    PrintReference(*format, program, benchmarks);
    return 0;
  }
  const std::string_view name = argc > 1 ? argv[1] : "";
  for (const Command& benchmark : benchmarks) {
    if (name == benchmark.name) return benchmark.run(argc - 1, argv + 1);
  }
  const bool help = name == "--help" || name == "-h";
  std::FILE* const out = help ? stdout : stderr;
  std::fprintf(out, "usage: %s BENCHMARK [flags]; --help lists a benchmark's flags\n\n", program);
  for (const Command& benchmark : benchmarks) {
    std::fprintf(out, "  %-10s %s\n", benchmark.name, benchmark.help);
  }
  if (!help && !name.empty()) std::fprintf(stderr, "\n'%s' is no benchmark\n", argv[1]);
  return help ? 0 : 2;
}

std::optional<int> ParseFlags(CLI::App& app, const char* command, int argc, char** argv) {
  app.name(Invocation(command));
  for (CLI::Option* option : app.get_options()) {
    if (option->get_default_str().empty()) option->capture_default_str();
    if (option->get_default_str() == "[]") option->default_str("");
  }
  if (const ReferenceFormat* const format = FormatAsked(argc, argv)) {
    std::fputs(format->command(Describe(app, Invocation(command))).c_str(), stdout);
    return 0;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    PrintHelp(app, Invocation(command));
    return 0;
  } catch (const CLI::ParseError& error) {
    // The parser may complain of its value, which it takes for a model.
    const std::string unknown = UnknownFlag(app, argc, argv);
    return Complain(command, Str(unknown.empty() ? error.what() : unknown, " (see --help)"), 2);
  }
  return std::nullopt;
}

int Fail(const char* command, const absl::Status& status) {
  return Complain(command, std::string(status.message()), CodeOf(status));
}

int Finish(const char* command, const absl::Status& status) {
  return status.ok() ? 0 : Fail(command, status);
}

int Finish(const char* command, const absl::StatusOr<std::string>& output) {
  if (!output.ok()) return Fail(command, output.status());
  std::fputs(output->c_str(), stdout);
  if (!output->empty() && output->back() != '\n') std::fputc('\n', stdout);
  return 0;
}

absl::Status WriteTo(const char* flag, const std::string& path, const std::string& text) {
  if (path.empty()) return absl::OkStatus();
  std::ofstream file(path);
  file << text;
  if (!file.flush()) return InvalidArgument(flag, ": cannot write ", path);
  return absl::OkStatus();
}

int Fail(const char* command, const absl::Status& status, Log& log) {
  log.Write({.severity = Severity::kError,
             .name = "failed",
             .message = Complaint(command, std::string(status.message()))});
  return log.options().file.empty() ? CodeOf(status) : Fail(command, status);
}

}  // namespace treadle
