// Streams of the control plane: the secret that both ends prove, and what waits on the way.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "absl/synchronization/notification.h"
#include "engine/remote/control.grpc.pb.h"
#include "engine/remote/control_secret.h"
#include "tests/engine/remote/hostile_peers.h"
#include "tests/support/assert_ok.h"
#include "tests/support/in_time.h"
#include "tests/support/ranks/remote_cluster.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

ControlCredentials Secret(const std::string& secret) { return {.secret = secret}; }

TEST(ControlSecrets, BothEndsProveTheSame) {
  ClusterOptions options;
  options.model = TinyModel();
  options.stages = 2;
  options.worker.credentials = options.engine.credentials = Secret("a secret of sixteen");
  const auto cluster = StartThreadCluster(options);
  EXPECT_TRUE(cluster.ok()) << cluster.status();  // plans go from stage to stage, too
}

TEST(ControlSecrets, StrangersAreRefusedByEitherEnd) {
  const struct {
    const char* worker;
    const char* master;
    const char* error;
  } rows[] = {{"a secret of sixteen", "", "the worker wants proof of its control secret"},
              {"", "a secret of sixteen", "the worker has no control secret"},
              {"a secret of sixteen", "another one of 19", "has another control secret"}};
  for (const auto& [worker_secret, master_secret, error] : rows) {
    ClusterOptions options;
    options.model = TinyModel();
    options.worker.credentials = Secret(worker_secret);
    options.engine.credentials = Secret(master_secret);
    const absl::Status status = StartThreadCluster(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << status;
    EXPECT_THAT(status.message(), HasSubstr(error));
    EXPECT_THAT(status.message(), HasSubstr("--control-secret-file"));
    EXPECT_THAT(status.message(), ::testing::Not(HasSubstr("sixteen")));
  }
}

// A master that skips its own checks gets no further.
TEST(ControlSecrets, AWorkerWantsTheProofItself) {
  WorkerOptions options = ClusterOptions::QuietWorker();
  options.credentials = Secret("a secret of sixteen");
  ASSERT_OK_AND_ASSIGN(const auto worker, Worker::Start(options));
  const auto stub = control::Control::NewStub(
      grpc::CreateChannel(worker->address(), grpc::InsecureChannelCredentials()));
  // Without a proof in its headers it is refused before it has sent a message; with one that it has
  // listened to, after the first.
  for (const bool overheard : {false, true}) {
    const std::string nonce = DrawNonce();
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    context.AddMetadata("treadle-nonce-bin", nonce);
    if (overheard) {
      context.AddMetadata("treadle-proof-bin", MakeProof(options.credentials.secret,
                                                         ProofOf::kMaster, "Attach", nonce, ""));
    }
    const auto stream = stub->Attach(&context);
    control::MasterMessage message;
    message.mutable_hello()->set_protocol(kControlProtocol);
    if (overheard) stream->Write(message);
    control::WorkerMessage answer;
    EXPECT_FALSE(stream->Read(&answer));
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr("another control secret"));
  }
}

// A peer that has seen another stream's proofs cannot use them in its own: the numbers are new.
TEST(ControlSecrets, ProofsAreOfOneStreamOneSideAndOneCall) {
  const std::string secret = "a secret of sixteen", a = DrawNonce(), b = DrawNonce();
  const std::string proof = MakeProof(secret, ProofOf::kMaster, "Attach", a, b);
  EXPECT_EQ(a.size(), 32u);
  EXPECT_NE(a, b);
  EXPECT_TRUE(SameProof(proof, MakeProof(secret, ProofOf::kMaster, "Attach", a, b)));
  for (const std::string& other :
       {MakeProof(secret, ProofOf::kWorker, "Attach", a, b),
        MakeProof(secret, ProofOf::kMaster, "Follow", a, b),
        MakeProof(secret, ProofOf::kMaster, "Attach", b, a),
        MakeProof("x", ProofOf::kMaster, "Attach", a, b), std::string(), proof.substr(1)}) {
    EXPECT_FALSE(SameProof(proof, other));
  }
}

TEST(ControlSecrets, LoopbackAndSocketsStayOnTheMachine) {
  for (const char* listen :
       {"unix:/tmp/x", "127.0.0.1:0", "127.3.2.1:1", "localhost:5", "[::1]:1"}) {
    EXPECT_TRUE(StaysOnMachine(listen)) << listen;
  }
  for (const char* listen :
       {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "127.example.org:1", "host:1", ""}) {
    EXPECT_FALSE(StaysOnMachine(listen)) << listen;
  }
}

TEST(ControlSecrets, FilesNeedALineOfEnoughCharacters) {
  const std::string path = OwnFolder() / "secret";
  const auto read = [&](const std::string& text) {
    std::ofstream(path) << text;
    return ReadControlSecret(path);
  };
  EXPECT_EQ(*read("  a secret of sixteen\n"), "a secret of sixteen");
  EXPECT_EQ(*read("a secret of sixteen\r\nmore\n"), "a secret of sixteen");
  EXPECT_THAT(read("short\n").status().message(), HasSubstr("has 5 characters, expected 16 to"));
  EXPECT_THAT(read("\n\n").status().message(), HasSubstr("has 0 characters"));
  EXPECT_THAT(read(std::string(10'000, 'x')).status().message(), HasSubstr("expected 16 to 4096"));
  EXPECT_THAT(ReadControlSecret("/no/such").status().message(),
              HasSubstr("--control-secret-file: cannot read /no/such: No such file"));
}

// A server that answers the first message with a small one, and each later one with a mebibyte.
class Echo {
 public:
  Echo() {
    ControlServer::Acceptors acceptors;
    acceptors.attach = [this](std::shared_ptr<Stream<control::WorkerMessage>> stream) {
      return StreamEvents<control::MasterMessage>{
          .message =
              [this, stream](control::MasterMessage& m) {
                const bool first = heard++ == 0;
                largest = std::max(largest.load(), m.ByteSizeLong());
                stream->Tell([&](control::WorkerMessage& answer) {
                  if (first) return answer.mutable_heartbeat()->Clear();
                  answer.mutable_rendezvous()->set_value(std::string(1 << 20, 'x'));
                });
              },
          .closed = [](const absl::Status&) {}};
    };
    acceptors.follow = [](auto stream) {
      return StreamEvents<control::FollowMessage>{.message = [](auto&) {},
                                                  .closed = [](const absl::Status&) {}};
    };
    server = *ControlServer::Start("127.0.0.1:0", std::move(acceptors));
  }

  std::atomic<int> heard = 0;
  std::atomic<size_t> largest = 0;
  std::unique_ptr<ControlServer> server;
};

TEST(ControlStreams, LargeMessagesArriveWholeAfterASmallOne) {
  Echo echo;
  HostileMaster master(echo.server->address());
  master.Tell([](control::MasterMessage& m) { m.mutable_heartbeat(); });
  const std::string value(5'000'000, 'y');
  master.Tell([&](control::MasterMessage& m) { m.mutable_rendezvous()->set_value(value); });
  EXPECT_TRUE(master.inbox().Next([](const auto& m) { return m.has_rendezvous(); }));
  EXPECT_GT(echo.largest, value.size());
}

TEST(ControlStreams, WhoTakesNothingIsNotListenedTo) {
  constexpr int kMessages = 400;
  Echo echo;
  Mutex gate;
  std::atomic<int> taken = 0;
  std::shared_ptr<Stream<control::MasterMessage>> stream;
  absl::Notification closed;
  {
    MutexLock shut(gate);
    stream = OpenAttach(echo.server->address(), {.message =
                                                     [&](control::WorkerMessage&) {
                                                       MutexLock wait(gate);
                                                       ++taken;
                                                     },
                                                 .closed = [&](const auto&) { closed.Notify(); }});
    for (int i = 0; i < kMessages; ++i) {
      stream->Tell([](control::MasterMessage& m) { m.mutable_heartbeat(); });
    }
    std::this_thread::sleep_for(std::chrono::seconds(2));
    EXPECT_LT(echo.heard, 100);  // 32 MiB of answers, and what the connection holds
  }
  ComesTrue([&] { return taken >= kMessages; });
  EXPECT_EQ(taken, kMessages);
  stream->Abort();
  closed.WaitForNotification();
}

}  // namespace
}  // namespace treadle
