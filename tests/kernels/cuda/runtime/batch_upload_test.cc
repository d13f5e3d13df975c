// The description of an iteration as it lies on the device: every vector spelled out, and what
// happens when batches follow one another.
#include "kernels/cuda/runtime/batch_upload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "tests/emulation/emulated_device.h"

namespace treadle::cuda {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;

template <typename T>
std::vector<T> List(const T* first, int64_t count) {
  return {first, first + count};
}

// Three sequences over seven rows, of which row 2 and row 6 are nobody's.
struct Iteration {
  std::vector<int32_t> token_ids = {/*seq0*/ 11, -4,          /*none*/ -1, /*seq1*/ 21,
                                    22,          /*seq2*/ 31, -1};
  std::vector<int32_t> positions = {15, 16, -1, 0, 1, 40, -1};
  std::vector<int32_t> pages0 = {7, 3, 99};  // the last is not needed yet
  std::vector<int32_t> pages1 = {5};
  std::vector<int32_t> pages2 = {9, 8, 6};
  std::vector<SequenceSpan> sequences = {
      {0, 2, 15, pages0.data()}, {3, 2, 0, pages1.data()}, {5, 1, 40, pages2.data()}};
  std::vector<int32_t> output_rows = {1, 4, 5};
  SamplingParameters plain = {.temperature = 0.5f, .top_k = 4, .seed = uint64_t{1} << 40};
  SamplingParameters biased = {.repetition_penalty = 1.25f, .logit_bias = {{3, 0.5f}, {8, -2.0f}}};
  std::vector<TokenCount> counts = {{3, 1, 0}, {4, 0, 2}, {5, 1, 1}};
  std::vector<int32_t> suppressed = {2};
  std::vector<uint32_t> mask = {0xf0f0f0f0u, 0x5u};
  std::vector<SampleRow> samples = {
      {.parameters = &plain, .mask = mask.data(), .candidate = 2, .position = 17},
      {.top_logprobs = 5, .target = 9},
      {.parameters = &biased, .counts = counts, .suppressed = suppressed, .position = 41}};

  BatchInput batch(int64_t max_context = 0) const {
    return {.token_ids = token_ids,
            .positions = positions,
            .sequences = sequences,
            .output_rows = output_rows,
            .samples = samples,
            .max_context = max_context};
  }
};

// Packed where it is then read.
struct Packed {
  Packed(const BatchInput& batch, const PackOptions& options, BatchCapacity capacity = {})
      : layout(Max(CapacityFor(batch, options), capacity)),
        memory((layout.bytes + 63) / 64 * 64, std::byte{0xee}),
        packed(PackBatch(batch, options, layout, memory.data(), memory.data())) {}

  BatchLayout layout;
  std::vector<std::byte> memory;
  PackedBatch packed;
};

TEST(PackBatch, EveryVector) {
  const Iteration iteration;
  const Packed p(iteration.batch(), {.page_size = 16, .mask_tokens = 40});
  const DeviceBatch& batch = p.packed.batch;
  EXPECT_EQ(batch.rows, 7);
  EXPECT_EQ(batch.num_sequences, 3);
  EXPECT_EQ(batch.max_context, 41);
  EXPECT_EQ(batch.max_sequence_rows, 2);
  EXPECT_EQ(batch.num_output_rows, 3);
  EXPECT_THAT(List(batch.token_ids, 7), ElementsAre(11, -4, -1, 21, 22, 31, -1));
  EXPECT_THAT(List(p.packed.positions, 7), ElementsAre(15, 16, -1, 0, 1, 40, -1));
  EXPECT_THAT(List(batch.row_sequence, 7), ElementsAre(/*seq0*/ 0, 0, -1, /*seq1*/ 1, 1,
                                                       /*seq2*/ 2, -1));
  EXPECT_THAT(List(batch.row_position, 7), ElementsAre(15, 16, 0, 0, 1, 40, 0));
  EXPECT_THAT(List(batch.output_rows, 3), ElementsAre(1, 4, 5));
  const auto pages = [&](int s, int64_t count) {
    return List(batch.pages + batch.sequences[s].first_page, count);
  };
  EXPECT_THAT(pages(0, 2), ElementsAre(7, 3));
  EXPECT_THAT(pages(1, 1), ElementsAre(5));
  EXPECT_THAT(pages(2, 3), ElementsAre(9, 8, 6));
  for (int s = 0; s < 3; ++s) {
    EXPECT_EQ(batch.sequences[s].first_row, iteration.sequences[s].first_row);
    EXPECT_EQ(batch.sequences[s].num_rows, iteration.sequences[s].num_rows);
    EXPECT_EQ(batch.sequences[s].first_position, iteration.sequences[s].first_position);
  }
}

TEST(PackBatch, LayersWithAWindowHaveTheirOwnPages) {
  const Iteration iteration;
  const std::vector<int32_t> ring = {4, 2, 4};
  std::vector<SequenceSpan> spans = iteration.sequences;
  for (SequenceSpan& span : spans) span.pages = ring.data();
  BatchInput input = iteration.batch();
  input.window_sequences = spans;
  const Packed p(input, {.page_size = 16});
  const DeviceBatch& batch = p.packed.batch;
  EXPECT_THAT(List(batch.pages + batch.sequences[2].first_page, 3), ElementsAre(9, 8, 6));
  const DeviceSequence& last = batch.window_sequences[2];
  EXPECT_THAT(List(batch.pages + last.first_page, 3), ElementsAre(4, 2, 4));
  EXPECT_EQ(last.first_row, 5);
  EXPECT_EQ(last.num_rows, 1);
  EXPECT_EQ(last.first_position, 40);
}

TEST(PackBatch, SampleRows) {
  const Iteration iteration;
  const Packed p(iteration.batch(), {.page_size = 16, .mask_tokens = 40});
  const DeviceBatch& batch = p.packed.batch;
  const DeviceSampleRow& first = batch.samples[0];
  EXPECT_EQ(first.sample, 1);
  EXPECT_EQ(first.temperature, 0.5f);
  EXPECT_EQ(first.top_k, 4);
  EXPECT_EQ(first.seed, uint64_t{1} << 40);
  EXPECT_EQ(first.candidate, 2u);
  EXPECT_EQ(first.position, 17);
  EXPECT_EQ(first.num_counts + first.num_suppressed + first.num_biases, 0);
  ASSERT_GE(first.first_mask_word, 0);
  EXPECT_THAT(List(batch.mask_words + first.first_mask_word, 2), ElementsAre(0xf0f0f0f0u, 0x5u));

  const DeviceSampleRow& second = batch.samples[1];
  EXPECT_EQ(second.sample, 0);
  EXPECT_EQ(second.top_logprobs, 5);
  EXPECT_EQ(second.target, 9);
  EXPECT_EQ(second.first_mask_word, -1);

  const DeviceSampleRow& third = batch.samples[2];
  EXPECT_EQ(third.repetition_penalty, 1.25f);
  ASSERT_EQ(third.num_counts, 3);
  for (int i = 0; i < 3; ++i) {
    const TokenCount& count = batch.counts[third.first_count + i];
    EXPECT_EQ(count.token, iteration.counts[i].token);
    EXPECT_EQ(count.in_prompt, iteration.counts[i].in_prompt);
    EXPECT_EQ(count.in_output, iteration.counts[i].in_output);
  }
  ASSERT_EQ(third.num_biases, 2);
  EXPECT_EQ(batch.biases[third.first_bias].token, 3);
  EXPECT_EQ(batch.biases[third.first_bias + 1].bias, -2.0f);
  ASSERT_EQ(third.num_suppressed, 1);
  EXPECT_EQ(batch.suppressed[third.first_suppressed], 2);
}

// The copy ends with the last list, however large the buffer.
TEST(PackBatch, OnlyWhatIsUsedIsCopied) {
  const Iteration iteration;
  const PackOptions options = {.page_size = 16, .mask_tokens = 40};
  const Packed p(iteration.batch(), options, {.tail_bytes = 1 << 20});
  EXPECT_LT(p.packed.bytes, p.layout.tail + 4096);
  EXPECT_TRUE(std::all_of(p.memory.begin() + static_cast<int64_t>(p.packed.bytes), p.memory.end(),
                          [](std::byte b) { return b == std::byte{0xee}; }));
}

TEST(PackBatch, BoundsOfAGraph) {
  Iteration iteration;
  // With more than one row in a sequence the sequences are counted exactly.
  EXPECT_EQ(Packed(iteration.batch(256), {.page_size = 16}).packed.batch.num_sequences, 3);
  iteration.sequences = {{0, 1, 15, iteration.pages0.data()}, {3, 1, 3, iteration.pages1.data()}};
  const Packed p(iteration.batch(256), {.page_size = 16});
  const DeviceBatch& batch = p.packed.batch;
  EXPECT_EQ(batch.max_context, 256);
  EXPECT_EQ(batch.max_sequence_rows, 1);
  ASSERT_EQ(batch.num_sequences, 7);
  EXPECT_EQ(batch.sequences[1].num_rows, 1);
  for (int s = 2; s < 7; ++s) EXPECT_EQ(batch.sequences[s].num_rows, 0);
  // A context that is longer after all counts.
  EXPECT_EQ(Packed(iteration.batch(8), {}).packed.batch.max_context, 16);
}

TEST(PackBatch, Emptiness) {
  const Packed nothing({}, {});
  EXPECT_EQ(nothing.packed.batch.rows, 0);
  EXPECT_EQ(nothing.packed.bytes, 0u);
  const Packed rows({}, {.rows = 3});
  EXPECT_THAT(List(rows.packed.batch.row_sequence, 3), Each(-1));
  // Without a page size or a mask's length there is nothing to copy of them.
  const Iteration iteration;
  const Packed p(iteration.batch(), {});
  EXPECT_EQ(p.packed.batch.samples[0].first_mask_word, -1);
}

class BatchUploadTest : public testing::Test {
 protected:
  // Copies happen as late as they may.
  BatchUploadTest() {
    ScopedEmulation emulation({.deferred = true});
    device_ = Device::Open(0).value();
    upload_ = std::make_unique<BatchUpload>(*device_, 2);
  }
  std::vector<int32_t> TokenIds() {
    std::vector<int32_t> ids(upload_->batch().rows);
    if (ids.empty()) return ids;
    device_->CopyToHost(ids.data(), upload_->batch().token_ids, ids.size() * sizeof(int32_t));
    return ids;
  }
  void Upload(const std::vector<int32_t>& ids) {
    EXPECT_EQ(upload_->Upload({.token_ids = ids}, {}), absl::OkStatus());
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<BatchUpload> upload_;
};

TEST_F(BatchUploadTest, AddressesStayUntilItGrows) {
  Upload({});
  EXPECT_THAT(TokenIds(), IsEmpty());
  EXPECT_EQ(upload_->Reserve({.rows = 8}), absl::OkStatus());
  const int64_t generation = upload_->generation();
  Upload({1, 2, 3});
  const int32_t* const at = upload_->batch().token_ids;
  EXPECT_THAT(TokenIds(), ElementsAre(1, 2, 3));
  Upload({4, 5});
  EXPECT_EQ(upload_->batch().token_ids, at);
  EXPECT_THAT(TokenIds(), ElementsAre(4, 5));
  EXPECT_EQ(upload_->generation(), generation);
  Upload(std::vector<int32_t>(100, 6));
  EXPECT_NE(upload_->generation(), generation);
  EXPECT_THAT(TokenIds(), Each(6));
}

// A page-locked buffer is not written again before its copy is done: were it, the first copy, which
// the device has put off, would bring the third batch.
TEST_F(BatchUploadTest, CopiesOnTheirWayKeepTheirContents) {
  EXPECT_EQ(upload_->Reserve({.rows = 4}), absl::OkStatus());
  auto seen = device_->AllocateHost(4 * sizeof(int32_t) * 4).value();
  auto* const lists = reinterpret_cast<int32_t*>(seen.data());
  for (int32_t i = 0; i < 4; ++i) {
    Upload({i, i, i, i});
    device_->CopyToHostAsync(lists + 4 * i, upload_->batch().token_ids, 4 * sizeof(int32_t));
  }
  EXPECT_EQ(device_->Synchronize(), absl::OkStatus());
  EXPECT_THAT(List(lists, 16), ElementsAre(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
}

TEST_F(BatchUploadTest, NoMemoryIsAnError) {
  ScopedEmulation emulation({.memory_bytes = 1 << 20});
  device_ = Device::Open(1).value();
  BatchUpload upload(*device_, 2);
  EXPECT_EQ(upload.Reserve({.rows = 1 << 20}).code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace treadle::cuda
