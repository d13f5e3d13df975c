// `treadle top` as an operator meets it: in a terminal, in a pipe, and where there is no server.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>

#include "base/status.h"
#include "server/grpc/inference.grpc.pb.h"
#include "tests/server/cli/served_binary.h"
#include "tests/server/cli/terminal/terminal_program.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;

constexpr char kEnter[] = "\x1b[?1049h\x1b[?25l";
constexpr char kLeave[] = "\x1b[?25h\x1b[?1049l";

// A server of a tiny model, one for all tests of this process.
ServedBinary& TheServer() {
  static ServedBinary server(Str(
      ServedBinary::kGrpcOnly, "--device cpu --threads 1 --max-batch-size 7 --model ", OwnModel()));
  return server;
}

// One request: 5 prompt tokens and 40 more.
void Ask(const ServedBinary& server) {
  v1::GenerateRequest request;
  for (const int id : {1, 2, 3, 4, 5}) request.mutable_token_ids()->add_ids(id);
  request.mutable_stopping()->set_max_new_tokens(40);
  request.mutable_stopping()->set_ignore_eos(true);
  Generate(server, request);
}

// A port of this machine where nobody listens.
constexpr char kNobody[] = "127.0.0.1:1";

TEST(TopBinary, WrongUseIsOneLineAndExitCodeTwo) {
  const std::pair<const char*, const char*> uses[] = {
      {"--interval 5", "--interval is '5', expected a time"},
      {"--interval 99ms", "--interval is '99ms', expected 100ms to 10m"},
      {"--interval 11m", "--interval is '11m', expected 100ms to 10m"},
      {"--tls-ca /no/such", "cannot read /no/such"},
      {"--api-key-file /no/such", "/no/such"},
      {"--nonsense", "--nonsense"},
  };
  for (const auto& [flags, message] : uses) {
    const std::string said = RunToEnd(Treadle(Str("top ", flags)), 2);
    EXPECT_THAT(said, HasSubstr(message));
    EXPECT_EQ(std::ranges::count(said, '\n'), 1) << said;
  }
}

TEST(TopBinary, OnceWithoutAServerEndsAsGenerateDoes) {
  RunToEnd(Treadle(Str("generate --prompt a --target ", kNobody)), 1);
  for (const char* json : {"", "--json"}) {
    const std::string said = RunToEnd(Treadle(Str("top --target ", kNobody, " --once ", json)), 1);
    EXPECT_THAT(said, HasSubstr("treadle top: 127.0.0.1:1: UNAVAILABLE: "));
    EXPECT_EQ(std::ranges::count(said, '\n'), 1) << said;
  }
}

TEST(TopBinary, WithoutAServerItTriesAgainUntilItIsStopped) {
  ChildProcess child(Treadle(Str("top --target ", kNobody)));
  EXPECT_THAT(child.WaitForLine("next try in 0.5 s"), HasSubstr("127.0.0.1:1: no answer"));
  EXPECT_NE(child.WaitForLine("next try in 1.0 s"), "");
  child.Signal(SIGINT);
  EXPECT_EQ(child.Wait(), 0) << child.output();
}

TEST(TopBinary, OnceIsPlainText) {
  const ServedBinary& server = TheServer();
  ASSERT_NE(server.address(), "");
  const std::string said =
      RunToEnd(Treadle("top --once --interval 100ms --target " + server.address()));
  EXPECT_THAT(said, testing::StartsWith("treadle top  " + server.address()));
  EXPECT_THAT(said, HasSubstr("\nrequests    running 0/7  waiting 0/"));
  EXPECT_THAT(said, HasSubstr("\niterations  "));
  EXPECT_THAT(said, Not(HasSubstr("\x1b")));
}

TerminalProgram Top(const std::string& flags, std::optional<winsize> size) {
  return TerminalProgram(Treadle("top " + flags), size);
}

// Drawings from one jump home to the next: its lines, without what clears.
std::vector<std::vector<std::string>> Frames(const std::string& output) {
  std::vector<std::vector<std::string>> frames;
  const std::string home = "\x1b[H";
  for (size_t at = output.find(home); at != std::string::npos;) {
    const size_t next = output.find(home, at + 1);
    if (next == std::string::npos) break;  // perhaps not all of it is here
    std::string text = output.substr(at + home.size(), next - at - home.size());
    // A move to the line's beginning moves nothing here.
    text = std::regex_replace(text, std::regex("\x1b\\[[0-9]+m"), "");  // colours
    for (const std::string code : {"\x1b[K", "\x1b[J", "\r"}) {
      for (size_t i; (i = text.find(code)) != std::string::npos;) text.erase(i, code.size());
    }
    std::vector<std::string>& lines = frames.emplace_back();
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find('\n', begin), text.size());
      lines.push_back(text.substr(begin, end - begin));
      begin = end + 1;
    }
    at = next;
  }
  return frames;
}

// The width of a line in UTF-8 whose characters have one column each.
ptrdiff_t Columns(const std::string& line) {
  return std::ranges::count_if(line, [](unsigned char c) { return (c & 0xc0) != 0x80; });
}

bool Fits(const std::vector<std::string>& frame, winsize size) {
  return frame.size() <= size.ws_row &&
         std::all_of(frame.begin(), frame.end(),
                     [&](const std::string& line) { return Columns(line) <= size.ws_col; });
}

constexpr winsize kWide = {.ws_row = 24, .ws_col = 70, .ws_xpixel = 0, .ws_ypixel = 0};
constexpr winsize kSmall = {.ws_row = 9, .ws_col = 33, .ws_xpixel = 0, .ws_ypixel = 0};

TEST(TopBinary, ATerminalIsRedrawnInItsSizeAndGivenBack) {
  const ServedBinary& server = TheServer();
  ASSERT_NE(server.address(), "");
  TerminalProgram top = Top("--interval 100ms --target " + server.address(), kWide);
  ASSERT_TRUE(top.WaitForText("prompt 0.0/s")) << top.output();
  EXPECT_THAT(top.output(), testing::StartsWith(kEnter));
  EXPECT_TRUE(top.ReadsKeysAsTheyAreTyped());
  Ask(server);
  ASSERT_TRUE(top.WaitFor([](const std::string& output) {
    const auto frames = Frames(output);
    return std::any_of(frames.begin(), frames.end(), [](const auto& frame) {
      return frame.size() > 8 && frame[7].starts_with("ended       finished ") &&
             !frame[7].starts_with("ended       finished 0.0/s");
    });
  })) << top.output();
  for (const auto& frame : Frames(top.output())) EXPECT_TRUE(Fits(frame, kWide));

  top.Resize(kSmall);
  const size_t before = Frames(top.output()).size();
  // One may be on its way; what begins after it knows the size.
  ASSERT_TRUE(
      top.WaitFor([&](const std::string& output) { return Frames(output).size() > before + 3; }));
  const auto frames = Frames(top.output());
  for (size_t i = before + 2; i < frames.size(); ++i) {
    EXPECT_TRUE(Fits(frames[i], kSmall)) << testing::PrintToString(frames[i]);
    EXPECT_EQ(frames[i].size(), kSmall.ws_row);
  }
  EXPECT_THAT(frames.back().back(), testing::StartsWith("q quit   p pause"));
  top.Type("p");
  ASSERT_TRUE(top.WaitForText("treadle top (paused)")) << top.output();
  const size_t paused = top.output().size();
  top.Type("p");
  ASSERT_TRUE(top.WaitForText("treadle top  ", paused)) << top.output();
  top.Type("xyz");  // not ours
  top.Type("q");
  EXPECT_EQ(top.WaitForExit(), 0);
  EXPECT_THAT(top.output(), EndsWith(kLeave));
  EXPECT_FALSE(top.ReadsKeysAsTheyAreTyped());
}

TEST(TopBinary, EverySignalGivesTheTerminalBack) {
  for (const int signal : {0, SIGINT, SIGTERM, SIGHUP}) {
    TerminalProgram top = Top(Str("--interval 100ms --target ", kNobody), kWide);
    ASSERT_TRUE(top.WaitForText("no answer; next try in")) << top.output();
    if (signal == 0) {
      top.Type("\x03");  // Ctrl-C
    } else {
      top.Signal(signal);
    }
    EXPECT_EQ(top.WaitForExit(), 0) << signal;
    EXPECT_THAT(top.output(), testing::StartsWith(kEnter));
    EXPECT_THAT(top.output(), EndsWith(kLeave));
    EXPECT_FALSE(top.ReadsKeysAsTheyAreTyped());
  }
}

TEST(TopBinary, AStopGivesTheTerminalBackForAsLong) {
  TerminalProgram top = Top(Str("--target ", kNobody), kWide);
  ASSERT_TRUE(top.WaitForText("no answer; next try in")) << top.output();
  top.Type("\x1a");  // Ctrl-Z
  const std::optional<int> status = top.WaitForChange();
  ASSERT_TRUE(status && WIFSTOPPED(*status));
  EXPECT_THAT(top.output(), EndsWith(kLeave));
  EXPECT_FALSE(top.ReadsKeysAsTheyAreTyped());
  const size_t before = top.output().size();
  top.Signal(SIGCONT);
  ASSERT_TRUE(top.WaitFor([&](const std::string& output) {
    return output.find("no answer", before) != std::string::npos;
  }));
  EXPECT_EQ(top.output().compare(before, std::string(kEnter).size(), kEnter), 0);
  EXPECT_TRUE(top.ReadsKeysAsTheyAreTyped());
  top.Type("q");
  EXPECT_EQ(top.WaitForExit(), 0);
}

std::vector<std::string> WholeLines(const std::string& output) {
  std::vector<std::string> lines;
  for (size_t begin = 0, end; (end = output.find('\n', begin)) != std::string::npos;) {
    lines.push_back(output.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

TEST(TopBinary, APipeGetsALinePerIntervalWithoutCodes) {
  const ServedBinary& server = TheServer();
  ASSERT_NE(server.address(), "");
  TerminalProgram top = Top("--interval 100ms --target " + server.address(), std::nullopt);
  ASSERT_TRUE(
      top.WaitFor([](const std::string& output) { return WholeLines(output).size() >= 3; }));
  for (const std::string& line : WholeLines(top.output())) {
    EXPECT_THAT(line, HasSubstr("Z running 0/7 waiting 0/1024 pages 0/"));
  }
  top.Signal(SIGTERM);
  EXPECT_EQ(top.WaitForExit(), 0);
  EXPECT_THAT(top.output(), Not(HasSubstr("\x1b")));
}

TEST(TopBinary, JsonCountsEveryToken) {
  const ServedBinary& server = TheServer();
  ASSERT_NE(server.address(), "");
  TerminalProgram top = Top("--json --interval 200ms --target " + server.address(), std::nullopt);
  ASSERT_TRUE(top.WaitForText("\n"));
  Ask(server);
  const auto decoded = [](const std::string& output) {
    double sum = 0;
    for (const std::string& line : WholeLines(output)) {
      const auto json = nlohmann::json::parse(line);
      sum += json["decode_tokens_per_second"].get<double>() * json["interval"].get<double>();
      EXPECT_GT(json["uptime"], 0);
      EXPECT_EQ(json["running_limit"], 7);
    }
    return sum;
  };
  EXPECT_TRUE(top.WaitFor([&](const std::string& output) { return decoded(output) > 38.5; }));
  EXPECT_NEAR(decoded(top.output()), 39, 1e-6);  // the first of 40 comes with the prompt
  top.Signal(SIGINT);
  EXPECT_EQ(top.WaitForExit(), 0);
}

}  // namespace
}  // namespace treadle
