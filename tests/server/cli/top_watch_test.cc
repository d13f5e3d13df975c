// The watch of `treadle top` over a real channel: what it reports of a server that works, drains,
// goes, comes back, hangs, or does not want it.
#include "server/cli/top/top_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "base/status.h"
#include "tests/server/access/test_certificates.h"
#include "tests/server/test_server.h"
#include "tests/support/assert_ok.h"
#include "tests/support/in_time.h"

namespace treadle {
namespace {

constexpr std::chrono::seconds kPatience{60};

std::unique_ptr<TopWatch> Start(const std::string& target, const std::string& authorization = "") {
  return std::make_unique<TopWatch>(TopWatch::Options{
      .target = target,
      .access = {.credentials = grpc::InsecureChannelCredentials(), .authorization = authorization},
      .interval = std::chrono::milliseconds(50),
      .first_pause = std::chrono::milliseconds(10),
      .longest_pause = std::chrono::milliseconds(80),
      .call_deadline = std::chrono::seconds(30)});
}

// Takes reports until one is as `enough` wants it; nothing if none comes.
template <typename Enough>
std::optional<TopReport> WaitReport(TopWatch& watch, const Enough& enough) {
  const auto deadline = Clock::now() + kPatience;
  while (Clock::now() < deadline) {
    pollfd news = {watch.news(), POLLIN, 0};
    poll(&news, 1, 1000);
    std::optional<TopReport> report = watch.Take();
    if (report && enough(*report)) return report;
  }
  return std::nullopt;
}

bool HasNumbers(const TopReport& report) { return report.numbers.has_value(); }
bool HasTrouble(const TopReport& report) { return !report.trouble.ok(); }

TEST(TopWatch, CountsEveryTokenOfARunningServer) {
  TestServer server;
  const auto watch = Start(ToString(server.server().address()));
  const auto first = WaitReport(*watch, HasNumbers);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->numbers->seconds, 0);
  EXPECT_EQ(first->model.name, "prefix");
  EXPECT_EQ(first->model.max_context, 1024);
  EXPECT_EQ(first->numbers->running_limit, 4);
  EXPECT_EQ(first->numbers->waiting_limit, 64);
  EXPECT_EQ(first->numbers->pages_total, 256);
  EXPECT_GT(first->numbers->uptime, 0);
  EXPECT_FALSE(first->numbers->draining);

  server.gate().Close();
  std::vector<std::thread> clients;
  for (int i = 0; i < 6; ++i) {
    clients.emplace_back([&server, i] {
      v1::GenerateResponse response;
      EXPECT_TRUE(Generate(server, MakeRequest("", i, 10, 20), response).ok());
    });
  }
  EXPECT_TRUE(server.WaitLoad(
      [](const v1::GetLoadResponse& load) { return load.running() + load.waiting() == 6; }));
  // Enough for all of them to be admitted that fit, and for none to end.
  server.gate().Allow(8);
  double prompt = 0, decode = 0, finished = 0;
  uint64_t lost = 0;
  const auto count = [&](const TopReport& report) {
    if (!report.numbers) return;
    prompt += report.numbers->prompt_rate * report.numbers->seconds;
    decode += report.numbers->decode_rate * report.numbers->seconds;
    finished += report.numbers->finished_rate * report.numbers->seconds;
    lost += report.numbers->lost;
  };
  const auto held = WaitReport(*watch, [&](const TopReport& report) {
    count(report);
    return report.numbers && report.numbers->running == 4 && report.numbers->waiting == 2 &&
           !report.numbers->longest.empty() && report.numbers->longest_waiting.size() == 2;
  });
  ASSERT_TRUE(held);
  EXPECT_EQ(held->numbers->longest_waiting[0].prompt_tokens, 10);
  EXPECT_GT(held->numbers->pages_used, 0);
  server.gate().Open();
  for (std::thread& client : clients) client.join();
  // The last record may still be under way when its answer is here.
  ASSERT_TRUE(WaitReport(*watch, [&](const TopReport& report) {
    count(report);
    return finished > 5.5 && report.numbers && report.numbers->longest.empty();
  }));
  EXPECT_EQ(lost, 0u);
  EXPECT_NEAR(prompt, 6 * 10, 1e-6);
  EXPECT_NEAR(decode, 6 * 19, 1e-6);  // the first token comes with the prompt
  EXPECT_NEAR(finished, 6, 1e-6);
}

TEST(TopWatch, SaysThatTheServerDrainsAndGoesAndFindsTheNextOne) {
  auto server = std::make_unique<TestServer>();
  const std::string address = ToString(server->server().address());
  const auto watch = Start(address);
  ASSERT_TRUE(WaitReport(*watch, HasNumbers));

  server->gate().Close();
  std::thread client([&] {
    v1::GenerateResponse response;
    EXPECT_TRUE(Generate(*server, MakeRequest("", 1, 4, 4), response).ok());
  });
  ASSERT_TRUE(
      server->WaitLoad([](const v1::GetLoadResponse& load) { return load.running() == 1; }));
  std::thread drain([&] { EXPECT_TRUE(server->server().DrainAndStop(kPatience)); });
  EXPECT_TRUE(WaitReport(
      *watch, [](const TopReport& report) { return report.numbers && report.numbers->draining; }));
  server->gate().Open();
  client.join();
  drain.join();

  // The pause doubles up to its bound, and stays there.
  const auto gone = WaitReport(*watch, HasTrouble);
  ASSERT_TRUE(gone);
  EXPECT_EQ(gone->trouble.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(gone->model.name, "prefix");
  ASSERT_TRUE(gone->retry_in);
  EXPECT_LE(gone->retry_in->count(), 80);
  for (const int pause : {80, 80}) {
    EXPECT_TRUE(WaitReport(*watch, [&](const TopReport& report) {
      return report.retry_in && report.retry_in->count() == pause;
    }));
  }
  server.reset();
  TestServerOptions options;
  options.adjust = [&](ServiceOptions& service) { service.listen = address; };
  TestServer next(options);
  EXPECT_TRUE(WaitReport(*watch, HasNumbers));
}

TEST(TopWatch, GivesUpWhereItIsNotWanted) {
  const std::string path = TestPath("keys");
  WriteText(path, "alice-0123456789abcdef alice\n");
  ASSERT_OK_AND_ASSIGN(auto keys, ApiKeys::Open(path, [](const LogEvent&) {}));
  TestServerOptions options;
  options.adjust = [&](ServiceOptions& service) { service.keys = keys.get(); };
  TestServer server(options);
  const std::string address = ToString(server.server().address());
  const auto stranger = Start(address, "Bearer nobody-0123456789abcdef");
  const auto refused = WaitReport(*stranger, HasTrouble);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->trouble.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_FALSE(refused->retry_in);
  EXPECT_TRUE(WaitReport(*Start(address, "Bearer alice-0123456789abcdef"), HasNumbers));
}

// Something that accepts connections and says nothing.
class SilentListener {
 public:
  SilentListener() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    TREADLE_CHECK(bind(fd_, reinterpret_cast<sockaddr*>(&address), size) == 0);
    TREADLE_CHECK(listen(fd_, 8) == 0);
    TREADLE_CHECK(getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
    address_ = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  }
  ~SilentListener() { close(fd_); }
  const std::string& address() const { return address_; }

 private:
  const int fd_;
  std::string address_;
};

TEST(TopWatch, ASilentServerIsGivenUpAtTheDeadline) {
  const SilentListener silent;
  const auto watch = std::make_unique<TopWatch>(TopWatch::Options{
      .target = silent.address(),
      .access = {.credentials = grpc::InsecureChannelCredentials(), .authorization = {}},
      .retry = false,
      .call_deadline = std::chrono::milliseconds(100)});
  const auto trouble = WaitReport(*watch, HasTrouble);
  ASSERT_TRUE(trouble);
  EXPECT_EQ(trouble->trouble.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(trouble->retry_in);
  EXPECT_FALSE(trouble->numbers);
}

TEST(TopWatch, EndsWhileACallIsUnderWay) {
  const SilentListener silent;
  RunInTime([&] { Start(silent.address()); });
}

}  // namespace
}  // namespace treadle
