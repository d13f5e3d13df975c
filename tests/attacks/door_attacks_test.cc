// Attacks of clients that have not said who they are: what they send must not cost others memory,
// descriptors or the server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "tests/attacks/attacked_server.h"
#include "tests/attacks/hostile_client.h"

namespace treadle {
namespace {

using testing::HasSubstr;

const char kGenerate[] = "/treadle.v1.Inference/Generate";
constexpr int kConnections = 16;

// Frames in which a message of many bytes is sent.
std::string Data(uint32_t stream, std::string_view bytes) {
  std::string frames;
  for (; !bytes.empty(); bytes.remove_prefix(std::min<size_t>(16384, bytes.size()))) {
    frames += Http2Frame(0, 0, stream, bytes.substr(0, 16384));
  }
  return frames;
}

std::unique_ptr<HostileClient> Greeted(int port) {
  auto client = std::make_unique<HostileClient>(port);
  EXPECT_TRUE(client->connected() && client->Greet());
  return client;
}

using DoorAttacks = AttackTest;

TEST_F(DoorAttacks, CompressedMessagesAreRefusedUnread) {
  Start();
  for (int i = 0; i < kConnections; ++i) {
    const auto client = Greeted(server_->port());
    EXPECT_TRUE(client->Call(1, kGenerate));
    EXPECT_TRUE(client->Send(Data(1, MessagePrefix(true, 1 << 20) + std::string(1 << 16, 'x'))));
    const std::string answer = client->ReadUntil("compressed");
    EXPECT_THAT(answer, HasSubstr("12"));  // UNIMPLEMENTED
    EXPECT_THAT(answer, HasSubstr("compressed messages are not accepted"));
  }
  // So a real client is told, and goes on.
  const auto stub = v1::Inference::NewStub(server_->Connect());
  for (const auto algorithm : {GRPC_COMPRESS_GZIP, GRPC_COMPRESS_NONE}) {
    grpc::ClientContext context;
    context.set_compression_algorithm(algorithm);
    v1::GenerateRequest request;
    request.set_text(std::string(100, 'a'));
    request.mutable_stopping()->set_max_new_tokens(1);
    v1::GenerateResponse response;
    const grpc::Status status = stub->Generate(&context, request, &response);
    if (algorithm == GRPC_COMPRESS_NONE) {
      EXPECT_TRUE(status.ok()) << status.error_message();
    } else {
      EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << status.error_message();
      EXPECT_THAT(status.error_message(), HasSubstr("compressed messages are not accepted"));
    }
  }
}

TEST_F(DoorAttacks, AMessageThatIsTooLargeIsRefusedByItsLength) {
  Start();
  std::vector<std::unique_ptr<HostileClient>> clients;
  const std::string piece = Data(1, std::string(1 << 20, 'x'));
  for (int i = 0; i < kConnections; ++i) {
    auto client = std::make_unique<HostileClient>(server_->port(), 1);
    ASSERT_TRUE(client->connected() && client->Greet() && client->Call(1, kGenerate));
    ASSERT_TRUE(client->Send(Data(1, MessagePrefix(false, 400 << 20))));
    EXPECT_THAT(client->ReadUntil("--max-request-bytes"),
                HasSubstr("a message of 419430400 bytes"));
    for (int sent = 0; sent < 8 && client->Send(piece); ++sent) {  // who does not listen
    }
    clients.push_back(std::move(client));
  }
  ExpectLittleMemory();
  const auto stub = v1::Inference::NewStub(server_->Connect());
  for (const size_t size : {size_t{8} << 20, size_t{16}}) {
    grpc::ClientContext context;
    v1::GenerateRequest request;
    request.set_text(std::string(size, ' '));
    request.mutable_stopping()->set_max_new_tokens(1);
    v1::GenerateResponse response;
    const grpc::Status status = stub->Generate(&context, request, &response);
    EXPECT_EQ(status.error_code(),
              size > 16 ? grpc::StatusCode::RESOURCE_EXHAUSTED : grpc::StatusCode::OK);
    EXPECT_THAT(status.error_message(), HasSubstr(size > 16 ? "--max-request-bytes" : ""));
  }
}

TEST_F(DoorAttacks, AHeaderBlockWithoutEndIsCutOff) {
  Start();
  for (int i = 0; i < kConnections; ++i) {
    const auto client = Greeted(server_->port());
    ASSERT_TRUE(client->Send(Http2Frame(1, 0, 1, CallHeaders(kGenerate))));
    // A field that the next frame goes on with, for ever; or nothing at all.
    const std::string more = Http2Frame(9, 0, 1, std::string(i % 2 ? 0 : 16000, 'x'));
    int64_t sent = 0;
    while (sent < 64 << 20 && client->Send(more)) sent += static_cast<int64_t>(more.size());
    EXPECT_LT(sent, 16 << 20);
  }
  const auto client = Greeted(server_->port());
  std::string block = Http2Frame(1, 0, 1, CallHeaders(kGenerate));
  for (int i = 0; i < 5; ++i) block += Http2Frame(9, 0, 1, std::string(16000, 'x'));
  client->Send(block);
  EXPECT_THAT(client->ReadUntil("--max-header-bytes"), HasSubstr("--max-header-bytes"));
}

TEST_F(DoorAttacks, PingsAreAnsweredAndAFloodOfThemIsCutOff) {
  Start();
  for (int i = 0; i < kConnections; ++i) {
    const auto client = Greeted(server_->port());
    // gRPC by itself ends a connection at its third.
    for (char ping = 'a'; ping < 'k'; ++ping) {
      const std::string payload(8, ping);
      ASSERT_TRUE(client->Send(Http2Frame(6, 0, 0, payload)));
      EXPECT_THAT(client->ReadUntil(payload),
                  testing::AllOf(HasSubstr(payload), testing::Not(HasSubstr("too_many_pings"))));
    }
    std::string flood;
    for (int ping = 0; ping < 1000; ++ping) flood += Http2Frame(6, 0, 0, "12345678");
    client->Send(flood);
    EXPECT_THAT(client->ReadUntil("too_many_pings"), HasSubstr("too_many_pings"));
  }
}

TEST_F(DoorAttacks, MessagesThatAreNeverWholeTakeNoMoreThanTheirShare) {
  Start({"--max-receive-memory", "32M"});
  const std::string most = MessagePrefix(false, 4 << 20) + std::string(3 << 20, 'x');
  std::vector<std::unique_ptr<HostileClient>> clients;
  for (int i = 0; i < 4 * kConnections; ++i) {  // 192 MB
    auto client = std::make_unique<HostileClient>(server_->port(), 1);
    ASSERT_TRUE(client->connected() && client->Greet() && client->Call(1, kGenerate));
    EXPECT_TRUE(client->SendData(1, most));
    clients.push_back(std::move(client));
  }
  EXPECT_LT(server_->memory_mb(), memory_ + 96);
  EXPECT_TRUE(server_->Honest().ok());
  EXPECT_THAT(clients[0]->ReadUntil("--max-receive-memory"), HasSubstr("--max-receive-memory"));
}

TEST_F(DoorAttacks, CallsThatNeverBeginAreBounded) {
  Start();
  std::vector<std::unique_ptr<HostileClient>> clients;
  for (int i = 0; i < kConnections; ++i) {
    clients.push_back(Greeted(server_->port()));
    bool open = true;
    for (uint32_t stream = 1; stream < 20'000 && open; stream += 2) {
      open = clients.back()->Call(stream, kGenerate);
    }
  }
  ExpectLittleMemory();
}

TEST_F(DoorAttacks, ConnectionsWithoutAWordDoNotLockTheDoor) {
  Start({}, /*descriptors=*/128);
  {
    std::vector<std::unique_ptr<HostileClient>> clients;
    for (int i = 0; i < 200; ++i) {
      clients.push_back(std::make_unique<HostileClient>(server_->port()));
      if (i % 2 == 0) clients.back()->Greet();  // half of them say hello, and nothing more
    }
    ExpectService();
  }
  ExpectService();
}

TEST_F(DoorAttacks, CallsThatAreGivenUpAtOnceAreReadSlowly) {
  Start();
  std::vector<std::thread> attackers;
  for (int i = 0; i < kConnections; ++i) {
    attackers.emplace_back([this] {
      const std::string cancel("\0\0\0\x08", 4);
      for (int again = 0; again < 3; ++again) {  // whoever is read slowly may come back
        HostileClient client(server_->port(), 1);
        bool open = client.connected() && client.Greet();
        for (uint32_t stream = 1; stream < 20'000 && open; stream += 2) {
          open = client.Call(stream, kGenerate) && client.Send(Http2Frame(3, 0, stream, cancel));
        }
      }
    });
  }
  for (int i = 0; i < 5; ++i) ExpectService();
  for (std::thread& attacker : attackers) attacker.join();
}

}  // namespace
}  // namespace treadle
