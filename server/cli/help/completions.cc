// Completions of commands, flags and the words that flags take, for shells. A word that is neither
// is a file's name.
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/status.h"
#include "server/cli/help/reference.h"

namespace treadle {
namespace {

// The command line's words that name the command of a part: "bench serve" of "treadle bench serve".
std::string KeyOf(const std::string& program) {
  const size_t blank = program.find(' ');
  return blank == program.npos ? "" : program.substr(blank + 1);
}

std::vector<std::string> NamesOf(const CommandNames& commands) {
  std::vector<std::string> names;
  for (const auto& [name, help] : commands) names.push_back(name);
  return names;
}

// The first clause of a help text, without what shells would take for their own.
std::string Clause(const std::string& help) {
  const std::string plain = absl::StrReplaceAll(
      help.substr(0, help.find_first_of(";(")),
      {{"'", ""}, {"`", ""}, {"[", ""}, {"]", ""}, {":", ","}, {"$", ""}, {"\\", ""}});
  return plain.substr(0, plain.find_last_not_of(' ') + 1);
}

// All words that a command's arguments without a flag may be.
std::vector<std::string> LoneWords(const CommandReference& reference) {
  std::vector<std::string> words;
  for (const CommandReference::Group& group : reference.groups) {
    for (const ArgumentReference& argument : group.arguments) {
      if (argument.flags.empty())
        words.insert(words.end(), argument.words.begin(), argument.words.end());
    }
  }
  return words;
}

// Calls `add` for every flag of a command.
template <typename Add>
void ForEachFlag(const CommandReference& reference, const Add& add) {
  for (const CommandReference::Group& group : reference.groups) {
    for (const ArgumentReference& argument : group.arguments) {
      for (const std::string& flag : argument.flags) add(flag, argument);
    }
  }
}

std::string BashBegin() {
  return R"(# Completions of treadle for bash: source this, or install it as
# share/bash-completion/completions/treadle.
_treadle() {
  local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} key='' words=''
  if [[ $word == '=' ]]; then
    word=''
  elif [[ $previous == '=' ]]; then
    previous=${COMP_WORDS[COMP_CWORD - 2]}
  fi
  if ((COMP_CWORD > 1)); then key=${COMP_WORDS[1]}; fi
  if [[ $key == bench ]] && ((COMP_CWORD > 2)); then key+=" ${COMP_WORDS[2]}"; fi
  case "$key:$previous" in
)";
}
std::string BashNames(const std::string& program, const CommandNames& commands) {
  return Str("    '", KeyOf(program), ":'*) words='", absl::StrJoin(NamesOf(commands), " "),
             "' ;;\n");
}
std::string BashCommand(const CommandReference& reference) {
  const std::string key = KeyOf(reference.command);
  std::string text;
  std::vector<std::string> flags, taking;
  ForEachFlag(reference, [&](const std::string& flag, const ArgumentReference& argument) {
    flags.push_back(flag);
    if (!argument.words.empty()) {
      text +=
          Str("    '", key, ":", flag, "') words='", absl::StrJoin(argument.words, " "), "' ;;\n");
    } else if (!argument.value.empty()) {
      taking.push_back(Str("'", key, ":", flag, "'"));
    }
  });
  if (!taking.empty()) text += Str("    ", absl::StrJoin(taking, "|"), ") ;;\n");
  return text + Str("    '", key, ":'*)\n      words='", absl::StrJoin(LoneWords(reference), " "),
                    "'\n      [[ $word == -* ]] && words='", absl::StrJoin(flags, " "), "' ;;\n");
}

std::string ZshBegin() {
  return R"(#compdef treadle
_treadle() {
  local -a names
  local key=''
  local -i skip=1
  if ((CURRENT > 2)); then key=$words[2]; fi
  if [[ $key == bench ]] && ((CURRENT > 3)); then
    key="bench $words[3]"
    skip=2
  fi
  if [[ -n $key ]]; then
    words=(treadle "${(@)words[2 + skip,-1]}")
    ((CURRENT -= skip))
  fi
  case $key in
)";
}
std::string ZshNames(const std::string& program, const CommandNames& commands) {
  std::string text = Str("    '", KeyOf(program), "')\n      names=(");
  for (const auto& [name, help] : commands)
    text += Str("\n        '", name, ":", Clause(help), "'");
  return text + ")\n      _describe command names ;;\n";
}
std::string ZshCommand(const CommandReference& reference) {
  std::string text = Str("    '", KeyOf(reference.command), "')\n      _arguments");
  ForEachFlag(reference, [&](const std::string& flag, const ArgumentReference& argument) {
    const std::string help = Str("[", Clause(argument.help), "]");
    if (argument.value.empty()) {
      text += Str(" \\\n        '", flag, help, "'");
    } else {
      const std::string words =
          argument.words.empty() ? "_files" : Str("(", absl::StrJoin(argument.words, " "), ")");
      text += Str(" \\\n        '", flag, "=", help, ":value:", words, "'");
    }
  });
  const std::vector<std::string> lone = LoneWords(reference);
  return Str(text, " \\\n        '*:file:",
             lone.empty() ? "_files" : Str("(", absl::StrJoin(lone, " "), ")"), "' ;;\n");
}

std::string FishBegin() {
  return R"(# True if the command line's words are these, or begin with them.
function __treadle_is
    set -l words (commandline -opc)[2..]
    string match -q -- "$argv *" "$words "
end
function __treadle_is_only
    set -l words (commandline -opc)[2..]
    test "$words" = "$argv"
end
)";
}
std::string FishNames(const std::string& program, const CommandNames& commands) {
  std::string text;
  for (const auto& [name, help] : commands) {
    text += Str("complete -c treadle -f -n '__treadle_is_only ", KeyOf(program), "' -a '", name,
                "' -d '", Clause(help), "'\n");
  }
  return text;
}
std::string FishCommand(const CommandReference& reference) {
  std::string text;
  ForEachFlag(reference, [&](const std::string& flag, const ArgumentReference& argument) {
    text +=
        Str("complete -c treadle -n '__treadle_is ", KeyOf(reference.command), "' ",
            flag.starts_with("--") ? "-l " : "-s ", flag.substr(flag.starts_with("--") ? 2 : 1));
    if (!argument.words.empty()) {
      text += Str(" -xa '", absl::StrJoin(argument.words, " "), "'");
    } else if (!argument.value.empty()) {
      text += " -r";
    }
    text += Str(" -d '", Clause(argument.help), "'\n");
  });
  if (const std::vector<std::string> lone = LoneWords(reference); !lone.empty()) {
    text += Str("complete -c treadle -f -n '__treadle_is ", KeyOf(reference.command), "' -a '",
                absl::StrJoin(lone, " "), "'\n");
  }
  return text;
}

}  // namespace

const ReferenceFormat kBash = {"bash", BashBegin, BashNames, BashCommand,
                               R"(  esac
  # A word of the list, or else (-o default) a file.
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
}
complete -o default -F _treadle treadle
)"};

const ReferenceFormat kZsh = {"zsh", ZshBegin, ZshNames, ZshCommand, R"(  esac
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _treadle "$@"
else
  compdef _treadle treadle
fi
)"};

const ReferenceFormat kFish = {"fish", FishBegin, FishNames, FishCommand, ""};

}  // namespace treadle
