// Attention over the paged cache on the emulated device: against a two-pass softmax in double
// precision, and against itself in other company (N1, N2).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/emulation/emulated_device.h"
#include "tests/kernels/cuda/attention/attend.h"

namespace treadle::cuda {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

struct NamedSpans {
  std::string name;
  std::vector<RowSpan> spans;
};
const std::vector<NamedSpans>& Batches() {
  static const auto& batches = *new std::vector<NamedSpans>{
      {"first", {{1, 0}}},
      {"decode", {{1, 0}, {1, 15}, {1, 16}, {1, 63}, {1, 64}, {1, 255}, {1, 256}, {1, 300}}},
      {"prompts", {{17, 0}, {70, 0}, {2, 0}}},
      {"chunks", {{33, 47}, {5, 254}, {64, 64}}},
      {"mixed", {{1, 200}, {30, 0}, {2, 0, false}, {1, 64}, {20, 50}, {1, 0, false}, {1, 0}}},
  };
  return batches;
}

struct AttentionCase {
  KvShape shape;
  bool warpgroups = false;  // the device has them
};
class AttentionShapes : public testing::TestWithParam<AttentionCase> {
 protected:
  const KvShape& shape() const { return GetParam().shape; }

 private:
  const ScopedEmulation emulation_{{.warpgroup_matrices = GetParam().warpgroups}};
};

TEST_P(AttentionShapes, IsTheDefinition) {
  const auto device = OpenDevice();
  for (const NamedSpans& batch : Batches()) {
    SCOPED_TRACE(batch.name);
    Attend attend(*device, shape(), batch.spans);
    attend.ExpectRight(attend.All());
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionShapes, CompanyDoesNotMatter) {
  const auto device = OpenDevice();
  for (const NamedSpans& batch : Batches()) {
    SCOPED_TRACE(batch.name);
    Attend attend(*device, shape(), batch.spans);
    const auto rows = static_cast<int32_t>(attend.kv().rows());
    const std::vector<float> all = attend.All();
    const size_t cols = all.size() / static_cast<size_t>(rows);
    for (const int32_t step : {1, 7, 24}) {
      for (int32_t begin = 0; begin < rows; begin += step == 1 ? 5 : step) {
        const int32_t count = std::min(step, rows - begin);
        const std::vector<float> part = attend.Rows(begin, count);
        ASSERT_EQ(std::memcmp(part.data(), &all[static_cast<size_t>(begin) * cols],
                              part.size() * sizeof(float)),
                  0)
            << "rows " << begin << " .. " << begin + count - 1;
      }
    }
  }
}

std::string CaseName(const testing::TestParamInfo<AttentionCase>& info) {
  const KvShape& s = info.param.shape;
  return Str(s.heads, "x", s.kv_heads, "x", s.head_dim, "_", Name(s.type), "_page", s.page_size,
             s.window > 0 ? Str("_window", s.window) : "",
             info.param.warpgroups ? "_warpgroups" : "");
}
constexpr AttentionCase kCases[] = {
    {{.heads = 3}},
    {{.heads = 3}, true},
    {{.heads = 3, .window = 40}},
    {{.heads = 3, .window = 40}, true},
    {{.head_dim = 256, .page_size = 32, .window = 64}},
    {{.heads = 2, .type = DType::kF32, .page_size = 32, .window = 17}},
    {{.heads = 2, .kv_heads = 2, .head_dim = 32, .page_size = 64}},
    {{.heads = 4, .head_dim = 128, .type = DType::kBF16, .page_size = 32}},
    {{.heads = 4, .head_dim = 128, .type = DType::kBF16, .page_size = 32}, true},
    {{.heads = 8, .head_dim = 80, .type = DType::kBF16, .page_size = 64}},
    {{.heads = 8, .head_dim = 80, .type = DType::kBF16, .page_size = 64}, true},
    {{.head_dim = 256, .page_size = 32}},
    {{.heads = 20, .head_dim = 24, .page_size = 128}},
    {{.heads = 20, .head_dim = 96, .page_size = 128}, true},
    {{.heads = 4, .kv_heads = 2, .type = DType::kF32}},
    {{.heads = 3, .kv_heads = 3, .head_dim = 5, .type = DType::kBF16, .page_size = 32, .gap = 3}},
};
INSTANTIATE_TEST_SUITE_P(Attention, AttentionShapes, testing::ValuesIn(kCases), CaseName);

// Contexts around the ends of splits, and where the length of splits changes: at 4096 positions.
const std::vector<RowSpan> kLongSpans = {{40, 4070}, {1, 5000}, {1, 4095}, {3, 510},
                                         {1, 4096},  {1, 300},  {1, 10}};
// A window that begins in a split before a row's own, or in its own.
constexpr KvShape kLongShapes[] = {
    {.heads = 2, .kv_heads = 1, .head_dim = 32, .page_size = 64},
    {.heads = 2, .kv_heads = 1, .head_dim = 32, .page_size = 64, .window = 500},
    {.heads = 2, .kv_heads = 1, .head_dim = 32, .page_size = 64, .window = 50}};
class AttentionOverSplits : public testing::TestWithParam<KvShape> {};
INSTANTIATE_TEST_SUITE_P(Windows, AttentionOverSplits, testing::ValuesIn(kLongShapes),
                         [](const auto& info) { return Str(info.param.window); });

TEST_P(AttentionOverSplits, IsTheDefinition) {
  const auto device = OpenDevice();
  Attend attend(*device, GetParam(), kLongSpans);
  attend.ExpectRight(attend.All());
}

TEST_P(AttentionOverSplits, SideBySideOrInARowIsTheSame) {
  const auto device = OpenDevice();
  Attend attend(*device, GetParam(), kLongSpans);
  const std::vector<float> all = attend.All();
  const int64_t all_bytes = static_cast<int64_t>(AttentionScratchBytes(7, 5001, 2, 32));
  for (const int64_t bytes : {int64_t{0}, all_bytes / 7 - 1, all_bytes / 7 * 3}) {
    EXPECT_TRUE(SameBits(attend.All({.scratch_bytes = bytes}), all)) << bytes;
  }
  for (const int32_t row : {0, 25, 26, 39, 40, 41, 43, 45, 46}) {  // 25: position 4095
    const std::vector<float> alone = attend.Rows(row, 1);
    EXPECT_TRUE(SameBits(alone, {all.begin() + row * 64, all.begin() + (row + 1) * 64}))
        << "row " << row;
  }
}

TEST(Attention, UpperBoundsDoNotMatter) {
  const auto device = OpenDevice();
  const KvShape shape = {.heads = 6, .kv_heads = 2, .head_dim = 64, .type = DType::kBF16};
  const std::vector<RowSpan> decode = {{1, 700}, {1, 0}, {1, 255}, {1, 256}};
  const std::vector<RowSpan> mixed = {{1, 700}, {100, 200}, {1, 64}};
  for (const auto& spans : {decode, mixed}) {
    Attend attend(*device, shape, spans);
    const std::vector<float> all = attend.All();
    for (const Slack& slack :
         {Slack{.rows = 4}, Slack{.sequences = 3}, Slack{.context = 9000},
          Slack{.rows = 5, .sequences = 2, .context = 1, .sequence_rows = 99}}) {
      EXPECT_TRUE(SameBits(attend.All({.slack = slack}), all))
          << slack.rows << " " << slack.sequences << " " << slack.context << " "
          << slack.sequence_rows;
    }
  }
}

// A barrier that is missing shows in some order.
TEST(Attention, OrderOfThreadsDoesNotMatter) {
  const KvShape shape = {.heads = 4, .kv_heads = 2, .head_dim = 64, .page_size = 32};
  std::vector<float> first;
  for (const uint64_t seed : {1, 2, 3, 4}) {
    const ScopedEmulation emulation({.seed = seed});
    const auto device = OpenDevice();
    Attend attend(*device, shape, {{1, 700}, {40, 300}, {1, 64}});
    const std::vector<float> all = attend.All();
    if (seed == 1) first = all;
    EXPECT_TRUE(SameBits(all, first)) << "seed " << seed;
  }
}

// Where warpgroups round otherwise than warps, `deterministic` does without them.
TEST(Attention, DeterministicPromptsRoundAsDecodingRows) {
  const ScopedEmulation emulation({.warpgroups_round_apart = true});
  const auto device = OpenDevice();
  Attend attend(*device, {.heads = 2, .head_dim = 64}, {{40, 30}});
  for (const bool deterministic : {false, true}) {
    const std::vector<float> all = attend.All({.deterministic = deterministic});
    std::vector<float> one_by_one;
    for (int32_t row = 0; row < 40; ++row) {
      const std::vector<float> alone = attend.Rows(row, 1);
      one_by_one.insert(one_by_one.end(), alone.begin(), alone.end());
    }
    EXPECT_EQ(SameBits(all, one_by_one), deterministic);
  }
}

// -- devices with less shared memory --------------------------------------------------------------

constexpr size_t kHopperBytes = size_t{227} << 10;
constexpr size_t kAmpereBytes = size_t{163} << 10;  // A100
constexpr size_t kAdaBytes = size_t{99} << 10;      // A10, L4, L40S, RTX 4090

struct SmallCase {
  int64_t head_dim = 0;
  size_t limit = 0;         // of shared memory that a block may have
  size_t prompt_bytes = 0;  // that the kernels are launched with
  size_t decode_bytes = 0;
};
class SmallSharedMemory : public testing::TestWithParam<SmallCase> {};
constexpr size_t kGeneralBytes = 0;  // attention_general.cu's, which is under 8 KB
INSTANTIATE_TEST_SUITE_P(Devices, SmallSharedMemory,
                         testing::Values(SmallCase{64, kAdaBytes, 73'732, 39'424},
                                         SmallCase{96, kAdaBytes, 79'876, 55'808},
                                         SmallCase{128, kHopperBytes, 104'452, 72'192},
                                         SmallCase{128, kAmpereBytes, 104'452, 72'192},
                                         SmallCase{128, kAdaBytes, 72'192, 72'192},
                                         SmallCase{256, kHopperBytes, 202'756, 137'728},
                                         SmallCase{256, kAmpereBytes, 137'728, 137'728},
                                         SmallCase{256, kAdaBytes, kGeneralBytes, kGeneralBytes}),
                         [](const auto& info) {
                           return Str(info.param.head_dim, "_of_", info.param.limit);
                         });

// Decoding rows, and prompts of several splits, some seen in part.
const std::vector<RowSpan> kSmallSpans = {{1, 700}, {70, 490}, {1, 64}, {3, 1021}, {20, 0}};

std::vector<size_t> SharedBytes(const std::vector<LaunchRecord>& launches) {
  std::vector<size_t> bytes;
  for (const LaunchRecord& launch : launches) {
    if (launch.shape.shared_bytes > 0) {  // not the kernel that combines parts
      bytes.push_back(launch.shape.shared_bytes < 8192 ? kGeneralBytes : launch.shape.shared_bytes);
    }
  }
  return bytes;
}

TEST_P(SmallSharedMemory, KernelsAreChosenByTheirOwnNeeds) {
  std::vector<LaunchRecord> launches;
  const ScopedEmulation emulation({.warpgroup_matrices = false,
                                   .shared_bytes_per_block = GetParam().limit,
                                   .launches = &launches});
  const auto device = OpenDevice();
  Attend attend(*device, {.heads = 2, .head_dim = GetParam().head_dim}, {{1, 64}, {3, 10}});
  launches.clear();
  attend.All();
  EXPECT_THAT(SharedBytes(launches), ElementsAre(GetParam().prompt_bytes)) << "mixed";
  launches.clear();
  attend.Rows(0, 1);
  EXPECT_THAT(SharedBytes(launches), ElementsAre(GetParam().decode_bytes)) << "decoding";
}

TEST_P(SmallSharedMemory, BitsAreThoseOfOtherDevicesAndOfAnyCompany) {
  const KvShape shape = {.heads = 2, .head_dim = GetParam().head_dim, .type = DType::kBF16};
  const auto cols = static_cast<size_t>(shape.heads * shape.head_dim);
  std::vector<float> there;
  {
    const ScopedEmulation emulation({.warpgroup_matrices = false});
    const auto device = OpenDevice();
    there = Attend(*device, shape, kSmallSpans).All();
  }
  const ScopedEmulation emulation(
      {.warpgroup_matrices = false, .shared_bytes_per_block = GetParam().limit});
  const auto device = OpenDevice();
  Attend attend(*device, shape, kSmallSpans);
  const std::vector<float> all = attend.All();
  if (GetParam().prompt_bytes != kGeneralBytes) {
    EXPECT_TRUE(SameBits(all, there));
  }
  const auto expect_same = [&](int32_t begin, int32_t count) {
    const std::vector<float> part = attend.Rows(begin, count);
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(begin) * cols);
    EXPECT_TRUE(SameBits(part, {first, first + static_cast<std::ptrdiff_t>(part.size())}))
        << count << " rows from " << begin;
  };
  for (const int32_t row : {0, 1, 40, 70, 71, 72, 74, 94}) expect_same(row, 1);
  expect_same(5, 30);
  expect_same(60, 20);
}

// Rows enough for several tiles, in both warpgroups, over contexts of several splits.
TEST(Attention, LongPromptsOnWarpgroupsAreTheDefinition) {
  const auto device = OpenDevice();
  Attend attend(*device, {.heads = 4, .kv_heads = 2, .head_dim = 128, .type = DType::kBF16},
                {{150, 450}, {1, 600}, {90, 0}});
  const std::vector<float> all = attend.All();
  attend.ExpectRight(all);
  EXPECT_TRUE(SameBits(all, attend.All({.deterministic = true})));
}

TEST(Attention, NoRowsIsNoWork) {
  const auto device = OpenDevice();
  Attend attend(*device, {}, {{3, 0, false}});
  EXPECT_THAT(attend.All(), Each(::testing::IsNan()));
}

// A token's NaN is seen by the rows from its own on, to the window's end, and by no other: K spoils
// all of them, V one feature.
TEST_P(AttentionShapes, NanSpoilsNoEarlierRow) {
  const auto device = OpenDevice();
  const int64_t cols = shape().heads * shape().head_dim;
  const int64_t spoiled_cols = cols / shape().kv_heads;  // of the heads that read K/V head 0
  constexpr int32_t kBad = 537;
  Attend attend(*device, shape(), {{90, 500}, {1, 40}});
  const std::vector<float> before = attend.All();
  const auto expect = [&](auto spoils) {
    const std::vector<float> after = attend.All();
    for (int64_t row = 0; row < 91; ++row) {
      for (int64_t col = 0; col < cols; ++col) {
        const auto i = static_cast<size_t>(row * cols + col);
        const int64_t after_bad = row + 500 - kBad;
        if (row < 90 && after_bad >= 0 && after_bad < WindowOf(shape()) && spoils(col)) {
          ASSERT_TRUE(std::isnan(after[i])) << "row " << row << " column " << col;
        } else {
          ASSERT_EQ(after[i], before[i]) << "row " << row << " column " << col;
        }
      }
    }
  };
  attend.kv().SpoilValue(0, kBad, 0, 1);
  expect([&](int64_t col) { return col < spoiled_cols && col % shape().head_dim == 1; });
  attend.kv().SpoilKey(0, kBad, 0, 3);
  expect([&](int64_t col) { return col < spoiled_cols; });
}

}  // namespace
}  // namespace treadle::cuda
