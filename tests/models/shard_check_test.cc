// How models are cut over ranks, and which cannot be.
#include <gmock/gmock.h>

#include "models/tensor_parallel.h"
#include "tests/models/checkpoints/scratch_checkpoint.h"
#include "tests/support/assert_ok.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

class ShardChecks : public ScratchCheckpoint {
 protected:
  std::unique_ptr<Checkpoint> OpenLlama(const TinyModelOptions& options) const {
    const auto path = WriteTinyLlamaGguf(folder_.path(), options).value();
    return Checkpoint::Open(path).value();
  }
};

TEST(PartOf, CoversEverythingInOrder) {
  for (const int64_t unit : {1, 32}) {
    for (int64_t total = unit; total < 40 * unit; total += unit == 1 ? 1 : 17) {
      for (int size = 1; size <= 5; ++size) {
        int64_t at = 0;
        for (int rank = 0; rank < size; ++rank) {
          const ShardRange part = PartOf(total, unit, {rank, size});
          EXPECT_EQ(part.begin, at);
          EXPECT_EQ(part.begin % unit, 0);
          EXPECT_TRUE(total < size * unit || part.size() > 0);
          EXPECT_TRUE(rank + 1 == size || part.end % unit == 0);
          at = part.end;
        }
        EXPECT_EQ(at, total);
      }
    }
  }
}

TEST(KvHeads, AreThoseOfTheQueryHeads) {
  for (int64_t kv_heads : {1, 2, 4, 8}) {
    for (int size : {1, 2, 4, 8}) {
      ModelConfig config;
      config.heads = 8;
      config.kv_heads = kv_heads;
      for (int rank = 0; rank < size; ++rank) {
        const ShardRange q = QueryHeads(config, {rank, size});
        const ShardRange kv = KvHeads(config, {rank, size});
        const int64_t group = config.heads / kv_heads;
        EXPECT_EQ(q.size(), 8 / size);
        EXPECT_EQ(kv.begin, q.begin / group);
        EXPECT_EQ(kv.end, (q.end - 1) / group + 1);
        EXPECT_EQ(q.size() % kv.size(), 0);
      }
    }
  }
}

TEST_F(ShardChecks, GridsThatCannotBeNameThoseThatCan) {
  struct Case {
    TinyModelOptions options;
    int size;
    const char* why;
    const char* instead;
  };
  const auto model = [](int64_t heads, int64_t kv_heads, const char* format, int64_t ffn_hidden) {
    TinyModelOptions options;
    options.heads = heads;
    options.kv_heads = kv_heads;
    options.hidden = 16 * heads;
    options.format = format;
    options.ffn_hidden = ffn_hidden;
    return options;
  };
  const Case kCases[] = {
      {model(6, 6, "f32", 128), 4, "6 attention heads cannot be divided by 4", "; 3 or 6 would"},
      {model(6, 6, "f32", 128), 12, "6 attention heads cannot be divided by 12", "; 6 would"},
      {model(6, 2, "f32", 128), 3, "2 K/V heads can neither", "; 2 or 6 would"},
      {model(4, 1, "q4_1", 128), 4, "'blk.0.attn_output.weight' in q4_1", "; 2 would"},
      {model(8, 8, "q8_0", 96), 4, "'blk.0.ffn_down.weight' in q8_0", "; 2 would"},
      {model(4, 2, "f32", 3), 4, "there are only 3 inner features", "; 2 would"},
      {model(4, 2, "f32", 3), 0, "over 0 ranks", "expected 1 or more"},
  };
  for (const Case& c : kCases) {
    const auto checkpoint = OpenLlama(c.options);
    const absl::Status status = CheckShard(*checkpoint, {}, c.size);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    const std::string message(status.message());
    EXPECT_THAT(message, HasSubstr(c.why));
    EXPECT_THAT(message, HasSubstr(c.instead));
    EXPECT_THAT(message, HasSubstr("tiny-llama.gguf"));
    // Loading says the same, before it reads anything.
    const auto backend = CreateReferenceBackend();
    LoadOptions options;
    options.max_batch_tokens = 8;
    options.shard = {0, c.size};
    EXPECT_EQ(Model::Load(*checkpoint, *backend, options).status(), status);
  }
}

// Which format a matrix is loaded in decides, not which it is stored in.
TEST_F(ShardChecks, ConversionMovesTheCuts) {
  TinyModelOptions options;
  options.hidden = 64;
  options.heads = 4;
  const auto checkpoint = OpenLlama(options);
  EXPECT_TRUE(CheckShard(*checkpoint, {}, 4).ok());
  ASSERT_OK_AND_ASSIGN(const auto plan, WeightPlan::Parse("q8_0"));
  const absl::Status status = CheckShard(*checkpoint, plan, 4);
  EXPECT_THAT(std::string(status.message()), HasSubstr("in q8_0 can be cut at multiples of 32"));
  EXPECT_TRUE(CheckShard(*checkpoint, plan, 2).ok());
}

TEST_F(ShardChecks, ARankOutsideTheGroup) {
  const auto checkpoint = OpenLlama({});
  const auto backend = CreateReferenceBackend();
  for (const int rank : {-1, 2}) {
    LoadOptions options;
    options.max_batch_tokens = 8;
    options.shard = {rank, 2};
    EXPECT_TRUE(absl::IsInvalidArgument(Model::Load(*checkpoint, *backend, options).status()));
  }
}

}  // namespace
}  // namespace treadle
