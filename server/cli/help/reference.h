// The reference of a command: --help, the man page, and completions for shells, all made from the
// CLI::App that parses them.
//
// A reference of all commands is put together by `treadle help --man` and `treadle completions`,
// which run every command with --help=FORMAT; ParseFlags then prints the command's part of it.
//
// Pure.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace CLI {
class App;
}

namespace treadle {

// One flag or positional argument.
struct ArgumentReference {
  std::vector<std::string> flags;  // "-h", "--help"; empty: positional alone
  std::string positional;          // "MODEL"; or empty
  std::string value;               // "SIZE", "{auto,cpu}"; empty: it takes none
  std::vector<std::string> words;  // all that it takes, if they are given
  std::string help;
  std::string notes;  // "default 32; not with --target"; or empty
  bool required = false;

  std::string Names() const;         // "--model, MODEL"
  std::string HelpAndNotes() const;  // "most requests that wait (default 1024)"
};
struct CommandReference {
  struct Group {
    std::string title;
    std::vector<ArgumentReference> arguments;
  };
  std::string command;  // "treadle bench serve"
  std::string about, footer;
  std::vector<Group> groups;  // in order; that of --help is the last

  // "treadle serve [MODEL] [flags]"
  std::string Usage() const;
};
// `command` is ParseFlags'.
CommandReference Describe(const CLI::App& app, const std::string& command);

// Text of at most `width` columns where words allow it.
std::string HelpText(const CommandReference& reference, int width, bool colours);

// Names of commands with a line of help each.
using CommandNames = std::vector<std::pair<std::string, std::string>>;

// A kind of reference. Its parts are text, written one after the other: begin; then the names of
// the program's commands and a part for each command, where one that has commands of its own
// ("treadle bench") gives their names and parts; then end.
struct ReferenceFormat {
  const char* name;  // "man", "bash"
  std::string (*begin)();
  std::string (*names)(const std::string& program, const CommandNames& commands);
  std::string (*command)(const CommandReference& reference);
  const char* end;
};
extern const ReferenceFormat kManPage, kBash, kZsh, kFish;

// Null: there is none of that name.
const ReferenceFormat* FindReferenceFormat(std::string_view name);

}  // namespace treadle
