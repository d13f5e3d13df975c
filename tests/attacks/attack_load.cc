// attack_load PORT PID [SECONDS [NAME]]: what each attack costs honest clients of a server that
// listens on 127.0.0.1:PORT as process PID. Beside sixteen attackers one client reads a stream of
// tokens and another asks the probe `live` on a connection of its own each time; the table has, for
// each attack, the most memory over rest, the gaps between tokens, and the slowest probe. The
// attackers stand for other machines: their threads run at the lowest priority.
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "server/grpc/inference.grpc.pb.h"
#include "tests/attacks/hostile_client.h"
#include "tests/server/test_server.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;
using Stub = v1::Inference::Stub;

constexpr int kAttackers = 16;
constexpr size_t kMax = (4 << 20) - 1024;  // of a text, with the message around it
const char kGenerate[] = "/treadle.v1.Inference/Generate";

int port = 0;
int process = 0;

double Milliseconds(SteadyClock::time_point since) {
  return std::chrono::duration<double, std::milli>(SteadyClock::now() - since).count();
}

double MemoryMb() {
  std::ifstream file(Str("/proc/", process, "/statm"));
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return static_cast<double>(resident * sysconf(_SC_PAGESIZE)) / (1 << 20);
}

std::shared_ptr<grpc::Channel> Connect() {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(Str("127.0.0.1:", port), grpc::InsecureChannelCredentials(),
                                   arguments);
}

// -- attacks: each is done again and again by every attacker -------------------------------------

struct Attack {
  std::string name;
  std::function<void(Stub&)> once;
};

void SetDeadline(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
}

void Chat(Stub& stub, int messages, const std::string& content) {
  grpc::ClientContext context;
  SetDeadline(context);
  v1::GenerateRequest request;
  for (int i = 0; i < messages; ++i) {
    auto* message = request.mutable_chat()->add_messages();
    message->set_role(i % 2 ? "assistant" : "user");
    message->set_content(content);
  }
  v1::GenerateResponse response;
  stub.Generate(&context, request, &response);
}

void Tokenize(Stub& stub, const std::string& text) {
  grpc::ClientContext context;
  SetDeadline(context);
  v1::TokenizeRequest request;
  request.set_text(text);
  v1::TokenizeResponse response;
  stub.Tokenize(&context, request, &response);
}

void Detokenize(Stub& stub) {
  grpc::ClientContext context;
  SetDeadline(context);
  v1::DetokenizeRequest request;
  request.mutable_token_ids()->mutable_ids()->Resize(2'000'000, 500);
  v1::DetokenizeResponse response;
  stub.Detokenize(&context, request, &response);
}

std::unique_ptr<HostileClient> Greeted() {
  auto client = std::make_unique<HostileClient>(port, 2);
  if (!client->connected() || !client->Greet()) return nullptr;
  return client;
}

// Frames of a call's message.
std::string Data(std::string_view bytes) {
  std::string frames;
  for (; !bytes.empty(); bytes.remove_prefix(std::min<size_t>(16384, bytes.size()))) {
    frames += Http2Frame(Http2Frames::kData, 0, 1, bytes.substr(0, 16384));
  }
  return frames;
}

void Compressed(Stub& stub) {
  grpc::ClientContext context;
  SetDeadline(context);
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  static const std::string zeros(std::size_t{300} << 20, '\0');
  v1::TokenizeRequest request;
  request.set_text(zeros);
  v1::TokenizeResponse response;
  stub.Tokenize(&context, request, &response);
}

void LargeMessage(Stub&) {
  const auto client = Greeted();
  if (!client || !client->Call(1, kGenerate)) return;
  client->Send(Data(MessagePrefix(false, 400 << 20)));
  static const std::string megabyte(1 << 20, 'x');
  for (int sent = 0; sent < 64 && client->SendData(1, megabyte); ++sent) {
  }
}

void UnfinishedMessage(Stub&) {
  const auto client = Greeted();
  if (!client || !client->Call(1, kGenerate)) return;
  client->SendData(1, MessagePrefix(false, 4 << 20) + std::string(4'000'000, 'x'));
  std::this_thread::sleep_for(std::chrono::seconds(2));
}

void EndlessHeaders(Stub&) {
  const auto client = Greeted();
  if (!client) return;
  client->Send(Http2Frame(Http2Frames::kHeaders, 0, 1, CallHeaders(kGenerate)));
  const std::string more = Http2Frame(Http2Frames::kContinuation, 0, 1, std::string(16000, 'x'));
  for (int sent = 0; sent < 4096 && client->Send(more); ++sent) {
  }
}

void CallsWithoutEnd(Stub&) {
  const auto client = Greeted();
  for (uint32_t stream = 1; client && stream < 20'000; stream += 2) {
    if (!client->Call(stream, kGenerate)) return;
  }
}

void Resets(Stub&) {
  const auto client = Greeted();
  const std::string cancel("\0\0\0\x08", 4);
  for (uint32_t stream = 1; client && stream < 20'000; stream += 2) {
    if (!client->Call(stream, kGenerate) ||
        !client->Send(Http2Frame(Http2Frames::kReset, 0, stream, cancel))) {
      return;
    }
  }
}

// Cost of attackers by sharing the processor alone.
void Compute(Stub&) {
  volatile uint64_t sum = 0;
  for (uint64_t i = 0; i < 1'000'000; ++i) sum = sum + i;
}

void IdleConnections(Stub&) {
  std::vector<std::unique_ptr<HostileClient>> clients;
  for (int i = 0; i < 40; ++i) clients.push_back(std::make_unique<HostileClient>(port, 1));
  std::this_thread::sleep_for(std::chrono::seconds(1));
}

const std::vector<Attack>& Attacks() {
  static const std::string spaces(kMax, ' ');
  static const std::string letters(kMax, 'a');
  static const std::string evil = "evil" + std::string(200'000, 'x');
  static const std::vector<Attack> attacks = {
      {"nobody", nullptr},
      {"nobody, beside threads that only compute", Compute},
      {"300 MB of zeros, compressed", Compressed},
      {"a message of 400 MB", LargeMessage},
      {"messages that are never whole", UnfinishedMessage},
      {"a header block without end", EndlessHeaders},
      {"calls that are never made", CallsWithoutEnd},
      {"calls that are reset at once", Resets},
      {"640 idle connections", IdleConnections},
      {"4 MB of spaces to tokenize", [](Stub& stub) { Tokenize(stub, spaces); }},
      {"4 MB of a letter to tokenize", [](Stub& stub) { Tokenize(stub, letters); }},
      {"2,000,000 ids to detokenize", Detokenize},
      {"500,000 chat messages", [](Stub& stub) { Chat(stub, 500'000, "x"); }},
      {"4,095 chat messages", [](Stub& stub) { Chat(stub, 4095, "hello"); }},
      {"a chat of 200 KB that begins with 'evil'", [](Stub& stub) { Chat(stub, 1, evil); }},
  };
  return attacks;
}

// -- what is measured
// ------------------------------------------------------------------------------

struct Costs {
  double most_memory = 0;    // MiB
  std::vector<double> gaps;  // ms between tokens
  double slowest_live = 0;   // ms
  int64_t failed = 0;        // honest calls
};

void ReadStreams(const std::atomic<bool>& over, Costs& costs) {
  const auto channel = Connect();
  const auto stub = v1::Inference::NewStub(channel);
  while (!over) {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::GenerateRequest request;
    request.set_text("Once upon a time");
    request.mutable_stopping()->set_max_new_tokens(200);
    request.mutable_stopping()->set_ignore_eos(true);
    const auto reader = stub->GenerateStream(&context, request);
    v1::GenerateResponse response;
    SteadyClock::time_point last{};
    while (reader->Read(&response)) {
      if (response.output().token_ids().empty()) continue;
      if (last != SteadyClock::time_point{}) costs.gaps.push_back(Milliseconds(last));
      last = SteadyClock::now();
      if (over) context.TryCancel();
    }
    if (!reader->Finish().ok() && !over) ++costs.failed;
  }
}

void AskLive(const std::atomic<bool>& over, Costs& costs) {
  while (!over) {
    const auto began = SteadyClock::now();
    std::string response;
    const bool serves =
        RawCall(Connect(), "/grpc.health.v1.Health/Check", "\x0a\x04live", response).ok() &&
        response == "\x08\x01";
    costs.slowest_live = std::max(costs.slowest_live, Milliseconds(began));
    if (!serves) ++costs.failed;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

// The attackers, in a process of their own: gRPC's threads and locks are one process'.
class Crowd {
 public:
  explicit Crowd(const Attack& attack) {
    if (!attack.once) return;
    const std::string where = std::to_string(port), name = attack.name;
    const char* const arguments[] = {"attack_load", "--attack", where.c_str(), name.c_str(),
                                     nullptr};
    process_ = fork();
    if (process_ == 0) {
      setpriority(PRIO_PROCESS, 0, 19);
      execv("/proc/self/exe", const_cast<char* const*>(arguments));
      _exit(127);
    }
  }
  ~Crowd() {
    if (process_ <= 0) return;
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }

 private:
  pid_t process_ = 0;
};

// Work of that process until it is killed.
void AttackForEver(const std::string& name) {
  const auto attack = std::ranges::find(Attacks(), name, &Attack::name);
  TREADLE_CHECK(attack != Attacks().end());
  std::vector<std::thread> attackers;
  for (int i = 0; i < kAttackers; ++i) {
    attackers.emplace_back([&] {
      const auto stub = v1::Inference::NewStub(Connect());
      while (true) attack->once(*stub);
    });
  }
  for (std::thread& attacker : attackers) attacker.join();
}

Costs Measure(const Attack& attack, int seconds) {
  Costs costs, probe;
  std::atomic<bool> over = false;
  const Crowd crowd(attack);
  std::thread stream([&] { ReadStreams(over, costs); });
  std::thread live([&] { AskLive(over, probe); });
  const auto began = SteadyClock::now();
  while (Milliseconds(began) < seconds * 1000.0) {
    costs.most_memory = std::max(costs.most_memory, MemoryMb());
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  over = true;
  stream.join();
  live.join();
  costs.slowest_live = probe.slowest_live;
  costs.failed += probe.failed;
  std::sort(costs.gaps.begin(), costs.gaps.end());
  return costs;
}

// Runs the attacks whose name has `name` in it.
void Run(int seconds, const std::string& name) {
  Measure(Attacks().front(), 3);  // warm
  const double rest = MemoryMb();
  std::printf("at rest %.0f MiB; %d attackers, %d s each\n\n", rest, kAttackers, seconds);
  std::printf(
      "| Attack | Most memory over rest, MiB | Gap p50, ms | p99, ms | longest, ms | "
      "`live` at most, ms | Honest calls that failed |\n|---|---|---|---|---|---|---|\n");
  for (const Attack& attack : Attacks()) {
    if (attack.name.find(name) == std::string::npos) continue;
    const Costs costs = Measure(attack, seconds);
    const auto quantile = [&](double q) {
      return costs.gaps.empty()
                 ? -1.0
                 : costs.gaps[static_cast<size_t>(q * static_cast<double>(costs.gaps.size() - 1))];
    };
    std::printf("| %s | %.0f | %.1f | %.1f | %.0f | %.0f | %ld |\n", attack.name.c_str(),
                costs.most_memory - rest, quantile(0.5), quantile(0.99), quantile(1),
                costs.slowest_live, static_cast<long>(costs.failed));
    std::fflush(stdout);
    std::this_thread::sleep_for(std::chrono::seconds(2));
  }
}

}  // namespace
}  // namespace treadle

int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "--attack") {
    treadle::port = std::atoi(argv[2]);
    treadle::AttackForEver(argv[3]);
  }
  if (argc < 3) {
    std::fprintf(stderr, "usage: attack_load PORT PID [SECONDS of each attack [NAME]]\n");
    return 2;
  }
  treadle::port = std::atoi(argv[1]);
  treadle::process = std::atoi(argv[2]);
  treadle::Run(argc > 3 ? std::atoi(argv[3]) : 10, argc > 4 ? argv[4] : "");
}
