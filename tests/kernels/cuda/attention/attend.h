// Runs attention over a random paged cache, and compares it with its definition: a two-pass softmax
// in double precision.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kernels/cuda/attention/attention_map.h"
#include "kernels/cuda/ops.h"
#include "tests/kernels/cuda/attention/kv_batch.h"

namespace treadle::cuda {

inline constexpr float kLog2E = 1.44269504f;

inline std::unique_ptr<Device> OpenDevice() { return Device::Open(0).value(); }

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

inline int32_t WindowOf(const KvShape& shape) {
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
    EXPECT_THAT(guard, ::testing::Each(std::byte{0})) << "beyond " << bytes << " bytes of scratch";
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
            ASSERT_THAT(std::vector<float>(at, at + kv_.shape().head_dim),
                        ::testing::Each(::testing::IsNan()))
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

}  // namespace treadle::cuda
