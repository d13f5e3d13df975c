// The treadle binary's log: JSON from the first line to the last, workers included; files that are
// rotated or full; and quiet where nobody asked for a log.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <thread>

#include "base/status.h"
#include "server/grpc/inference.grpc.pb.h"
#include "tests/server/cli/served_binary.h"
#include "tests/server/test_server.h"
#include "tests/server/written_part.h"
#include "tests/support/in_time.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

const char kPrompt[] = "Once upon a SECRET time";

// Flags of a server whose requests and answers are small.
std::string Flags(const std::string& more) {
  return Str(ServedBinary::kGrpcOnly, "--threads 1 --model ", OwnModel(), " ", more);
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
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
  ServedBinary server(Flags("--log-format json --pipeline-parallel 2"));
  ASSERT_TRUE(Ask(server.address()).ok());
  EXPECT_EQ(Ask(server.address(), 7).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(server.Stop(), 0);
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
  const std::string log = OwnFolder() / "server.log", old = OwnFolder() / "server.log.1";
  ChildProcess server(ServedBinary::Command(Flags("--log-file " + log)));
  std::string address;
  ASSERT_TRUE(ComesTrue([&] {  // two lines, in any order
    const std::string text = ReadWhole(log);
    address = WordAfter(text, "listening on ");
    return text.find("ready:") != std::string::npos && !address.empty();
  }));
  fs::rename(log, old);
  server.Signal(SIGHUP);
  ASSERT_TRUE(Ask(address).ok());
  EXPECT_TRUE(ComesTrue([&] {
    return ReadWhole(log).find("request finished request_id=from-the-test") != std::string::npos;
  })) << ReadWhole(log);
  EXPECT_EQ(server.Stop(), 0);
  EXPECT_EQ(Lines(ReadWhole(log)).back(), "drained");
  EXPECT_THAT(ReadWhole(old), HasSubstr("threads = 1\n"));
  EXPECT_EQ(server.output(), "");
}

// SIGHUP comes before SIGTERM wherever both wait, so a process that it ends does not exit with 0.
TEST(LogBinary, AHangUpIsNoSignalWithoutAFileEither) {
  ServedBinary server(Flags("--pipeline-parallel 2"));
  const std::vector<int> workers = ChildrenOf(server.pid());
  ASSERT_EQ(workers.size(), 2u);
  for (const int worker : workers) kill(worker, SIGHUP);
  server.Signal(SIGHUP);
  EXPECT_TRUE(Ask(server.address()).ok());
  EXPECT_EQ(server.Stop(), 0) << server.output();
  EXPECT_THAT(server.output(), HasSubstr("\ndrained\n"));
  EXPECT_THAT(server.output(), Not(HasSubstr("started again")));

  WorkerBinary worker("");
  ASSERT_NE(worker.address(), "") << worker.output();
  worker.Signal(SIGHUP);
  EXPECT_EQ(worker.Stop(), 0) << worker.output();
}

TEST(LogBinary, AFullDiskCostsLinesAndNoRequest) {
  ChildProcess server(ServedBinary::Command(Flags("--log-file /dev/full")));
  const std::string line = server.WaitForLine("log file '/dev/full'");
  EXPECT_THAT(line, HasSubstr("No space left on device"));
  EXPECT_EQ(server.Stop(), 0) << server.output();
  EXPECT_EQ(Lines(server.output()).size(), 1u) << server.output();
}

// Has ended, whether or not somebody reads what it said.
bool Ended(int pid) {
  siginfo_t about{};
  return waitid(P_PID, static_cast<id_t>(pid), &about, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         about.si_pid == pid;
}

TEST(LogBinary, AStderrThatNobodyReadsCostsLinesAndNoRequest) {
  ServedBinary server(Flags("--log-format json"));
  const std::string& address = server.address();
  // Each is a line of more than 300 bytes; a pipe takes 64 KiB.
  for (int i = 0; i < 300; ++i) {
    ASSERT_EQ(Ask(address, 7).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  EXPECT_TRUE(Ask(address).ok());
  server.Signal(SIGTERM);
  EXPECT_TRUE(ComesTrue([&] { return Ended(server.pid()); }));
  EXPECT_EQ(server.Wait(), 0);
  EXPECT_LT(server.output().size(), 80'000u);
}

// As a pipe that nobody reads, of one page.
TEST(LogBinary, AHungLedgerFileHoldsUpNeitherMetricsNorTheEnd) {
  const std::string ledger = OwnFolder() / "hung";
  ASSERT_EQ(mkfifo(ledger.c_str(), 0600), 0);
  const int disk = open(ledger.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(fcntl(disk, F_SETPIPE_SZ, 4096), 0);
  ServedBinary server(Str("--http-listen none --metrics-listen 127.0.0.1:0 --threads 1 --model ",
                          OwnModel(), " --ledger-file ", ledger));
  const std::string port = WordAfter(server.listens(), "metrics at http://127.0.0.1:");
  ASSERT_NE(port, "") << server.listens();
  const int metrics = std::atoi(port.c_str());
  for (int i = 1; i <= 5; ++i) {
    ASSERT_TRUE(Ask(server.address(), 1, 32).ok());
    const std::regex tokens(Str("\ntreadle:generation_tokens_total\\{[^}]*\\} ", 32 * i, "\n"));
    EXPECT_TRUE(ComesTrue([&] { return std::regex_search(HttpGet(metrics, "/metrics"), tokens); }));
  }
  server.Signal(SIGTERM);
  EXPECT_TRUE(ComesTrue([&] { return Ended(server.pid()); }));
  close(disk);  // one that did wait goes on now
  EXPECT_EQ(server.Wait(), 0);
  EXPECT_THAT(server.output(), HasSubstr(Str("ledger file '", ledger, "': ")));
  EXPECT_THAT(server.output(), HasSubstr(" records were not written"));
}

// The unit that a metric's name says.
std::string UnitOf(const std::string& name) {
  for (const auto& [word, unit] :
       {std::pair("_seconds", "seconds"), std::pair("_bytes", "bytes"),
        std::pair("_perc", "0 to 1"), std::pair("_ratio", "0 to 1"),
        std::pair("_requests", "requests"), std::pair(":request", "requests"),
        std::pair("tokens", "tokens"), std::pair("connection", "connections"),
        std::pair("_lines", "lines"), std::pair("_records", "records"),
        std::pair("prefix_cache", "tokens")}) {
    if (name.find(word) != name.npos &&
        (name.find("tokens") == name.npos || unit == std::string("tokens"))) {
      return unit;
    }
  }
  return "times";
}

// docs/metrics.md has every metric that a server can have, as its scrapes tell it.
TEST(LogBinary, ThePageOfMetricsHasThemAll) {
  ServedBinary server(Str("--http-listen none --metrics-listen 127.0.0.1:0 --threads 1 --model ",
                          OwnModel(), " --ledger-file ", OwnFolder() / "ledger"));
  const std::string port = WordAfter(server.listens(), "metrics at http://127.0.0.1:");
  const std::string scrape = HttpGet(std::atoi(port.c_str()), "/metrics");
  std::map<std::string, std::string> rows;
  const std::regex head(
      "# HELP (treadle:\\S+) ([^\n]*)\n# TYPE \\S+ (\\w+)\n[^{\n]*\\{([^}\n]*)\\}");
  for (std::sregex_iterator next(scrape.begin(), scrape.end(), head), end; next != end; ++next) {
    const std::string name = (*next)[1], labels = (*next)[4];
    std::string shown;
    const std::regex label("(\\w+)=");
    for (std::sregex_iterator word(labels.begin(), labels.end(), label); word != end; ++word) {
      if ((*word)[1] == "le" || (*word)[1] == "model_name") continue;  // the page says so of all
      shown += Str(shown.empty() ? "`" : ", `", (*word)[1].str(), "`");
    }
    rows[name] = Str("| `", name, "` | ", (*next)[3].str(), " | ", UnitOf(name), " | ", shown,
                     " | ", (*next)[2].str(), " |\n");
  }
  EXPECT_GT(rows.size(), 25u) << scrape;
  std::string table;
  for (const auto& [name, row] : rows) table += row;
  ExpectPart(TREADLE_SOURCE "/docs/metrics.md", "|---|---|---|---|---|\n", "\n`make", table);
}

TEST(LogBinary, WhatEndsAServerIsInItsLogAndOnStderr) {
  const std::string log = OwnFolder() / "failed.log";
  const std::string said =
      RunToEnd(ServedBinary::Command(Str(ServedBinary::kGrpcOnly,
                                         "--log-format json --model /no/such --log-file ", log)),
               2);
  EXPECT_THAT(said, HasSubstr("treadle serve: /no/such"));
  const json failed = EventsOf(ReadWhole(log)).back();
  EXPECT_EQ(failed["event"], "failed");
  EXPECT_EQ(failed["severity"], "error");
  EXPECT_EQ(std::string(failed["message"]) + "\n", said);
}

TEST(LogBinary, WrongFlagsAreNamed) {
  const std::string absent = OwnFolder() / "no/log";
  const std::pair<std::string, std::string> cases[] = {
      {"--log-format xml", "--log-format: "},
      {"--log-level debug", "--log-level: "},
      {"--log-file " + absent, "log file '" + absent + "': No such file or directory"},
  };
  for (const auto& [flags, message] : cases) {
    for (const auto& command :
         {ServedBinary::Command(Flags(flags)), Treadle("worker --listen 127.0.0.1:0 " + flags)}) {
      EXPECT_THAT(RunToEnd(command, 2), HasSubstr(message));
    }
  }
  EXPECT_THAT(RunToEnd(ServedBinary::Command(Flags("--log-requests yes")), 2),
              HasSubstr("--log-requests: is 'yes', expected on or off"));
}

TEST(LogBinary, AWorkersLogHasTheSameFlags) {
  WorkerBinary worker("--log-format json");
  ASSERT_NE(worker.address(), "");
  EXPECT_EQ(worker.Stop(), 0);
  const std::vector<json> events = EventsOf(worker.output());
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0]["event"], "listening");
  EXPECT_EQ(events[1]["signal"], SIGTERM);
}

TEST(LogBinary, NobodyWhoGeneratesReadsWorkersLogs) {
  EXPECT_THAT(RunToEnd(Treadle("generate --max-new-tokens 4 --pipeline-parallel 2 --threads 2",
                               {"--model", OwnModel(), "--prompt", "Once upon a time"})),
              Not(HasSubstr("worker")));
}

}  // namespace
}  // namespace treadle
