#include "server/cli/help/reference.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "server/cli/help/terminal.h"

namespace treadle {
namespace {

constexpr size_t kHelpColumn = 30;

// The kind of value and its words, from CLI11's "TEXT:{auto,cpu}" or "INT:INT in [0 - 4096]".
void FillValue(const CLI::Option& option, ArgumentReference& argument,
               std::vector<std::string>& notes) {
  if (option.get_items_expected_max() == 0) return;  // a switch
  const std::string type = option.get_type_name();
  const size_t brace = type.find('{');
  if (brace != type.npos) {
    argument.value = type.substr(brace);
    argument.words = absl::StrSplit(argument.value.substr(1, argument.value.size() - 2), ',');
  } else {
    argument.value = type.substr(0, type.find(':'));
  }
  if (argument.value.empty()) argument.value = "TEXT";
  std::string initial = option.get_default_str();
  if (initial.starts_with('[')) initial = initial.substr(1, initial.size() - 2);  // a list
  const bool nothing = initial == "none" && argument.words.empty();
  if (!initial.empty() && !nothing) notes.push_back("default " + initial);
  if (const size_t range = type.find(" in ["); range != type.npos) {
    const size_t low = range + 5, high = type.find(" - ", low), end = type.find(']', low);
    notes.push_back(
        Str(type.substr(low, high - low), " to ", type.substr(high + 3, end - high - 3)));
  }
}

ArgumentReference Describe(const CLI::Option& option) {
  ArgumentReference argument;
  argument.help = option.get_description();
  argument.required = option.get_required();
  for (const std::string& name : option.get_snames()) argument.flags.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) argument.flags.push_back("--" + name);
  if (option.get_positional()) {
    argument.positional = absl::AsciiStrToUpper(option.get_name(true, false));
  }
  std::vector<std::string> notes;
  FillValue(option, argument, notes);
  if (!option.get_envname().empty()) notes.push_back("environment " + option.get_envname());
  const auto add = [&notes](const char* what, const std::set<CLI::Option*>& others) {
    std::vector<std::string> names;
    for (const CLI::Option* other : others) names.push_back(other->get_name());
    std::ranges::sort(names);
    if (!names.empty()) notes.push_back(Str(what, absl::StrJoin(names, ", ")));
  };
  add("needs ", option.get_needs());
  add("not with ", option.get_excludes());
  argument.notes = absl::StrJoin(notes, "; ");
  return argument;
}

// The line's words, in lines that begin with `indent` blanks after the first; one that is short
// enough stays as it is.
std::string Wrapped(std::string_view line, size_t indent, size_t width) {
  std::string text;
  size_t column = indent;
  const size_t own = std::min(line.find_first_not_of(' '), line.size());
  if (column + line.size() <= width) return std::string(line);
  const std::vector<std::string> words = absl::StrSplit(std::string(line.substr(own)), ' ');
  for (const std::string& word : words) {
    if (!text.empty() && column + 1 + word.size() > width) {
      text += "\n" + std::string(indent + own, ' ');
      column = indent + own;
    } else if (!text.empty()) {
      text += ' ';
      ++column;
    }
    if (text.empty()) text = std::string(own, ' ');
    text += word;
    column += word.size();
  }
  return text;
}

std::string WrappedLines(const std::string& text, size_t width) {
  std::vector<std::string> lines = absl::StrSplit(text, '\n');
  for (std::string& line : lines) line = Wrapped(line, 0, width) + "\n";
  return absl::StrJoin(lines, "");
}

std::string Line(const ArgumentReference& argument, size_t width, bool colours) {
  const std::string names = argument.Names();
  const std::string value = argument.flags.empty() && argument.words.empty() ? "" : argument.value;
  std::string line = "  " + Styled(names, kCyan, colours) + (value.empty() ? "" : " " + value);
  const size_t used = 2 + names.size() + (value.empty() ? 0 : 1 + value.size());
  line += used + 2 > kHelpColumn ? "\n" + std::string(kHelpColumn, ' ')
                                 : std::string(kHelpColumn - used, ' ');
  return line + Wrapped(argument.HelpAndNotes(), kHelpColumn, width) + "\n";
}

}  // namespace

std::string ArgumentReference::Names() const {
  std::string names = absl::StrJoin(flags, ", ");
  if (positional.empty()) return names;
  return names.empty() ? positional : names + ", " + positional;
}

std::string ArgumentReference::HelpAndNotes() const {
  return notes.empty() ? help : Str(help, " (", notes, ")");
}

std::string CommandReference::Usage() const {
  std::string usage = command;
  for (const Group& group : groups) {
    for (const ArgumentReference& argument : group.arguments) {
      if (argument.positional.empty()) continue;
      const bool needed = argument.required || argument.flags.empty();
      usage += needed ? " " + argument.positional : " [" + argument.positional + "]";
    }
  }
  return usage + " [flags]";
}

CommandReference Describe(const CLI::App& app, const std::string& command) {
  CommandReference reference{
      .command = command, .about = app.get_description(), .footer = app.get_footer(), .groups = {}};
  const std::string last = app.get_help_ptr()->get_group();
  std::vector<std::string> titles = app.get_groups();
  std::ranges::stable_sort(titles, {}, [&](const std::string& title) { return title == last; });
  for (const std::string& title : titles) {
    CommandReference::Group group{.title = title, .arguments = {}};
    for (const CLI::Option* option : app.get_options()) {
      if (option->get_group() == title) group.arguments.push_back(Describe(*option));
    }
    // Positional arguments first.
    std::ranges::stable_sort(group.arguments, {},
                             [](const ArgumentReference& a) { return a.positional.empty(); });
    reference.groups.push_back(std::move(group));
  }
  return reference;
}

std::string HelpText(const CommandReference& reference, int width, bool colours) {
  const auto columns = static_cast<size_t>(width);
  std::string text = WrappedLines(reference.about, columns) + "\n" +
                     Styled("Usage: ", kBold, colours) + reference.Usage() + "\n";
  for (const CommandReference::Group& group : reference.groups) {
    text += "\n" + Styled(group.title + ":", kBold, colours) + "\n";
    for (const ArgumentReference& argument : group.arguments) {
      text += Line(argument, columns, colours);
    }
  }
  if (!reference.footer.empty()) text += "\n" + WrappedLines(reference.footer, columns);
  return text;
}

const ReferenceFormat* FindReferenceFormat(std::string_view name) {
  for (const ReferenceFormat* format : {&kManPage, &kBash, &kZsh, &kFish}) {
    if (name == format->name) return format;
  }
  return nullptr;
}

}  // namespace treadle
