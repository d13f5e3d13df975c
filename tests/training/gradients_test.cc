// Gradients of ops against PyTorch's autograd in float64 (tests/oracles/make_training_oracles.py),
// in plain loops and on every instruction set, and equal bits whatever the threads.
//
// The tolerance is 1e-5 of the largest number of a result. Sums here have at most 140 terms, so
// that a chain's rounding stays below 140 * 2^-24 = 8.3e-6 of the sum of magnitudes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "base/status.h"
#include "kernels/cpu/ops/cpu_ops.h"
#include "kernels/formats/weight_format.h"
#include "kernels/reference/reference_backend.h"
#include "tests/support/identifier.h"
#include "tests/support/oracles.h"
#include "training/ops/cpu_gradients.h"
#include "training/ops/reference_gradients.h"
#include "training/tape.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using Values = std::vector<float>;

constexpr double kTolerance = 1e-5;
constexpr int64_t kCols = 37;

struct Device {
  const char* name;
  std::optional<CpuIsa> isa;  // unset: plain loops
  int threads = 1;
};
constexpr Device kDevices[] = {{"reference", {}},
                               {"avx2", CpuIsa::kAvx2},
                               {"avx512", CpuIsa::kAvx512},
                               {"avx512_three_threads", CpuIsa::kAvx512, 3}};

bool RunsHere(const Device& device) {
  return !device.isa || std::ranges::count(SupportedIsas(), *device.isa) > 0;
}

std::unique_ptr<Tape> MakeTape(const Device& device) {
  if (!device.isa) {
    auto backend = CreateReferenceBackend();
    auto gradients = CreateReferenceGradients(*backend);
    return std::make_unique<Tape>(std::move(backend), std::move(gradients));
  }
  auto backend =
      std::make_unique<CpuOps>(device.threads, false, 0, *device.isa, ComputeMode::kExact);
  auto gradients = CreateCpuGradients(*backend);
  return std::make_unique<Tape>(std::move(backend), std::move(gradients));
}

Tensor Rows(Values& values, int64_t cols) {
  return DenseTensor(values.data(), DType::kF32, std::ssize(values) / cols, cols);
}

void ExpectClose(const Values& ours, const Json& oracle, const char* what) {
  const Values theirs = Floats(oracle);
  ASSERT_EQ(ours.size(), theirs.size()) << what;
  double error = 0, largest = 0;
  for (size_t i = 0; i < ours.size(); ++i) {
    error = std::fmax(error, std::fabs(double{ours[i]} - theirs[i]));
    largest = std::fmax(largest, std::fabs(theirs[i]));
    ASSERT_FALSE(std::isnan(ours[i])) << what << " at " << i;
  }
  EXPECT_LE(error, kTolerance * largest) << what;
}

class GradientTest : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (!RunsHere(GetParam())) GTEST_SKIP() << "this processor cannot run it";
    tape_ = MakeTape(GetParam());
  }
  GradientOps& ops() { return tape_->gradients(); }
  std::unique_ptr<PackedMatrix> Pack(const Values& values, int64_t cols) {
    MatrixSource source;
    source.format = FindWeightFormat("f32");
    source.data = reinterpret_cast<const std::byte*>(values.data());
    source.n = std::ssize(values) / cols;
    source.k = cols;
    return tape_->Pack(source).value();
  }

  const Json oracles_ = ReadOracles("training_oracles.json");
  std::unique_ptr<Tape> tape_;
};

INSTANTIATE_TEST_SUITE_P(Devices, GradientTest, testing::ValuesIn(kDevices),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(GradientTest, RmsNorm) {
  const Json& o = oracles_["rms_norm"];
  Values x = Floats(o["x"]), weight = Floats(o["weight"]), dy = Floats(o["given"]), dx(x.size());
  ops().RmsNormGradient(Rows(x, kCols), weight.data(), 1e-5f, Rows(dy, kCols), Rows(dx, kCols));
  ExpectClose(dx, o["dx"], "dx");
}

TEST_P(GradientTest, ProductWithAnUpdate) {
  const Json& o = oracles_["product"];
  constexpr int64_t kOut = 43, kRank = 5;
  constexpr float kScale = 1.5f;
  Values x = Floats(o["x"]), a = Floats(o["a"]), b = Floats(o["b"]), dy = Floats(o["given"]);
  Values a_transposed(static_cast<size_t>(LowRankElements(kCols, kRank)));
  for (int64_t r = 0; r < kRank; ++r) {
    for (int64_t k = 0; k < kCols; ++k) {
      a_transposed[LowRankAt(kCols, k, r)] = a[r * kCols + k];
    }
  }
  Values scaled = b;
  for (float& value : scaled) value *= kScale;
  Values dx(x.size()), da(a.size()), db(b.size()), db_rows(b.size());
  const LowRankUpdate update = {.n = kOut,
                                .k = kCols,
                                .scale = kScale,
                                .factors = {.a = a_transposed.data(), .rank = kRank},
                                .a = a.data(),
                                .b = scaled.data(),
                                .a_gradient = da.data(),
                                .b_gradient = db.data()};
  const Values weight = Floats(o["weight"]);
  const auto packed = Pack(weight, kCols);
  ops().ProductGradient(*packed, Rows(dy, kOut), Rows(dx, kCols));
  ops().LowRankGradient(update, Rows(x, kCols), Rows(dy, kOut), Rows(dx, kCols));
  for (int64_t r = 0; r < kRank; ++r) {
    for (int64_t n = 0; n < kOut; ++n) db_rows[n * kRank + r] = db[r * kOut + n];
  }
  ExpectClose(dx, o["dx"], "dx");
  ExpectClose(da, o["da"], "da");
  ExpectClose(db_rows, o["db"], "db");
}

TEST_P(GradientTest, GatedActivations) {
  for (const bool gelu : {false, true}) {
    const Json& o = oracles_[gelu ? "geglu" : "swiglu"];
    Values gate = Floats(o["gate"]), up = Floats(o["up"]), dout = Floats(o["given"]);
    Values dgate(gate.size()), dup(up.size());
    ops().GatedGradient(gelu, Rows(gate, kCols), Rows(up, kCols), Rows(dout, kCols),
                        Rows(dgate, kCols), Rows(dup, kCols));
    ExpectClose(dgate, o["dgate"], "dgate");
    ExpectClose(dup, o["dup"], "dup");
  }
}

TEST_P(GradientTest, CrossEntropy) {
  const Json& o = oracles_["cross_entropy"];
  Values x = Floats(o["x"]);
  const auto targets = o["targets"].get<std::vector<int32_t>>();
  const double loss = ops().CrossEntropy(Rows(x, 131), targets, 1);
  EXPECT_NEAR(loss, o["loss"].get<double>(), kTolerance * loss);
  ExpectClose(x, o["dx"], "dx");
}

// Rotation and attention run forward on the backend, and back over the tape.
TEST_P(GradientTest, AttentionBehindARotation) {
  constexpr int64_t kDim = 6, kHeads = 4, kKvHeads = 2, kPositions = 70;
  for (const int64_t window : {0, 5}) {
    const Json& o = oracles_[window > 0 ? "window" : "attention"];
    Values cos, sin;
    for (int64_t position = 0; position < kPositions; ++position) {
      for (int64_t i = 0; i < kDim / 2; ++i) {
        const double angle = static_cast<double>(position) * double{std::pow(0.3f, float(i))};
        cos.push_back(static_cast<float>(std::cos(angle)));
        sin.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    const RotaryTable rotary = {cos.data(), sin.data(), kDim / 2, kPositions};
    KvView kv = {.layout = {.kv_heads = kKvHeads,
                            .head_dim = kDim,
                            .page_size = 16,
                            .num_pages = 6,
                            .dtype = DType::kF32},
                 .pages = nullptr,
                 .sequences = {},
                 .window = window};
    const int32_t pages[] = {3, 1, 0, 5, 2}, more_pages[] = {4};
    const SequenceSpan sequences[] = {{0, 70, 0, pages}, {70, 9, 0, more_pages}};
    kv.sequences = sequences;
    const auto bytes = static_cast<size_t>(kv.layout.num_pages * kv.layout.PageBytes());
    const Buffer cache = *tape_->Allocate(bytes);
    kv.pages = cache.data();
    std::vector<Buffer> buffers;
    const auto fill = [&](const Json& values, int64_t cols, bool gradient) {
      Values from = Floats(values);
      buffers.push_back(*tape_->Allocate(from.size() * sizeof(float)));
      const Tensor to =
          DenseTensor(buffers.back().data(), DType::kF32, std::ssize(from) / cols, cols);
      std::ranges::copy(from, (gradient ? tape_->Gradient(to) : to).Row<float>(0));
      return to;
    };
    const Tensor q = fill(o["q"], kHeads * kDim, false), k = fill(o["k"], kKvHeads * kDim, false);
    const Tensor v = fill(o["v"], kKvHeads * kDim, false);
    const Tensor out = fill(o["given"], kHeads * kDim, true);
    tape_->Record();
    tape_->RotateAndStoreKv(q, k, v, &rotary, kv);
    tape_->Attention(q, kv, 0.4f, out);
    tape_->Backward();
    const auto read = [&](const Tensor& of) {
      const float* const values = tape_->Gradient(of).Row<float>(0);
      return Values(values, values + of.rows * of.cols);
    };
    ExpectClose(read(q), o["dq"], "dq");
    ExpectClose(read(k), o["dk"], "dk");
    ExpectClose(read(v), o["dv"], "dv");
    EXPECT_EQ(read(out), Values(Floats(o["given"]).size())) << "what was overwritten has none";
  }
}

}  // namespace
}  // namespace treadle
