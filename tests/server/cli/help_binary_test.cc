// The texts that a newcomer reads of build/treadle: --help, the man page, completions, colours.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/configuration.h"
#include "tests/server/cli/served_binary.h"
#include "tests/server/cli/terminal/terminal_program.h"

namespace treadle {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

constexpr winsize kTerminal = {.ws_row = 50, .ws_col = 60, .ws_xpixel = 0, .ws_ypixel = 0};

std::vector<std::string> LinesOf(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// The flags, in order, of the lines between a group's title and the next blank line.
std::vector<std::string> FlagsUnder(const std::string& title, const std::string& help) {
  std::vector<std::string> flags;
  const std::vector<std::string> lines = LinesOf(help);
  auto line = std::ranges::find(lines, title + ":");
  if (line != lines.end()) ++line;
  for (; line != lines.end() && !line->empty(); ++line) {
    std::smatch found;
    if (std::regex_search(*line, found, std::regex("^  (-h, )?(--[a-z0-9-]+)"))) {
      flags.push_back(found[2]);
    }
  }
  return flags;
}

TEST(Help, OfServeBeginsWithTheTenThatMatterAndHasEveryFlagOnceInAGroup) {
  const std::string help = RunToEnd(Treadle("serve --help"));
  EXPECT_THAT(help, HasSubstr("\nUsage: treadle serve [MODEL] [flags]\n\nWhat matters first:\n"));
  EXPECT_THAT(
      FlagsUnder("What matters first", help),
      ElementsAre("--model", "--listen", "--http-listen", "--api-keys-file", "--max-batch-size",
                  "--max-context", "--kv-memory", "--weights", "--device", "--threads"));
  for (const ServeFlag& flag : ServeFlags()) {
    const std::vector<std::string> flags = FlagsUnder(flag.group, help);
    EXPECT_EQ(std::ranges::count(flags, flag.name), 1) << flag.name << " under " << flag.group;
    EXPECT_LE(flags.size(), 15u) << flag.group;
  }
  EXPECT_THAT(FlagsUnder("Options", help), ElementsAre("--help"));
}

TEST(Help, SaysKindDefaultAndRangeInLinesThatFit) {
  const std::string help = RunToEnd(Treadle("bench iteration --help"));
  EXPECT_THAT(help, HasSubstr("\n  --repeats INT               runs of each size; the median "
                              "counts (default 3)\n"));
  EXPECT_THAT(help, HasSubstr("  --device {auto,cpu,cuda}    device: cpu, cuda"));
  EXPECT_THAT(help, HasSubstr("\nEngine: K/V cache:\n"));
  EXPECT_THAT(RunToEnd(Treadle("worker --help")), HasSubstr("(default 0; 0 to 4096)"));
  for (const std::string& line : LinesOf(help)) EXPECT_LE(line.size(), 100u) << line;
}

TEST(Help, HasColoursOnATerminalOnlyAndItsWidth) {
  const std::vector<std::string> command = Treadle("worker --help");
  EXPECT_THAT(RunToEnd(command), Not(HasSubstr("\x1b")));
  for (const char* without : {"", "NO_COLOR=1", "TERM=dumb"}) {
    std::vector<std::string> under = {"/usr/bin/env", "TERM=xterm", "NO_COLOR="};
    if (*without != '\0') under.emplace_back(without);
    under.insert(under.end(), command.begin(), command.end());
    TerminalProgram help(under, kTerminal);
    EXPECT_EQ(help.WaitForExit(), 0);
    const bool colours = help.output().find("\x1b[1mUsage: \x1b[0m") != std::string::npos;
    EXPECT_EQ(colours, *without == '\0') << help.output();
    if (colours) continue;
    EXPECT_THAT(help.output(), Not(HasSubstr("\x1b")));
    for (const std::string& line : LinesOf(help.output())) EXPECT_LE(line.size(), 62u) << line;
  }
}

TEST(Help, OfACommandIsTheCommandsOwn) {
  EXPECT_EQ(RunToEnd(Treadle("help top")), RunToEnd(Treadle("top --help")));
  EXPECT_EQ(RunToEnd(Treadle("help")), RunToEnd(Treadle("--help")));
  EXPECT_THAT(RunToEnd(Treadle("help fly"), 2), HasSubstr("'fly' is no command, expected one of"));
  EXPECT_THAT(RunToEnd(Treadle("help top --man"), 2), HasSubstr("excludes"));
}

// man(7): a request begins with a dot or an apostrophe at the beginning of a line, an escape with
// a backslash, and "-" without one is a hyphen.
TEST(ManPage, HasEveryCommandAndFlagAndNoRequestByAccident) {
  const std::string page = RunToEnd(Treadle("help --man"));
  EXPECT_THAT(page, testing::StartsWith(".TH TREADLE 1 "));
  for (const ServeFlag& flag : ServeFlags()) {
    const std::string name = std::regex_replace(std::string(flag.name), std::regex("-"), "\\-");
    EXPECT_THAT(page, HasSubstr("\\&" + name)) << flag.name;
  }
  for (const char* command : {"serve", "bench serve", "bench trace", "completions"}) {
    EXPECT_THAT(page, HasSubstr(Str(".SH \"\\&treadle ", command, "\"\n")));
  }
  const std::regex known("\\.(TH|SH|SS|TP|PP|B|BR|I|nf|fi)( .*)?");
  for (const std::string& line : LinesOf(page)) {
    if (line.starts_with('.')) {
      EXPECT_TRUE(std::regex_match(line, known)) << line;
    }
    EXPECT_FALSE(line.starts_with('\'')) << line;
  }
}

// The words that bash offers for a command line, whose last word is the one that is typed.
std::string Offered(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& word : words) line += " '" + word + "'";
  return RunToEnd(
      {"/bin/bash", "-euo", "pipefail", "-c",
       Str("source <(", TREADLE_BINARY, " completions bash); COMP_WORDS=(", line,
           "); COMP_CWORD=", words.size() - 1, "; _treadle || true; echo \"${COMPREPLY[*]-}\"")});
}

TEST(Completions, OfBashOfferCommandsFlagsAndTheirWords) {
  EXPECT_EQ(Offered({"treadle", "se"}), "serve\n");
  EXPECT_EQ(Offered({"treadle", "serve", "--dev"}), "--device\n");
  EXPECT_EQ(Offered({"treadle", "serve", "--device", "c"}), "cpu cuda\n");
  EXPECT_EQ(Offered({"treadle", "serve", "--device", "=", "au"}), "auto\n");
  EXPECT_EQ(Offered({"treadle", "serve", "--model", ""}), "\n");  // files, by -o default
  EXPECT_EQ(Offered({"treadle", "bench", ""}), "serve iteration trace\n");
  EXPECT_EQ(Offered({"treadle", "bench", "serve", "--request"}), "--request-rate\n");
  EXPECT_EQ(Offered({"treadle", "completions", ""}), "bash zsh fish\n");
}

TEST(Completions, OfEveryShellHaveEveryFlag) {
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const std::string script = RunToEnd(Treadle(Str("completions ", shell)));
    for (const ServeFlag& flag : ServeFlags()) {
      const std::string name = shell == std::string("fish") ? Str("-l ", flag.name + 2) : flag.name;
      EXPECT_THAT(script, HasSubstr(name)) << shell;
    }
  }
  EXPECT_THAT(RunToEnd(Treadle("completions csh"), 2), HasSubstr("csh not in {bash,zsh,fish}"));
}

TEST(Model, MayStandWithoutItsFlag) {
  EXPECT_THAT(RunToEnd(Treadle("serve --print-config /no/such.gguf")),
              HasSubstr("# from the command line\nmodel = /no/such.gguf\n"));
  EXPECT_THAT(RunToEnd(Treadle("serve --model a b"), 2), HasSubstr("not expected: b"));
  EXPECT_THAT(RunToEnd(Treadle("generate --prompt Hi --temperature 0 --max-new-tokens 1 "
                               "--threads 1 --pin-threads off",
                               {OwnModel()})),
              HasSubstr("\n"));
}

// One line that is drawn in place, then what the work took.
TEST(ProgressOnATerminal, IsOneLine) {
  const std::string out = OwnFolder().path() + "/quantized.gguf";
  TerminalProgram quantize(Treadle("quantize --weights q4_0", {OwnModel(), out}), kTerminal);
  EXPECT_EQ(quantize.WaitForExit(), 0);
  const std::vector<std::string> lines = LinesOf(quantize.output());
  ASSERT_EQ(lines.size(), 2u) << quantize.output();
  EXPECT_THAT(lines[0], testing::StartsWith("\r\x1b[K"));
  EXPECT_THAT(lines[0], testing::ContainsRegex(" MB in [0-9.]+ s, [0-9.]+ MB/s"));
  EXPECT_THAT(lines[1], HasSubstr("matrices converted"));
}

}  // namespace
}  // namespace treadle
