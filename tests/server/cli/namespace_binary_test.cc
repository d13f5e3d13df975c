// The treadle binary over workers on hosts of their own (network namespaces, where this machine
// allows them): what users see when a host is cut off, when it is there again, and when packets
// suffer on their way.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/status.h"
#include "server/grpc/inference.grpc.pb.h"
#include "tests/server/cli/network_namespaces.h"
#include "tests/server/cli/served_binary.h"

namespace treadle {
namespace {

using testing::HasSubstr;

constexpr int kAnswer = 40;
constexpr int kLongAnswer = 3000;
constexpr auto kPatience = std::chrono::minutes(2);
constexpr uint16_t kControlPort = 7001;
constexpr size_t kRowBytes = 512;  // one row of the model between stages

// An answer that comes bit by bit.
class Answer {
 public:
  Answer(v1::Inference::Stub& stub, int tokens) {
    context_.set_deadline(std::chrono::system_clock::now() + kPatience);
    reader_ = stub.GenerateStream(&context_, GreedyRequest(tokens));
  }
  bool Read() {
    v1::GenerateResponse message;
    if (!reader_->Read(&message)) return false;
    const auto& ids = message.output().token_ids();
    tokens_.insert(tokens_.end(), ids.begin(), ids.end());
    return true;
  }
  grpc::Status Finish() {
    while (Read()) {
    }
    return reader_->Finish();
  }
  const std::vector<int>& tokens() const { return tokens_; }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader_;
  std::vector<int> tokens_;
};

std::vector<int> AnswerInProcess() {
  const std::string output =
      RunToEnd(Treadle(Str("generate --ignore-eos --json --threads 1 --max-new-tokens ", kAnswer),
                       {"--model", OwnModel(SlowModel()), "--prompt", "Once upon a time"}));
  return nlohmann::json::parse(
      output.substr(output.find('{'), output.rfind('}') + 1 - output.find('{')))["token_ids"];
}

class NamespaceBinary : public testing::Test {
 protected:
  static constexpr int kHosts = 2;

  void SetUp() override {
    auto network = NetworkOfHosts::Create(kHosts);
    if (!network.ok()) {
      GTEST_SKIP() << "workers on hosts of their own are not tested on this machine: "
                   << network.status().message();
    }
    network_ = std::make_unique<NetworkOfHosts>(*std::move(network));
    network_->hub().Enter();  // so that server and client are there
  }

  static std::string Worker(int host) {
    return Str(NetworkOfHosts::Address(host), ":", kControlPort);
  }
  void StartWorkersAndServer() {
    const std::string common =  // workers that other machines reach want a secret
        Str("--control-secret-file ", OwnFolder().Write("secret", "a secret of sixteen\n"),
            " --model ", OwnModel(SlowModel()));
    for (int host = 0; host < kHosts; ++host) {
      network_->host(host).Run([&] {
        workers_.push_back(std::make_unique<WorkerBinary>(
            Str(common, " --data-interface ", host == 0 ? "eth0" : NetworkOfHosts::Address(host)),
            std::vector<std::string>{}, Worker(host)));
      });
      ASSERT_NE(workers_.back()->address(), "") << workers_.back()->output();
    }
    server_ = std::make_unique<ServedBinary>(Str(ServedBinary::kGrpcOnly,
                                                 "--threads 2 --iteration-deadline 2s --workers ",
                                                 Worker(0), ",", Worker(1), " ", common));
  }
  // As a user who tries again for a while.
  std::vector<int> AskUntilAnswered() {
    grpc::Status status;
    const auto end = std::chrono::steady_clock::now() + kPatience;
    do {
      Answer answer(server_->stub(), kAnswer);
      status = answer.Finish();
      if (status.ok()) return answer.tokens();
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    } while (std::chrono::steady_clock::now() < end);
    ADD_FAILURE() << status.error_message() << "\n" << server_->output();
    return {};
  }

  std::unique_ptr<NetworkOfHosts> network_;
  std::vector<std::unique_ptr<WorkerBinary>> workers_;
  std::unique_ptr<ServedBinary> server_;
};

TEST_F(NamespaceBinary, AHostThatIsCutOffIsNamedAndUsedAgainOnceItIsBack) {
  const std::vector<int> expected = AnswerInProcess();
  ASSERT_EQ(expected.size(), static_cast<size_t>(kAnswer));
  ASSERT_NO_FATAL_FAILURE(StartWorkersAndServer());
  EXPECT_EQ(AskUntilAnswered(), expected);
  for (const int victim : {1, 0}) {
    SCOPED_TRACE(Str("host ", victim));
    Answer first(server_->stub(), kLongAnswer);
    Answer second(server_->stub(), kLongAnswer);
    ASSERT_TRUE(first.Read() && second.Read());
    network_->SetLink(victim, false);
    for (Answer* answer : {&first, &second}) {
      const grpc::Status lost = answer->Finish();
      EXPECT_EQ(lost.error_code(), grpc::StatusCode::UNAVAILABLE) << lost.error_message();
      EXPECT_THAT(lost.error_message(), HasSubstr(Worker(victim)));
    }
    network_->SetLink(victim, true);
    EXPECT_EQ(AskUntilAnswered(), expected);
  }
}

bool IsControl(const Packet& packet) {
  return packet.from_port == kControlPort || packet.to_port == kControlPort;
}

// Nothing is refused and nobody hears of an end: packets are lost for longer than silence is borne.
struct Partition {
  const char* name;
  bool (*loses)(const Packet&);
};
const Partition kPartitions[] = {
    {"master and stage 1", [](const Packet& p) { return p.from == 1 || p.to == 1; }},
    {"control of stage 1",
     [](const Packet& p) { return IsControl(p) && (p.from == 1 || p.to == 1); }},
    {"control, only from the master",
     [](const Packet& p) { return IsControl(p) && p.from == NetworkOfHosts::kHub; }},
    {"control, only to the master",
     [](const Packet& p) { return IsControl(p) && p.to == NetworkOfHosts::kHub; }},
    {"plans between stages",
     [](const Packet& p) { return IsControl(p) && p.from == 0 && p.to == 1; }},
    {"data", [](const Packet& p) { return !IsControl(p); }},
    {"data, only forward", [](const Packet& p) { return !IsControl(p) && p.from == 0; }},
    {"data, only back", [](const Packet& p) { return !IsControl(p) && p.from == 1; }},
};

TEST_F(NamespaceBinary, SilentPartitionsHealByThemselvesAndChangeNoAnswer) {
  ASSERT_NO_FATAL_FAILURE(StartWorkersAndServer());
  Answer undisturbed(server_->stub(), kLongAnswer);
  ASSERT_TRUE(undisturbed.Finish().ok());
  for (const Partition& partition : kPartitions) {
    SCOPED_TRACE(partition.name);
    Answer answer(server_->stub(), kLongAnswer);
    ASSERT_TRUE(answer.Read());
    std::atomic<int> lost = 0;
    network_->SetRule([&](const Packet& packet) {
      if (!partition.loses(packet)) return PacketFate::kPass;
      ++lost;
      return PacketFate::kDrop;
    });
    std::this_thread::sleep_for(std::chrono::seconds(4));
    network_->SetRule({});
    const grpc::Status status = answer.Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(answer.tokens(), undisturbed.tokens());
    EXPECT_GT(lost, 0);
  }
}

// Damage that TCP repairs, and damage that it cannot see: each message's own sum does.
TEST_F(NamespaceBinary, PacketsThatAreLostDoubledSwappedOrChangedChangeNoAnswer) {
  constexpr int kTokens = 400;
  ASSERT_NO_FATAL_FAILURE(StartWorkersAndServer());
  Answer undisturbed(server_->stub(), kTokens);
  ASSERT_TRUE(undisturbed.Finish().ok());
  for (const PacketFate fate :
       {PacketFate::kDrop, PacketFate::kDuplicate, PacketFate::kSwap, PacketFate::kFlip}) {
    SCOPED_TRACE(static_cast<int>(fate));
    std::atomic<int> packets = 0;
    network_->SetRule([&packets, fate](const Packet& packet) {
      // A changed bit of Gloo's few bytes before each message, or of control messages, may mean
      // anything; in between lie the rows.
      if (fate == PacketFate::kFlip && (IsControl(packet) || packet.bytes < kRowBytes)) {
        return PacketFate::kPass;
      }
      // A changed bit ends an epoch, and what was known is then sent again: a few of them.
      const int number = ++packets;
      const bool over = fate == PacketFate::kFlip && number > 500;
      return number % 100 == 0 && !over ? fate : PacketFate::kPass;
    });
    Answer answer(server_->stub(), kTokens);
    const grpc::Status status = answer.Finish();
    network_->SetRule({});
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(answer.tokens(), undisturbed.tokens());
    EXPECT_GT(packets, 100);
  }
}

}  // namespace
}  // namespace treadle
