// Rotation and the store into the cache on the emulated device, element by element.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "kernels/cuda/ops.h"
#include "tests/kernels/cuda/attention/kv_batch.h"

namespace treadle::cuda {
namespace {

struct RotaryCase {
  KvShape shape;
  int64_t half_dim = 0;
};

// Three roundings of f32 in each of the two products and their sum.
constexpr double kTurnUnit = 3 * 0x1p-24;

class Store {
 public:
  explicit Store(const RotaryCase& c)
      : case_(c),
        device_(Device::Open(0).value()),
        kv_(*device_, c.shape, {{1, 77}, {20, 0}, {2, 0, false}, {9, 60}, {1, 15}}, 3,
            /*fill_rows=*/false),
        q_(*device_, kv_.rows(), c.shape.heads * c.shape.head_dim, c.shape.gap),
        k_(*device_, kv_.rows(), c.shape.kv_heads * c.shape.head_dim, c.shape.gap),
        v_(*device_, kv_.rows(), c.shape.kv_heads * c.shape.head_dim, c.shape.gap) {
    for (DeviceRows* x : {&q_, &k_, &v_}) {
      for (int64_t row = 0; row < kv_.rows(); ++row) {
        for (int64_t i = 0; i < x->cols(); ++i) x->Row(row)[i] = Number();
      }
      x->Upload();
    }
    for (int64_t p = 0; p < kPositions; ++p) {
      for (int64_t i = 0; i < c.half_dim; ++i) {
        const double angle = static_cast<double>(p) / std::pow(1e4, static_cast<double>(i) / 20);
        cos_.push_back(static_cast<float>(std::cos(angle)));
        sin_.push_back(static_cast<float>(std::sin(angle)));
      }
    }
  }

  void Run() {
    const size_t bytes = cos_.size() * sizeof(float);
    Buffer cos = device_->Allocate(bytes + 1).value();
    Buffer sin = device_->Allocate(bytes + 1).value();
    device_->CopyToDevice(cos.data(), cos_.data(), bytes);
    device_->CopyToDevice(sin.data(), sin_.data(), bytes);
    const RotaryTable table = {reinterpret_cast<const float*>(cos.data()),
                               reinterpret_cast<const float*>(sin.data()), case_.half_dim,
                               kPositions};
    RotateAndStoreKv(*device_, q_.view(), k_.view(), v_.view(),
                     case_.half_dim > 0 ? &table : nullptr, kv_.layout(), kv_.pages(),
                     kv_.Upload());
    ASSERT_TRUE(device_->Synchronize().ok()) << device_->status();
  }

  void ExpectQueries() const {
    std::vector<float> expected = q_.initial();
    std::vector<double> tolerance(expected.size(), 0);
    for (size_t s = 0; s < kv_.spans().size(); ++s) {
      for (int32_t i = 0; kv_.spans()[s].live && i < kv_.spans()[s].rows; ++i) {
        const int64_t row = kv_.first_row(s) + i;
        for (int64_t col = 0; col < q_.cols(); ++col) {
          const Turned turned = Turn(q_.Row(row), col, kv_.spans()[s].position + i);
          const auto at = static_cast<size_t>((row + 1) * q_.stride() + col);
          expected[at] = static_cast<float>(turned.value);
          tolerance[at] = kTurnUnit * turned.size;
        }
      }
    }
    const std::vector<float> now = q_.Download();
    for (size_t i = 0; i < now.size(); ++i) {
      if (std::isnan(expected[i])) {
        ASSERT_TRUE(std::isnan(now[i])) << "guard at " << i;
      } else {
        ASSERT_NEAR(now[i], expected[i], tolerance[i]) << "element " << i;
      }
    }
  }

  // Every byte that is not a live row's slot is as it was.
  void ExpectCache() const {
    std::map<size_t, Turned> stored;
    for (size_t s = 0; s < kv_.spans().size(); ++s) {
      for (int32_t i = 0; kv_.spans()[s].live && i < kv_.spans()[s].rows; ++i) {
        const int32_t position = kv_.spans()[s].position + i;
        for (int64_t col = 0; col < k_.cols(); ++col) {
          const int64_t head = col / case_.shape.head_dim;
          const int64_t at = col % case_.shape.head_dim;
          const int64_t row = kv_.first_row(s) + i;
          stored[kv_.KeyAt(s, position, head, at)] = Turn(k_.Row(row), col, position);
          stored[kv_.ValueAt(s, position, head, at)] = {v_.Row(row)[col], 0};
        }
      }
    }
    const DType type = case_.shape.type;
    const std::vector<std::byte> now = kv_.DownloadCache();
    for (size_t at = 0; at < now.size(); at += SizeOf(type)) {
      const auto found = stored.find(at);
      if (found == stored.end()) {
        ASSERT_EQ(std::memcmp(&now[at], &kv_.initial_cache()[at], SizeOf(type)), 0)
            << "byte " << at;
        continue;
      }
      // The rounded ends of what f32 may give.
      const double slack = kTurnUnit * found->second.size;
      const float x = LoadElement(type, &now[at], 0);
      ASSERT_GE(x, Rounded(static_cast<float>(found->second.value - slack), type)) << "byte " << at;
      ASSERT_LE(x, Rounded(static_cast<float>(found->second.value + slack), type)) << "byte " << at;
    }
  }

 private:
  static constexpr int64_t kPositions = 78;
  struct Turned {
    double value = 0;
    double size = 0;  // of the two products; 0: not turned
  };

  // Some that f16 cannot hold, or holds as subnormals.
  float Number() {
    Random& random = kv_.random();
    const float scale = random.Below(50) == 0 ? 1e5f : random.Below(50) == 0 ? 1e-6f : 1.0f;
    return scale * random.Normal();
  }
  Turned Turn(const float* row, int64_t col, int32_t position) const {
    const int64_t half = case_.half_dim;
    const int64_t at = col % case_.shape.head_dim;
    if (at >= 2 * half) return {row[col], 0};
    const int64_t partner = at < half ? col + half : col - half;
    const auto angle = static_cast<size_t>(position * half + at % half);
    const double own = double{row[col]} * cos_[angle];
    const double other = double{row[partner]} * sin_[angle];
    return {at < half ? own - other : own + other, std::fabs(own) + std::fabs(other)};
  }

  const RotaryCase case_;
  std::unique_ptr<Device> device_;
  KvBatch kv_;
  DeviceRows q_, k_, v_;
  std::vector<float> cos_, sin_;
};

class RotaryCases : public testing::TestWithParam<RotaryCase> {};

TEST_P(RotaryCases, TurnsQueriesAndStoresKeysAndValues) {
  Store store(GetParam());
  store.Run();
  store.ExpectQueries();
  store.ExpectCache();
}

INSTANTIATE_TEST_SUITE_P(
    Rotary, RotaryCases,
    testing::Values(
        RotaryCase{{.heads = 9, .kv_heads = 3, .head_dim = 64}, 32},
        RotaryCase{{.heads = 4, .kv_heads = 4, .head_dim = 80, .type = DType::kBF16}, 20},
        RotaryCase{{.heads = 8, .kv_heads = 2, .head_dim = 128, .page_size = 32}, 0},
        RotaryCase{{.heads = 2, .kv_heads = 1, .head_dim = 32, .type = DType::kF32}, 16},
        RotaryCase{{.heads = 2, .kv_heads = 1, .head_dim = 24, .page_size = 64}, 6},
        RotaryCase{{.heads = 2, .kv_heads = 2, .head_dim = 64, .type = DType::kBF16, .gap = 3}, 32},
        RotaryCase{{.heads = 3, .kv_heads = 1, .head_dim = 5, .gap = 2}, 2}),
    [](const auto& info) {
      const KvShape& s = info.param.shape;
      return Str(s.heads, "x", s.kv_heads, "x", s.head_dim, "_", Name(s.type), "_page", s.page_size,
                 "_half", info.param.half_dim, "_gap", s.gap);
    });

}  // namespace
}  // namespace treadle::cuda
