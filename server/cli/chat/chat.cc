// treadle chat: a conversation in a terminal with the model of a running server.
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <optional>
#include <string>
#include <thread>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/cli/chat/chat_answer.h"
#include "server/cli/client_flags.h"
#include "server/cli/command.h"
#include "server/cli/daemon.h"
#include "server/cli/generate_client.h"
#include "server/cli/help/terminal.h"
#include "server/flag_values.h"
#include "server/grpc/inference.pb.h"
#include "server/grpc/messages.h"

namespace treadle {
namespace {

constexpr char kCommandHelp[] =
    "A backslash at the end of a line: the message goes on in the next one.\n"
    "  /system TEXT   the system message from now on; without TEXT: none\n"
    "  /reset         forget the conversation, but not the system message\n"
    "  /help          this\n"
    "  /quit          end, as Ctrl-D does; Ctrl-C stops an answer\n";

struct ChatFlags {
  std::string target = kDefaultTarget;
  ClientFlags access;
  std::string timeout;
  std::string system;
  v1::GenerateRequest request;
};

void Print(const std::string& text, std::FILE* out = stdout) {
  std::fputs(text.c_str(), out);
  std::fflush(out);
}

// Lines of standard input, as a terminal or a pipe gives them.
class Lines {
 public:
  explicit Lines(Signals& signals) : signals_(signals) {}

  enum class Event { kLine, kInterrupt, kEnd };
  Event Next(std::string& line) {
    while (true) {
      const size_t end = text_.find('\n');
      if (end != text_.npos || (over_ && !text_.empty())) {
        line = text_.substr(0, end);
        text_.erase(0, end == text_.npos ? end : end + 1);
        return Event::kLine;
      }
      if (over_) return Event::kEnd;
      const int signal = signals_.Wait(STDIN_FILENO);
      if (signal == SIGTERM) return Event::kEnd;
      if (signal == SIGINT) return Event::kInterrupt;
      if (signal != Signals::kReadable) continue;
      char bytes[4096];
      const ssize_t n = read(STDIN_FILENO, bytes, sizeof bytes);
      over_ = n <= 0;
      if (n > 0) text_.append(bytes, static_cast<size_t>(n));
    }
  }

 private:
  Signals& signals_;
  std::string text_;
  bool over_ = false;
};

class Conversation {
 public:
  Conversation(const ChatFlags& options, const GenerateClient& client, Signals& signals)
      : client_(client),
        signals_(signals),
        lines_(signals),
        request_(options.request),
        system_(options.system) {}

  // Until the input's end, /quit or SIGTERM.
  absl::Status Run() {
    TREADLE_ASSIGN_OR_RETURN(const v1::GetModelInfoResponse model, client_.ModelInfo());
    if (!model.has_chat_template()) {
      return InvalidArgument(Printable(model.name()),
                             " has no chat template, which a conversation needs; expected such a "
                             "model, or treadle generate --prompt");
    }
    DefaultToGreedy(model.has_sampling_defaults(), request_);
    reasoning_opened_ = model.reasoning_opened();
    if (prompts_) Print(Printable(model.name()) + "; /help lists commands\n");
    while (const std::optional<std::string> message = NextMessage()) {
      if (message->empty()) continue;
      if (message->front() != '/') {
        Ask(*message);
      } else if (!Obey(*message)) {
        break;
      }
      if (ended_) break;
    }
    return absl::OkStatus();
  }

 private:
  // Lines up to one that does not end with a backslash; nothing at the input's end.
  std::optional<std::string> NextMessage() {
    std::string message, line;
    Prompt("> ");
    while (true) {
      const Lines::Event event = lines_.Next(line);
      if (event == Lines::Event::kEnd || (event == Lines::Event::kInterrupt && !prompts_)) {
        if (prompts_) Print("\n");
        return std::nullopt;
      }
      if (event == Lines::Event::kInterrupt) {
        message.clear();
        Print("\n");
        Prompt("> ");
        continue;
      }
      message += line;
      if (!message.ends_with('\\')) return message;
      message.back() = '\n';
      Prompt(". ");
    }
  }

  void Prompt(const char* text) const {
    if (prompts_) Print(Styled(text, kBold, colours_));
  }

  // False: the conversation ends.
  bool Obey(const std::string& line) {
    const size_t blank = line.find(' ');
    const std::string command = line.substr(0, blank);
    if (command == "/quit") return false;
    if (command == "/reset") {
      turns_.clear_messages();
    } else if (command == "/system") {
      system_ = blank == line.npos ? "" : line.substr(blank + 1);
    } else if (command == "/help") {
      Print(kCommandHelp);
    } else {
      Print(Str("'", Printable(command), "' is no command; ", kCommandHelp), stderr);
    }
    return true;
  }

  static void Add(const char* role, const std::string& content, v1::Chat& chat) {
    v1::ChatMessage* message = chat.add_messages();
    message->set_role(role);
    message->set_content(content);
  }

  void Ask(const std::string& text) {
    v1::Chat& chat = *request_.mutable_chat();
    chat.clear_messages();
    if (!system_.empty()) Add("system", system_, chat);
    chat.MergeFrom(turns_);
    Add("user", text, chat);

    grpc::ClientContext context;
    ChatAnswer answer(isatty(STDOUT_FILENO) != 0, colours_, reasoning_opened_);
    v1::GenerateResponse whole;
    absl::Status status;
    std::thread reader([&] {
      status = client_.Generate(request_, context, [&](const v1::GenerateResponse& next) {
        Append(next, whole);
        Print(answer.Push(next.output().text()));
      });
      signals_.Interrupt();
    });
    bool stopped = false;
    while (const int signal = signals_.Wait()) {
      ended_ |= signal == SIGTERM || !prompts_;
      stopped = true;
      context.TryCancel();
    }
    reader.join();
    Print(answer.Finish() + "\n");
    if (!status.ok() && !stopped) {
      Fail("chat", status);
    } else if (isatty(STDERR_FILENO) != 0) {
      Print(Styled(Summary(whole, stopped), kDim, HasColours(STDERR_FILENO)) + "\n", stderr);
    }
    // A question without an answer is forgotten, so that it can be asked again.
    if (answer.content().empty()) return;
    Add("user", text, turns_);
    Add("assistant", answer.content(), turns_);
  }

  static std::string Summary(const v1::GenerateResponse& answer, bool stopped) {
    const v1::Timing& timing = answer.timing();
    const int tokens = answer.usage().completion_tokens();
    if (stopped || tokens == 0) return "[stopped]";
    const bool cut = answer.output().finish_info().reason() == v1::FINISH_REASON_LENGTH;
    const double after_first = timing.total() - timing.first_token();
    const double rate = tokens > 1 && after_first > 0 ? (tokens - 1) / after_first : 0;
    return absl::StrFormat("[%s%d tokens, %.1f tokens/s; first token after %.3f s]",
                           cut ? "cut at the most tokens; " : "", tokens, rate,
                           timing.first_token());
  }

  const GenerateClient& client_;
  Signals& signals_;
  Lines lines_;
  v1::GenerateRequest request_;
  std::string system_;
  v1::Chat turns_;
  std::string reasoning_opened_;  // as of GetModelInfo
  bool ended_ = false;            // by SIGTERM, or by SIGINT where nobody types
  const bool prompts_ = isatty(STDIN_FILENO) != 0 && isatty(STDOUT_FILENO) != 0;
  const bool colours_ = HasColours(STDOUT_FILENO);
};

absl::Status Talk(const ChatFlags& options) {
  std::chrono::milliseconds timeout{0};
  if (!options.timeout.empty()) {
    const auto parsed = ParseDuration(options.timeout);
    if (!parsed.ok()) return InvalidArgument("--timeout ", parsed.status().message());
    timeout = *parsed;
  }
  Signals signals;  // before gRPC's threads
  TREADLE_ASSIGN_OR_RETURN(const GenerateClient client,
                           GenerateClient::Open(options.target, options.access, timeout));
  return Conversation(options, client, signals).Run();
}

}  // namespace

int RunChat(int argc, char** argv) {
  ChatFlags options;
  CLI::App app(
      "A conversation with the model of a running server. Lines of a pipe are messages, too.");
  app.footer(kCommandHelp);
  app.option_defaults()->group("Conversation");
  app.add_option("--system", options.system, "system message before the conversation");
  app.option_defaults()->group("Server");
  app.add_option("--target", options.target, "server, host:port");
  AddClientFlags(app, options.access);
  app.add_option("--timeout", options.timeout,
                 "deadline of each answer, such as 30s; none if absent");
  AddSamplingFlags(app, options.request);
  AddStoppingFlags(app, options.request);
  if (auto code = ParseFlags(app, "chat", argc, argv)) return *code;
  return Finish("chat", Talk(options));
}

}  // namespace treadle
