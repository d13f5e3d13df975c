// `treadle chat` in a pipe and in a terminal, against a server; and a prompt that is typed.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "net/address.h"
#include "server/grpc/inference.grpc.pb.h"
#include "tests/server/cli/served_binary.h"
#include "tests/server/cli/terminal/terminal_program.h"
#include "tests/server/test_server.h"

namespace treadle {
namespace {

using testing::EndsWith;
using testing::HasSubstr;

constexpr winsize kTerminal = {.ws_row = 24, .ws_col = 80, .ws_xpixel = 0, .ws_ypixel = 0};
constexpr char kShort[] = "--max-new-tokens 4 --ignore-eos --temperature 0 ";

// A server of a tiny model, one for all tests of this process.
ServedBinary& TheServer() {
  static ServedBinary server(
      Str(ServedBinary::kGrpcOnly, "--device cpu --threads 1 --model ", OwnModel()));
  return server;
}

using Turns = std::vector<std::pair<const char*, std::string>>;

// The server's answer to these messages, asked directly.
std::string AnswerTo(const ServedBinary& server, const Turns& turns) {
  v1::GenerateRequest request = GreedyRequest(4);
  for (const auto& [role, content] : turns) {
    v1::ChatMessage& message = *request.mutable_chat()->add_messages();
    message.set_role(role);
    message.set_content(content);
  }
  return Generate(server, request).output().text();
}

// The output of chat for these lines in a pipe.
std::string Said(const ServedBinary& server, const std::string& lines, const std::string& flags) {
  const std::string path = OwnFolder().path() + "/lines";
  std::ofstream(path) << lines;
  return RunToEnd(
      {"/bin/sh", "-c",
       Str(TREADLE_BINARY, " chat ", kShort, flags, " --target ", server.address(), " < ", path)});
}

TEST(ChatBinary, KeepsTheTurnsAndTheSystemMessage) {
  const ServedBinary& server = TheServer();
  const auto user = [](const char* text) { return std::pair("user", std::string(text)); };
  const auto model = [](const std::string& text) { return std::pair("assistant", text); };
  const std::string first = AnswerTo(server, {user("One")});
  const std::string second = AnswerTo(server, {user("One"), model(first), user("Two\nlines")});
  const std::string terse = AnswerTo(server, {{"system", "Be terse"}, user("One")});
  EXPECT_NE(first, terse);
  EXPECT_EQ(Said(server, "One\nTwo\\\nlines\n", ""), first + "\n" + second + "\n");
  // The last line has no end.
  EXPECT_EQ(Said(server, "One\n/reset\n\n/system Be terse\nOne\n/system\n/reset\nOne", ""),
            first + "\n" + terse + "\n" + first + "\n");
  EXPECT_EQ(Said(server, "One\n/quit\nTwo\n", "--system 'Be terse'"), terse + "\n");
}

TEST(ChatBinary, AnErrorEndsNoConversation) {
  const ServedBinary& server = TheServer();
  const std::string first = AnswerTo(server, {{"user", "One"}});
  const std::string said = Said(server, std::string(900, 'x') + "\n/fly\nOne\n", "");
  EXPECT_THAT(said, HasSubstr("treadle chat: " + server.address() + ": INVALID_ARGUMENT: "));
  EXPECT_THAT(said, HasSubstr("'/fly' is no command; "));
  EXPECT_THAT(said, EndsWith("\n" + first + "\n"));  // the refused message is forgotten
}

TEST(ChatBinary, WithoutAServerOrATemplateItEnds) {
  EXPECT_THAT(RunToEnd(Treadle("chat --target 127.0.0.1:1"), 1),
              HasSubstr("treadle chat: 127.0.0.1:1: UNAVAILABLE: "));
  const TestFolder folder;
  TinyModelOptions options;
  options.chat_template = false;
  const ServedBinary server(Str(ServedBinary::kGrpcOnly, "--threads 1 --model ",
                                *WriteTinyLlamaGguf(folder.path(), options)));
  EXPECT_THAT(RunToEnd(Treadle("chat --target " + server.address()), 2),
              HasSubstr("has no chat template, which a conversation needs"));
}

TEST(ChatBinary, ATerminalHasPromptsAndASummary) {
  const ServedBinary& server = TheServer();
  TerminalProgram chat(Treadle(Str("chat ", kShort, "--target ", server.address())), kTerminal);
  ASSERT_TRUE(chat.WaitForText("/help lists commands")) << chat.output();
  ASSERT_TRUE(chat.WaitForText("> ")) << chat.output();
  chat.Type("One\\\n");
  ASSERT_TRUE(chat.WaitForText(". ")) << chat.output();
  chat.Type("more\n");
  ASSERT_TRUE(chat.WaitForText("[cut at the most tokens; 4 tokens, ")) << chat.output();
  ASSERT_TRUE(chat.WaitForText(" tokens/s; first token after ")) << chat.output();
  chat.Type("\x04");  // Ctrl-D
  EXPECT_EQ(chat.WaitForExit(), 0) << chat.output();
}

// A server whose answers stay under way: its gate lets no more iterations pass.
struct HeldServer {
  TestServer server{{.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"}};
  const std::string address = ToString(server.server().address());
};

TEST(ChatBinary, CtrlCStopsTheAnswerAndNotTheProgram) {
  HeldServer held;
  TerminalProgram chat(Treadle("chat --max-new-tokens 100 --ignore-eos --target " + held.address),
                       kTerminal);
  ASSERT_TRUE(chat.WaitForText("> ")) << chat.output();
  for (int turn = 0; turn < 2; ++turn) {
    const size_t before = chat.output().size();
    chat.Type("\x03");  // with nothing to stop: another prompt
    ASSERT_TRUE(chat.WaitForText("> ", before)) << chat.output();
    const size_t asked = chat.output().size();
    chat.Type("one\n");
    // Some of the answer, behind the terminal's echo. An answer that was stopped may still take
    // some of the iterations.
    ASSERT_TRUE(chat.WaitFor([&](const std::string& output) {
      held.server.gate().Allow(2);
      return output.size() > asked + std::string("one\r\n").size();
    })) << chat.output();
    chat.Type("\x03");
    ASSERT_TRUE(chat.WaitForText("[stopped]", asked)) << chat.output();
    ASSERT_TRUE(chat.WaitForText("> ", chat.output().find("[stopped]", asked))) << chat.output();
    held.server.gate().Open();
  }
  chat.Type("/quit\n");
  EXPECT_EQ(chat.WaitForExit(), 0) << chat.output();
}

// Nobody types there: who presses Ctrl-C wants all of it to end.
TEST(ChatBinary, CtrlCEndsOneThatReadsAFile) {
  HeldServer held;
  held.server.gate().Allow(3);
  const std::string path = OwnFolder().path() + "/two-lines";
  std::ofstream(path) << "one\ntwo\n";
  ChildProcess chat(
      {"/bin/sh", "-c",
       Str("exec ", TREADLE_BINARY, " chat --max-new-tokens 100 --ignore-eos --target ",
           held.address, " < ", path)});
  ASSERT_TRUE(held.server.WaitLoad([](const auto& load) { return load.running() == 1; }));
  chat.Signal(SIGINT);
  EXPECT_EQ(chat.Wait(), 0) << chat.output();
  held.server.gate().Open();
}

TEST(ChatBinary, SigtermEndsItWithinAnAnswerToo) {
  HeldServer held;
  held.server.gate().Allow(3);
  TerminalProgram chat(Treadle("chat --max-new-tokens 100 --ignore-eos --target " + held.address),
                       kTerminal);
  ASSERT_TRUE(chat.WaitForText("> ")) << chat.output();
  const size_t asked = chat.output().size();
  chat.Type("one\n");
  ASSERT_TRUE(chat.WaitFor([&](const std::string& output) {
    return output.size() > asked + std::string("one\r\n").size();
  }));
  chat.Signal(SIGTERM);
  EXPECT_EQ(chat.WaitForExit(), 0) << chat.output();
  held.server.gate().Open();
}

TEST(Generate, TakesAPromptThatIsTyped) {
  const ServedBinary& server = TheServer();
  const std::string flags = Str(kShort, "--target ", server.address());
  TerminalProgram generate(Treadle("generate " + flags), kTerminal);
  ASSERT_TRUE(generate.WaitForText("Type the prompt; Ctrl-D")) << generate.output();
  generate.Type("Once upon\n\x04");
  EXPECT_EQ(generate.WaitForExit(), 0) << generate.output();
  EXPECT_THAT(generate.output(), HasSubstr("[length; "));
}

}  // namespace
}  // namespace treadle
