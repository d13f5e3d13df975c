// The treadle binary's log: JSON from the first line to the last, workers included; files that are
// rotated or full; and quiet where nobody asked for a log.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <thread>

#include "base/status.h"
#include "server/grpc/inference.grpc.pb.h"
#include "tests/server/cli/child_process.h"
#include "tests/server/test_server.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

const char kBinary[] = TREADLE_BINARY;
const char kPrompt[] = "Once upon a SECRET time";

// For this process alone.
const fs::path& Directory() {
  static const fs::path path = [] {
    fs::path own = fs::path(testing::TempDir()) / Str("log-binary-", getpid());
    fs::create_directories(own);
    return own;
  }();
  return path;
}
class RemoveDirectory : public testing::Environment {
  void TearDown() override { fs::remove_all(Directory()); }
};
const auto* const kRemoveDirectory = testing::AddGlobalTestEnvironment(new RemoveDirectory);

const std::string& Model() {
  static const std::string path = [] {
    auto written = WriteTinyLlamaGguf(Directory().string(), {});
    TREADLE_CHECK(written.ok());
    return *written;
  }();
  return path;
}

std::vector<std::string> Serve(const std::vector<std::string>& more) {
  std::vector<std::string> all = {
      kBinary,         "serve", "--model",          Model(), "--listen",  "127.0.0.1:0",
      "--http-listen", "none",  "--metrics-listen", "none",  "--threads", "1",
      "--pin-threads", "off"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}
std::string TextOf(const fs::path& path) {
  std::ifstream file(path);
  return std::string((std::istreambuf_iterator<char>(file)), {});
}

std::vector<json> EventsOf(const std::string& text) {
  std::vector<json> events;
  for (const std::string& line : Lines(text)) {
    events.push_back(json::parse(line, nullptr, false));
    EXPECT_TRUE(events.back().is_object()) << line;
  }
  return events;
}
// The first of that name that has the field, or null.
json Find(const std::vector<json>& events, const std::string& name, const std::string& key) {
  for (const json& event : events) {
    if (event.value("event", "") == name && event.contains(key)) return event;
  }
  return nullptr;
}

// Waits until `done`; false if it does not come.
template <typename Done>
bool WaitUntil(const Done& done) {
  for (int i = 0; i < 1200 && !done(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return done();
}

// Where a server of this machine says that it listens.
std::string AddressIn(const std::string& text) {
  const std::string before = "listening on ";
  const size_t at = text.find(before + "127.0.0.1:");
  if (at == std::string::npos) return "";
  const size_t begin = at + before.size();
  return text.substr(begin, text.find(' ', begin) - begin);
}

grpc::Status Ask(const std::string& address, float top_p = 1, int32_t new_tokens = 4) {
  const auto stub =
      v1::Inference::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
  context.AddMetadata("x-request-id", "from-the-test");
  v1::GenerateRequest request;
  request.set_text(kPrompt);
  request.mutable_sampling()->set_top_p(top_p);
  request.mutable_stopping()->set_max_new_tokens(new_tokens);
  request.mutable_stopping()->set_ignore_eos(true);
  v1::GenerateResponse response;
  return stub->Generate(&context, request, &response);
}

TEST(LogBinary, EveryLineIsJsonWorkersIncluded) {
  ChildProcess server(Serve({"--log-format", "json", "--pipeline-parallel", "2"}));
  ASSERT_NE(server.WaitForLine("\"message\":\"listening on 127.0.0.1:"), "") << server.output();
  const std::string address = AddressIn(server.output());
  ASSERT_TRUE(Ask(address).ok());
  EXPECT_EQ(Ask(address, 7).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(), 0);
  const std::vector<json> events = EventsOf(server.output());
  EXPECT_EQ(Find(events, "configuration", "pipeline-parallel")["pipeline-parallel"], "2");
  std::vector<int> workers;
  std::string last;  // of the server itself; its workers may end a little later
  for (const json& event : events) {
    if (!event.contains("worker")) last = event["event"];
    if (event.value("event", "") == "listening" && event.contains("worker")) {
      workers.push_back(event["worker"]);
      EXPECT_THAT(std::string(event["message"]),
                  HasSubstr(Str("worker ", workers.back(), ": listening on unix:")));
    }
  }
  EXPECT_THAT(workers, testing::UnorderedElementsAre(0, 1));
  const json finished = Find(events, "request_finished", "request");
  ASSERT_TRUE(finished.is_object());
  EXPECT_EQ(finished["request_id"], "from-the-test");
  EXPECT_EQ(finished["generated_tokens"], 4);
  EXPECT_EQ(Find(events, "request_refused", "error")["status"], "INVALID_ARGUMENT");
  EXPECT_TRUE(Find(events, "draining", "signal").is_object());
  EXPECT_EQ(last, "drained");
  EXPECT_THAT(server.output(), Not(HasSubstr("SECRET")));
}

TEST(LogBinary, AFileIsRotatedByItsNameAndAHangUpIsNoSignal) {
  const fs::path log = Directory() / "server.log", old = Directory() / "server.log.1";
  ChildProcess server(Serve({"--log-file", log.string()}));
  std::string address;
  ASSERT_TRUE(WaitUntil([&] {  // two lines, in any order
    const std::string text = TextOf(log);
    address = AddressIn(text);
    return text.find("ready:") != std::string::npos && !address.empty();
  }));
  fs::rename(log, old);
  server.Signal(SIGHUP);
  ASSERT_TRUE(Ask(address).ok());
  EXPECT_TRUE(WaitUntil([&] {
    return TextOf(log).find("request finished request_id=from-the-test") != std::string::npos;
  })) << TextOf(log);
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(), 0);
  EXPECT_EQ(Lines(TextOf(log)).back(), "drained");
  EXPECT_THAT(TextOf(old), HasSubstr("threads = 1\n"));
  EXPECT_EQ(server.output(), "");
}

// SIGHUP comes before SIGTERM wherever both wait, so a process that it ends does not exit with 0.
TEST(LogBinary, AHangUpIsNoSignalWithoutAFileEither) {
  ChildProcess server(Serve({"--pipeline-parallel", "2"}));
  const std::string address = AddressIn(server.WaitForLine("listening on 127.0.0.1:"));
  ASSERT_NE(address, "") << server.output();
  const std::vector<int> workers = ChildrenOf(server.pid());
  ASSERT_EQ(workers.size(), 2u);
  for (const int worker : workers) kill(worker, SIGHUP);
  server.Signal(SIGHUP);
  EXPECT_TRUE(Ask(address).ok());
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(), 0) << server.output();
  EXPECT_THAT(server.output(), HasSubstr("\ndrained\n"));
  EXPECT_THAT(server.output(), Not(HasSubstr("started again")));

  ChildProcess worker({kBinary, "worker", "--listen", "127.0.0.1:0"});
  ASSERT_NE(worker.WaitForLine("listening on "), "") << worker.output();
  worker.Signal(SIGHUP);
  worker.Signal(SIGTERM);
  EXPECT_EQ(worker.Wait(), 0) << worker.output();
}

TEST(LogBinary, AFullDiskCostsLinesAndNoRequest) {
  ChildProcess server(Serve({"--log-file", "/dev/full"}));
  const std::string line = server.WaitForLine("log file '/dev/full'");
  EXPECT_THAT(line, HasSubstr("No space left on device"));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(), 0) << server.output();
  EXPECT_EQ(Lines(server.output()).size(), 1u) << server.output();
}

// Has ended, whether or not somebody reads what it said.
bool Ended(int pid) {
  siginfo_t about{};
  return waitid(P_PID, static_cast<id_t>(pid), &about, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         about.si_pid == pid;
}

TEST(LogBinary, AStderrThatNobodyReadsCostsLinesAndNoRequest) {
  ChildProcess server(Serve({"--log-format", "json"}));
  const std::string address = AddressIn(server.WaitForLine("listening on "));
  ASSERT_NE(address, "");
  // Each is a line of more than 300 bytes; a pipe takes 64 KiB.
  for (int i = 0; i < 300; ++i) {
    ASSERT_EQ(Ask(address, 7).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  EXPECT_TRUE(Ask(address).ok());
  server.Signal(SIGTERM);
  EXPECT_TRUE(WaitUntil([&] { return Ended(server.pid()); }));
  EXPECT_EQ(server.Wait(), 0);
  EXPECT_LT(server.output().size(), 80'000u);
}

// As a pipe that nobody reads, of one page.
TEST(LogBinary, AHungLedgerFileHoldsUpNeitherMetricsNorTheEnd) {
  const std::string ledger = (Directory() / "hung").string();
  ASSERT_EQ(mkfifo(ledger.c_str(), 0600), 0);
  const int disk = open(ledger.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(fcntl(disk, F_SETPIPE_SZ, 4096), 0);
  std::vector<std::string> command = Serve({"--ledger-file", ledger});
  *std::next(std::ranges::find(command, "--metrics-listen")) = "127.0.0.1:0";
  ChildProcess server(command);
  const std::string line = server.WaitForLine("listening on ");
  const std::string address = AddressIn(line), before = "metrics at http://127.0.0.1:";
  ASSERT_THAT(line, HasSubstr(before));
  const int metrics = std::atoi(line.c_str() + line.find(before) + before.size());
  for (int i = 1; i <= 5; ++i) {
    ASSERT_TRUE(Ask(address, 1, 32).ok());
    const std::regex tokens(Str("\ntreadle:generation_tokens_total\\{[^}]*\\} ", 32 * i, "\n"));
    EXPECT_TRUE(WaitUntil([&] { return std::regex_search(HttpGet(metrics, "/metrics"), tokens); }));
  }
  server.Signal(SIGTERM);
  EXPECT_TRUE(WaitUntil([&] { return Ended(server.pid()); }));
  close(disk);  // one that did wait goes on now
  EXPECT_EQ(server.Wait(), 0);
  EXPECT_THAT(server.output(), HasSubstr(Str("ledger file '", ledger, "': ")));
  EXPECT_THAT(server.output(), HasSubstr(" records were not written"));
}

TEST(LogBinary, WhatEndsAServerIsInItsLogAndOnStderr) {
  const fs::path log = Directory() / "failed.log";
  ChildProcess server({kBinary, "serve", "--model", "/no/such", "--log-file", log.string(),
                       "--log-format", "json", "--listen", "127.0.0.1:0", "--http-listen", "none",
                       "--metrics-listen", "none"});
  EXPECT_EQ(server.Wait(), 2);
  EXPECT_THAT(server.output(), HasSubstr("treadle serve: /no/such"));
  const json failed = EventsOf(TextOf(log)).back();
  EXPECT_EQ(failed["event"], "failed");
  EXPECT_EQ(failed["severity"], "error");
  EXPECT_EQ(std::string(failed["message"]) + "\n", server.output());
}

TEST(LogBinary, WrongFlagsAreNamed) {
  const std::string absent = (Directory() / "no" / "log").string();
  struct Case {
    std::vector<std::string> flags;
    std::string message;
  };
  const Case cases[] = {
      {{"--log-format", "xml"}, "--log-format: "},
      {{"--log-level", "debug"}, "--log-level: "},
      {{"--log-file", absent}, "log file '" + absent + "': No such file or directory"},
  };
  for (const Case& bad : cases) {
    for (std::vector<std::string> command :
         {Serve({}), std::vector<std::string>{kBinary, "worker", "--listen", "127.0.0.1:0"}}) {
      command.insert(command.end(), bad.flags.begin(), bad.flags.end());
      ChildProcess child(command);
      EXPECT_EQ(child.Wait(), 2) << child.output();
      EXPECT_THAT(child.output(), HasSubstr(bad.message));
    }
  }
  ChildProcess requests(Serve({"--log-requests", "yes"}));
  EXPECT_EQ(requests.Wait(), 2);
  EXPECT_THAT(requests.output(), HasSubstr("--log-requests: is 'yes', expected on or off"));
}

TEST(LogBinary, AWorkersLogHasTheSameFlags) {
  ChildProcess worker({kBinary, "worker", "--listen", "127.0.0.1:0", "--log-format", "json"});
  ASSERT_NE(worker.WaitForLine("listening on "), "");
  worker.Signal(SIGTERM);
  EXPECT_EQ(worker.Wait(), 0);
  const std::vector<json> events = EventsOf(worker.output());
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0]["event"], "listening");
  EXPECT_EQ(events[1]["signal"], SIGTERM);
}

TEST(LogBinary, NobodyWhoGeneratesReadsWorkersLogs) {
  ChildProcess generate({kBinary, "generate", "--model", Model(), "--prompt", "Once upon a time",
                         "--max-new-tokens", "4", "--pipeline-parallel", "2", "--threads", "2"});
  EXPECT_EQ(generate.Wait(), 0) << generate.output();
  for (const std::string& line : Lines(generate.output())) {
    EXPECT_THAT(line, Not(HasSubstr("worker")));
  }
}

}  // namespace
}  // namespace treadle
