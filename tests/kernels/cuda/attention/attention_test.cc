// Attention over the paged cache on the emulated device: against a two-pass softmax in double
// precision, against itself in other company (N1, N2), and its index maps alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/attention/attention_map.h"
#include "kernels/cuda/ops.h"
#include "tests/emulation/emulated_device.h"
#include "tests/kernels/cuda/attention/kv_batch.h"

namespace treadle::cuda {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr float kLog2E = 1.44269504f;

std::unique_ptr<Device> OpenDevice() { return Device::Open(0).value(); }

// -- index maps -----------------------------------------------------------------------------------

TEST(AttentionMap, SplitsAreFixedAndFew) {
  int32_t before = SplitLength(0);
  EXPECT_EQ(before, kMinSplitPositions);
  for (int32_t p = 0; p < 100'000; ++p) {
    const int32_t length = SplitLength(p);
    ASSERT_EQ(length % kBlockPositions, 0) << p;
    ASSERT_EQ(length & (length - 1), 0) << p;
    ASSERT_GE(length, before) << p;
    ASSERT_LE(SplitsOf(p), kMaxSplits) << p;
    ASSERT_TRUE(length == kMinSplitPositions || p / (length / 2) >= kMaxSplits) << p;
    ASSERT_LE(SplitsOf(p), MaxSplitsBelow(p + 1)) << p;
    before = length;
  }
  EXPECT_LE(SplitsOf(2'000'000'000), kMaxSplits);
}

TEST(AttentionMap, EveryRowIsInOneTile) {
  Random random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const auto tile_rows = static_cast<int32_t>(1 + random.Below(64));
    std::vector<DeviceSequence> sequences;
    int32_t row = 0;
    const int64_t count = 1 + random.Below(40);
    for (int64_t s = 0; s < count; ++s) {
      row += random.Below(3) == 0 ? static_cast<int32_t>(random.Below(70)) : 0;  // rows of nobody
      const auto rows = static_cast<int32_t>(random.Below(2) == 0 ? 1 : 1 + random.Below(200));
      sequences.push_back({row, rows, static_cast<int32_t>(random.Below(100)), 7});
      row += rows;
    }
    sequences.resize(sequences.size() + static_cast<size_t>(random.Below(4)));  // padding
    const auto n = static_cast<int32_t>(sequences.size());
    const int32_t rows = row + static_cast<int32_t>(random.Below(9));
    std::vector<int> seen(static_cast<size_t>(rows), 0);
    for (int32_t number = 0; number < TileBound(rows, n, tile_rows); ++number) {
      const AttentionTile tile = FindTile(sequences.data(), n, tile_rows, number);
      ASSERT_LE(tile.rows, tile_rows);
      if (tile.rows == 0) continue;
      const DeviceSequence& s = sequences[static_cast<size_t>(tile.sequence)];
      ASSERT_EQ(tile.first_position - s.first_position, tile.first_row - s.first_row);
      ASSERT_GE(tile.first_row, s.first_row);
      ASSERT_LE(tile.first_row + tile.rows, s.first_row + s.num_rows);
      ASSERT_EQ(tile.decoding, s.num_rows == 1);
      for (int32_t i = 0; i < tile.rows; ++i) ++seen[static_cast<size_t>(tile.first_row + i)];
    }
    std::vector<int> expected(seen.size(), 0);
    for (const DeviceSequence& s : sequences) {
      std::fill_n(expected.begin() + s.first_row, s.num_rows, 1);
    }
    ASSERT_EQ(seen, expected) << "trial " << trial;
  }
}

// -- attention ------------------------------------------------------------------------------------

int32_t WindowOf(const KvShape& shape) {
  return shape.window > 0 ? static_cast<int32_t>(shape.window)
                          : std::numeric_limits<int32_t>::max();
}

struct AttendOptions {
  Slack slack = {};
  int64_t scratch_bytes = -1;  // -1: as for this batch
  bool deterministic = false;
};

class Attend {
 public:
  Attend(Device& device, const KvShape& shape, std::vector<RowSpan> spans, uint64_t seed = 1)
      : device_(device),
        kv_(device, shape, std::move(spans), seed, /*fill_rows=*/true),
        q_(device, kv_.rows(), shape.heads * shape.head_dim, shape.gap),
        scale_(1 / std::sqrt(static_cast<float>(shape.head_dim))) {
    for (int64_t row = 0; row < kv_.rows(); ++row) {
      for (int64_t i = 0; i < q_.cols(); ++i) q_.Row(row)[i] = kv_.random().Normal();
    }
    q_.Upload();
  }

  // Rows [begin, begin + count) as one batch, without the gaps between rows; what is around them
  // must be left alone.
  std::vector<float> Rows(int32_t begin, int32_t count, const AttendOptions& options = {}) {
    DeviceRows out(device_, count + options.slack.rows, q_.cols(), kv_.shape().gap);
    out.Upload();
    DeviceRows q(device_, count + options.slack.rows, q_.cols(), kv_.shape().gap);
    for (int32_t i = 0; i < count; ++i) {
      std::copy_n(q_.Row(begin + i), q_.cols(), q.Row(i));
    }
    q.Upload();
    const DeviceBatch batch = kv_.Upload(begin, count, options.slack);
    const size_t bytes = options.scratch_bytes >= 0
                             ? static_cast<size_t>(options.scratch_bytes)
                             : AttentionScratchBytes(batch.rows, batch.max_context,
                                                     kv_.shape().heads, kv_.shape().head_dim);
    const std::vector<std::byte> dirty(bytes, std::byte{0xff});
    Buffer scratch = device_.Allocate(bytes + 64).value();
    device_.CopyToDevice(scratch.data(), dirty.data(), bytes);
    const KvView view = {
        .layout = kv_.layout(), .pages = kv_.pages(), .window = kv_.shape().window};
    Attention(device_, q.view(), view, batch, scale_, options.deterministic,
              std::span(scratch.data(), bytes), out.view());
    EXPECT_TRUE(device_.Synchronize().ok()) << device_.status();
    std::vector<std::byte> guard(64);
    device_.CopyToHost(guard.data(), scratch.data() + bytes, guard.size());
    EXPECT_THAT(guard, Each(std::byte{0})) << "beyond " << bytes << " bytes of scratch";
    return Inside(out, count);
  }
  std::vector<float> All(const AttendOptions& options = {}) {
    return Rows(0, static_cast<int32_t>(kv_.rows()), options);
  }

  // Compares with the definition, in double precision.
  void ExpectRight(const std::vector<float>& out) const {
    for (size_t s = 0; s < kv_.spans().size(); ++s) {
      const RowSpan& span = kv_.spans()[s];
      for (int32_t i = 0; i < span.rows; ++i) {
        const int32_t row = kv_.first_row(s) + i;
        for (int64_t head = 0; head < kv_.shape().heads; ++head) {
          const float* at =
              &out[static_cast<size_t>(row * q_.cols() + head * kv_.shape().head_dim)];
          if (span.live) {
            ExpectHead(s, row, span.position + i, head, at);
          } else {
            ASSERT_THAT(std::vector<float>(at, at + kv_.shape().head_dim), Each(::testing::IsNan()))
                << "row " << row << " belongs to nobody";
          }
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
  KvBatch& kv() { return kv_; }

 private:
  std::vector<float> Inside(const DeviceRows& out, int32_t count) const {
    const std::vector<float> now = out.Download();
    std::vector<float> inside;
    for (size_t i = 0; i < now.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) / out.stride() - 1;
      const int64_t col = static_cast<int64_t>(i) % out.stride();
      if (row >= 0 && row < count && col < out.cols()) {
        inside.push_back(now[i]);
      } else {
        EXPECT_TRUE(std::isnan(now[i])) << "row " << row << " column " << col << " was written";
      }
    }
    return inside;
  }

  // q is rounded to the cache's type after scaling to binary logarithms, weights are rounded to it;
  // scores and sums are of f32. A weight's rounding error is uniform within +- unit of it, so that
  // sums of them stay within six standard deviations.
  void ExpectHead(size_t s, int32_t row, int32_t position, int64_t head, const float* out) const {
    const KvShape& shape = kv_.shape();
    const int64_t kv_head = head / (shape.heads / shape.kv_heads);
    const double unit = shape.type == DType::kF16    ? 0x1p-11
                        : shape.type == DType::kBF16 ? 0x1p-8
                                                     : 0;
    const double subnormal = shape.type == DType::kF16 ? 0x1p-25 : 0;
    const int32_t first = FirstSeen(position, WindowOf(shape));
    std::vector<double> weight(static_cast<size_t>(position) + 1);
    double magnitude = 0;
    for (int32_t p = first; p <= position; ++p) {
      double size = 0;
      for (int64_t i = 0; i < shape.head_dim; ++i) {
        const float q = q_.Row(row)[head * shape.head_dim + i] * (scale_ * kLog2E);
        const double product = double{Rounded(q, shape.type)} * kv_.Key(s, p, kv_head, i);
        weight[static_cast<size_t>(p)] += product;
        size += std::fabs(product);
      }
      magnitude = std::max(magnitude, size);
    }
    const std::span<double> seen = std::span(weight).subspan(static_cast<size_t>(first));
    const double best = *std::ranges::max_element(seen);
    double total = 0, squares = 0;
    for (double& w : seen) {
      w = std::exp2(w - best);
      total += w;
      squares += w * w;
    }
    const double positions = position + 1;
    const double score = 0x1p-23 * (8 + std::sqrt(static_cast<double>(shape.head_dim))) * magnitude;
    for (int64_t i = 0; i < shape.head_dim; ++i) {
      double sum = 0, size = 0, spread = 0;
      for (int32_t p = first; p <= position; ++p) {
        const double part = weight[static_cast<size_t>(p)] * kv_.Value(s, p, kv_head, i);
        sum += part;
        size += std::fabs(part);
        spread += part * part;
      }
      const double expected = sum / total;
      const double rounding = 6 * unit / std::sqrt(3.0) *
                              (std::sqrt(spread) + std::fabs(expected) * std::sqrt(squares)) /
                              total;
      const double tolerance =
          rounding + subnormal * positions * 8 / total +
          (2 * score + 0x1p-24 * (32 + 2 * std::sqrt(positions))) * size / total;
      ASSERT_NEAR(out[i], expected, tolerance)
          << "row " << row << " position " << position << " head " << head << " feature " << i;
    }
  }

  Device& device_;
  KvBatch kv_;
  DeviceRows q_;
  const float scale_;
};

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
constexpr KvShape kWide = {
    .heads = 4, .kv_heads = 1, .head_dim = 128, .type = DType::kBF16, .page_size = 32};
constexpr KvShape kOdd = {
    .heads = 8, .kv_heads = 1, .head_dim = 80, .type = DType::kBF16, .page_size = 64};
INSTANTIATE_TEST_SUITE_P(
    Attention, AttentionShapes,
    testing::Values(
        AttentionCase{{.heads = 3, .kv_heads = 1, .head_dim = 64, .page_size = 16}, false},
        AttentionCase{{.heads = 3, .kv_heads = 1, .head_dim = 64, .page_size = 16}, true},
        AttentionCase{{.heads = 3, .head_dim = 64, .page_size = 16, .window = 40}, false},
        AttentionCase{{.heads = 3, .head_dim = 64, .page_size = 16, .window = 40}, true},
        AttentionCase{{.head_dim = 256, .page_size = 32, .window = 64}, false},
        AttentionCase{{.heads = 2, .type = DType::kF32, .page_size = 32, .window = 17}, false},
        AttentionCase{{.heads = 2, .kv_heads = 2, .head_dim = 32, .page_size = 64}, false},
        AttentionCase{kWide, false},                             //
        AttentionCase{kWide, true}, AttentionCase{kOdd, false},  //
        AttentionCase{kOdd, true},
        AttentionCase{{.heads = 1, .kv_heads = 1, .head_dim = 256, .page_size = 32}, false},
        AttentionCase{{.heads = 20, .kv_heads = 1, .head_dim = 24, .page_size = 128}, false},
        AttentionCase{{.heads = 20, .kv_heads = 1, .head_dim = 96, .page_size = 128}, true},
        AttentionCase{
            {.heads = 4, .kv_heads = 2, .head_dim = 64, .type = DType::kF32, .page_size = 16},
            false},
        AttentionCase{{.heads = 3,
                       .kv_heads = 3,
                       .head_dim = 5,
                       .type = DType::kBF16,
                       .page_size = 32,
                       .gap = 3},
                      false}),
    CaseName);

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

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
