// VllmEngine.SubscribeKvEvents over a real channel. The subscriber takes events in by the rules of
// smg's kv_event_monitor.rs: the first number may be any; numbers that it has had are skipped, one
// that is missing is a gap; `cleared` forgets all, and a block's parent must be known.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/access/api_keys.h"
#include "server/gateway/vllm_engine.grpc.pb.h"
#include "tests/server/access/test_certificates.h"
#include "tests/server/test_server.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

namespace engine = ::vllm::grpc::engine;
namespace common = ::smg::grpc::common;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int32_t kPage = 16;

class Subscriber {
 public:
  Subscriber(const std::shared_ptr<grpc::Channel>& channel, uint64_t last, const std::string& key)
      : last_(last), stub_(engine::VllmEngine::NewStub(channel)) {
    if (!key.empty()) context_.AddMetadata("authorization", "Bearer " + key);
    common::SubscribeKvEventsRequest request;
    request.set_start_sequence_number(last);
    reader_ = stub_->SubscribeKvEvents(&context_, request);
  }
  ~Subscriber() { Finish(); }

  bool ReadBatch() {
    common::KvEventBatch batch;
    if (!reader_->Read(&batch)) return false;
    EXPECT_EQ(batch.sequence_number(), ++last_);
    EXPECT_GT(batch.timestamp(), 1.7e9);
    for (const common::KvCacheEvent& event : batch.events()) {
      EXPECT_EQ(event.event_id(), ++events);
      if (event.has_cleared()) blocks.clear();
      for (const int64_t hash : event.removed().block_hashes()) {
        EXPECT_EQ(blocks.erase(hash), 1u);
      }
      int64_t parent = event.stored().parent_block_hash();
      EXPECT_EQ(event.stored().has_parent_block_hash(), parent != 0);
      EXPECT_TRUE(parent == 0 || blocks.contains(parent));
      for (const common::KvBlock& block : event.stored().blocks()) {
        EXPECT_EQ(block.block_size(), kPage);
        std::vector<int32_t> ids = parent == 0 ? std::vector<int32_t>() : blocks[parent];
        ids.insert(ids.end(), block.token_ids().begin(), block.token_ids().end());
        blocks[parent = block.block_hash()] = ids;
      }
    }
    return true;
  }
  bool ReadUntil(size_t count) {
    while (blocks.size() != count) {
      if (!ReadBatch()) return false;
    }
    return true;
  }
  grpc::Status Finish() {
    if (!reader_) return {};
    context_.TryCancel();
    common::KvEventBatch batch;
    while (reader_->Read(&batch)) {
    }
    return std::exchange(reader_, nullptr)->Finish();
  }
  grpc::Status Refusal() {
    EXPECT_FALSE(ReadBatch());
    return std::exchange(reader_, nullptr)->Finish();
  }
  uint64_t last() const { return last_; }

  std::map<int64_t, std::vector<int32_t>> blocks;  // ids up to the block's end, by hash
  uint64_t events = 0;

 private:
  uint64_t last_;
  std::unique_ptr<engine::VllmEngine::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<common::KvEventBatch>> reader_;
};

class KvEventCalls : public testing::Test {
 protected:
  void Serve(TestServerOptions options) { server_ = std::make_unique<TestServer>(options); }
  static TestServerOptions Telling() {
    TestServerOptions options;
    options.scheduling.kv_events = true;
    return options;
  }
  Subscriber Subscribe(uint64_t last = 0, const std::string& key = "") {
    return Subscriber(server_->channel(), last, key);
  }
  // Answers one token, which is in no page that is kept.
  void Ask(const std::vector<int32_t>& prompt, const std::string& key = "") {
    engine::GenerateRequest request;
    request.set_request_id("r");
    for (const int32_t id : prompt) {
      request.mutable_tokenized()->add_input_ids(static_cast<uint32_t>(id));
    }
    request.mutable_sampling_params()->set_max_tokens(1);
    grpc::ClientContext context;
    if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
    const auto reader =
        engine::VllmEngine::NewStub(server_->channel())->Generate(&context, request);
    engine::GenerateResponse response;
    while (reader->Read(&response)) {
    }
    const grpc::Status status = reader->Finish();
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  static std::vector<int32_t> Prompt(int32_t pages, int32_t first) {
    std::vector<int32_t> prompt;
    for (int32_t i = 0; i < pages * kPage + 1; ++i) prompt.push_back((first + i) % 40);
    return prompt;
  }

  std::unique_ptr<ApiKeys> keys_;
  std::unique_ptr<TestServer> server_;
};

TEST_F(KvEventCalls, TellWhatIsCachedAndEveryChange) {
  Serve(Telling());
  const std::vector<int32_t> prompt = Prompt(3, 0);
  const std::vector<int32_t> kept(prompt.begin(), prompt.end() - 1);
  Ask(prompt);
  Subscriber early = Subscribe();
  ASSERT_TRUE(early.ReadUntil(3));
  EXPECT_EQ(early.blocks.size(), 3u);
  std::vector<std::vector<int32_t>> chains;
  for (const auto& [hash, ids] : early.blocks) chains.push_back(ids);
  EXPECT_THAT(chains, testing::Contains(kept));

  // A second one has a page in common with the first.
  std::vector<int32_t> other = Prompt(2, 0);
  other[kPage] = 41;
  Ask(other);
  ASSERT_TRUE(early.ReadUntil(4));

  // One that comes later, as from another server, begins with the same.
  Subscriber late = Subscribe(/*last=*/70);
  ASSERT_TRUE(late.ReadBatch());
  EXPECT_EQ(late.last(), 71u);
  ASSERT_TRUE(late.ReadUntil(4));
  EXPECT_EQ(late.blocks, early.blocks);

  const auto stub = engine::VllmEngine::NewStub(server_->channel());
  grpc::ClientContext context;
  common::FlushCacheResponse flushed;
  ASSERT_TRUE(stub->FlushCache(&context, {}, &flushed).ok());
  EXPECT_TRUE(early.ReadUntil(0));
  EXPECT_TRUE(late.ReadUntil(0));
}

TEST_F(KvEventCalls, AreForOperatorsAndTellOwnersApart) {
  const std::string alice(16, 'a'), bob(16, 'b'), operator_key(16, 'o');
  const std::string file = TestPath("events.keys");
  WriteText(file, alice + " alice\n" + bob + " bob\n" + operator_key + " root - - operator\n");
  ASSERT_OK_AND_ASSIGN(auto keys, ApiKeys::Open(file, [](const LogEvent&) {}));
  keys_ = std::move(keys);
  TestServerOptions options = Telling();
  options.adjust = [&](ServiceOptions& service) { service.keys = keys_.get(); };
  Serve(options);

  EXPECT_EQ(Subscribe().Refusal().error_code(), grpc::StatusCode::UNAUTHENTICATED);
  const grpc::Status refused = Subscribe(0, alice).Refusal();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(refused.error_message(), HasSubstr("operator's key"));

  Ask(Prompt(2, 0), alice);
  Ask(Prompt(2, 0), bob);
  Subscriber reader = Subscribe(0, operator_key);
  ASSERT_TRUE(reader.ReadUntil(4));  // not shared, and not taken for each other
}

TEST_F(KvEventCalls, AreOffUnlessAskedFor) {
  Serve({});
  const grpc::Status status = Subscribe().Refusal();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(status.error_message(), HasSubstr("--kv-events on"));
}

TEST_F(KvEventCalls, HaveSoManySubscribersAtMost) {
  constexpr size_t kMax = 16;
  Serve(Telling());
  std::vector<std::unique_ptr<Subscriber>> all;
  while (all.size() < kMax) {
    all.push_back(std::make_unique<Subscriber>(server_->channel(), 0, ""));
    ASSERT_TRUE(all.back()->ReadBatch());
  }
  const grpc::Status status = Subscribe().Refusal();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("16 calls"));
  all.clear();
  grpc::Status again;
  do {  // gRPC forgets the others in its own time
    again = grpc::Status::OK;
    Subscriber next = Subscribe();
    if (!next.ReadBatch()) again = next.Refusal();
  } while (again.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(again.ok()) << again.error_message();
}

}  // namespace
}  // namespace treadle
