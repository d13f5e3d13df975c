#include "server/cli/command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "base/utf8.h"

namespace treadle {
namespace {

// In one line.
std::string Complaint(const char* command, std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  return std::string("treadle ") + command + ": " + Printable(message);
}

int Complain(const char* command, const std::string& message, int code) {
  std::fprintf(stderr, "%s\n", Complaint(command, message).c_str());
  return code;
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

std::optional<int> ParseFlags(CLI::App& app, const char* command, int argc, char** argv) {
  app.name(std::string("treadle ") + command);
  for (CLI::Option* option : app.get_options()) {
    if (option->get_default_str().empty()) option->capture_default_str();
    if (option->get_default_str() == "[]") option->default_str("");
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    return Complain(command, std::string(error.what()) + " (see --help)", 2);
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

int Fail(const char* command, const absl::Status& status, Log& log) {
  log.Write({.severity = Severity::kError,
             .name = "failed",
             .message = Complaint(command, std::string(status.message()))});
  return log.options().file.empty() ? CodeOf(status) : Fail(command, status);
}

}  // namespace treadle
