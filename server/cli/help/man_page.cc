// The man page: roff with the macros of man(7).
#include "absl/strings/str_replace.h"
#include "base/status.h"
#include "base/version.h"
#include "server/cli/help/reference.h"

namespace treadle {
namespace {

// Text in which roff sees no request, escape or hyphen of its own.
std::string Roff(const std::string& text) {
  return "\\&" + absl::StrReplaceAll(text, {{"\\", "\\e"}, {"-", "\\-"}, {"\n", "\n\\&"}});
}

std::string Quoted(const std::string& text) {
  return Str('"', absl::StrReplaceAll(Roff(text), {{"\"", "\\(dq"}}), '"');
}

std::string Begin() {
  return Str(".TH TREADLE 1 \"\" ", Quoted(Str("treadle ", kVersion)),
             " \"User Commands\"\n"
             ".SH NAME\ntreadle \\- serve transformer language models\n"
             ".SH SYNOPSIS\n.B treadle\n.I COMMAND\n[flags]\n"
             ".SH DESCRIPTION\n",
             Roff("An iteration-level serving engine for transformer language models, over gRPC "
                  "and HTTP. The flags of `treadle serve` are also read from the environment "
                  "(TREADLE_LISTEN for --listen) and from the file of --config."),
             "\n.SH COMMANDS\n");
}

std::string Names(const std::string& program, const CommandNames& commands) {
  std::string text = program == "treadle" ? "" : Str(".SH ", Quoted(program), "\n");
  for (const auto& [name, help] : commands) {
    text += Str(".TP\n.B ", Roff(Str(program, " ", name)), "\n", Roff(help), "\n");
  }
  return text;
}

std::string Argument(const ArgumentReference& argument) {
  std::string text = ".TP\n.BR " + Quoted(argument.Names());
  if (!argument.flags.empty() && !argument.value.empty()) {
    text += " \" \" " + Quoted(argument.value);
  }
  return text + "\n" + Roff(argument.HelpAndNotes()) + "\n";
}

std::string OneCommand(const CommandReference& reference) {
  std::string text = Str(".SH ", Quoted(reference.command), "\n.B ", Roff(reference.Usage()),
                         "\n.PP\n", Roff(reference.about), "\n");
  for (const CommandReference::Group& group : reference.groups) {
    text += Str(".SS ", Quoted(group.title), "\n");
    for (const ArgumentReference& argument : group.arguments) text += Argument(argument);
  }
  if (!reference.footer.empty()) {
    text += Str(".PP\n.nf\n", Roff(reference.footer), "\n.fi\n");
  }
  return text;
}

}  // namespace

const ReferenceFormat kManPage = {"man", Begin, Names, OneCommand,
                                  ".SH \"SEE ALSO\"\n"
                                  "The pages in share/doc/treadle beside this one's folder.\n"};

}  // namespace treadle
