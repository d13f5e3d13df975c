// The tokenizer that gateways fetch: its pieces, its sum, its archive, and clients that do not
// read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <string>
#include <thread>

#include "server/gateway/vllm_engine.grpc.pb.h"
#include "server/gateway/zip_archive.h"
#include "tests/server/gateway/gateway_fixture.h"
#include "tests/server/test_server.h"

namespace treadle {
namespace {

using testing::HasSubstr;

TEST_F(Gateway, TheTokenizerComesInPiecesWithItsSum) {
  const auto fetch = [this](std::string& sum) {
    grpc::ClientContext context;
    const auto reader = stub_->GetTokenizer(&context, {});
    std::string archive;
    for (common::GetTokenizerChunk chunk; reader->Read(&chunk);) {
      EXPECT_EQ(sum, "");  // with the last one only
      EXPECT_LE(chunk.data().size(), 65536u);
      archive += chunk.data();
      sum = chunk.sha256();
    }
    const grpc::Status status = reader->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    return archive;
  };
  const std::map<std::string, std::string> files = {{"tokenizer.json", std::string(200'000, '7')},
                                                    {"tokenizer_config.json", "{}"}};
  std::atomic<int> made = 0;
  Serve({.tokenizer_files = [&] {
    ++made;
    return files;
  }});
  std::string sum, again;
  const std::string archive = fetch(sum);
  EXPECT_EQ(archive, ZipArchive(files));
  EXPECT_EQ(sum.size(), 64u);
  EXPECT_EQ(fetch(again), archive);
  EXPECT_EQ(again, sum);
  EXPECT_EQ(made.load(), 1);

  for (const bool known : {false, true}) {
    TestServerOptions options;
    if (known) options.tokenizer_files = [] { return std::map<std::string, std::string>(); };
    Serve(options);
    grpc::ClientContext context;
    const grpc::Status status = stub_->GetTokenizer(&context, {})->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_THAT(status.error_message(), HasSubstr(known ? "SentencePiece" : "no tokenizer"));
  }
}

// Clients ask for a tokenizer that is longer than what gRPC's connection holds, and do not read.
class TokenizerReaders : public Gateway {
 protected:
  void ServeAndAsk(std::chrono::milliseconds stall_timeout) {
    TestServerOptions options;
    options.stall_timeout = stall_timeout;
    options.tokenizer_files = [] {
      return std::map<std::string, std::string>{{"tokenizer.json", std::string(2 << 20, '7')}};
    };
    Serve(options);
    for (Reader& reader : readers_) reader.stream = stub_->GetTokenizer(&reader.context, {});
    // One who came before the last of them would take its place, and none would be full.
    for (Reader& reader : readers_) reader.stream->WaitForInitialMetadata();
    aside_ = engine::VllmEngine::NewStub(server_->Connect(grpc::InsecureChannelCredentials()));
  }

  // Asks for it once more, on a connection that holds nothing unread, and gives up once it comes.
  // Each piece that is read is dear under ThreadSanitizer.
  grpc::Status AskOnce() {
    grpc::ClientContext context;
    const auto stream = aside_->GetTokenizer(&context, {});
    common::GetTokenizerChunk chunk;
    if (stream->Read(&chunk)) context.TryCancel();
    return stream->Finish();
  }

  // Until there is room, or none, for one more.
  grpc::Status AskUntil(bool room) {
    while (true) {
      grpc::Status status = AskOnce();
      if ((status.error_code() != grpc::StatusCode::RESOURCE_EXHAUSTED) == room) return status;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

  struct Reader {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<common::GetTokenizerChunk>> stream;
  };
  std::array<Reader, 16> readers_;  // as many as there may be
  std::unique_ptr<engine::VllmEngine::Stub> aside_;
};

TEST_F(TokenizerReaders, AreSoMany) {
  ServeAndAsk(std::chrono::minutes(1));
  EXPECT_EQ(AskUntil(false).error_message(),
            "GetTokenizer: 16 calls are under way, as many as there may be");
  for (Reader& reader : readers_) reader.context.TryCancel();
  AskUntil(true);
}

TEST_F(TokenizerReaders, WhoDoNotReadAreCutOffAndLeaveRoom) {
  ServeAndAsk(std::chrono::milliseconds(300));
  std::this_thread::sleep_for(std::chrono::seconds(1));
  AskUntil(true);
  const bool cut_off = std::ranges::any_of(readers_, [](Reader& reader) {
    for (common::GetTokenizerChunk chunk; reader.stream->Read(&chunk);) {
    }
    return reader.stream->Finish().error_code() == grpc::StatusCode::CANCELLED;
  });
  EXPECT_TRUE(cut_off);
  for (Reader& reader : readers_) reader.context.TryCancel();
}

TEST_F(Gateway, AbortTakesSoManyIds) {
  grpc::ClientContext context;
  engine::AbortRequest request;
  for (int i = 0; i < 1025; ++i) request.add_request_ids("a");
  engine::AbortResponse response;
  const grpc::Status status = stub_->Abort(&context, request, &response);
  EXPECT_EQ(status.error_message(), "request_ids has 1025 entries, expected at most 1024");
}

TEST(ZipArchive, IsWhatTheFormatSays) {
  using std::string_literals::operator""s;
  // CRC-32 of "123456789": CBF43926.
  const std::string described =
      "\x14\0\0\x08\0\0\0\0\x21\0\x26\x39\xF4\xCB\x09\0\0\0\x09\0\0\0\x01\0\0\0"s;
  EXPECT_EQ(ZipArchive({{"a", "123456789"}}),
            "PK\x03\x04"s + described + "a123456789" + "PK\x01\x02\x14\0"s + described +
                std::string(14, '\0') + "a" +
                "PK\x05\x06\0\0\0\0\x01\0\x01\0\x2F\0\0\0\x28\0\0\0\0\0"s);
}

}  // namespace
}  // namespace treadle
