// The op cases on the CUDA backend: against the reference, and bit for bit against themselves in
// other batches. Built twice: on the emulated GPU, where every thread is a fiber and only cases of
// limited size are worth the time, and on a real one, if there is one.
#include "kernels/cuda/cuda_backend.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/reference/reference_backend.h"
#include "tests/support/op_cases.h"

namespace treadle {
namespace {

// Which part of the list a type of products has to see: ops without products see it once.
bool Concerns(const OpCase& c, DType dtype) {
  switch (c.op) {
    case Op::kEmbed:
    case Op::kMatMul:
      return true;
    case Op::kRotateAndStoreKv:
    case Op::kAttention:
    case Op::kCopyPages:
      return c.kv.dtype == dtype;
    default:
      return dtype == DType::kF32;
  }
}

// What the emulation has time for, in operations of one case; a GPU has time for all.
constexpr int64_t kEmulatedOperations = 4'000'000;
constexpr int64_t kEmulatedInvariance = 1'000'000;  // runs each case three times

int64_t Operations(const OpCase& c) {
  int64_t outputs = c.op == Op::kMatMul ? 0 : 1;
  for (const int64_t n : c.op == Op::kMatMul ? c.outputs : std::vector<int64_t>()) outputs += n;
  int64_t positions = 0;
  for (const CaseSequence& s : c.sequences) {
    positions += s.rows * (c.op == Op::kAttention ? s.first_position + s.rows : 1);
  }
  return c.rows * c.cols * outputs + 2 * positions * c.heads * c.kv.head_dim;
}

// The cases of the list, and those with 16-bit caches as bf16 too.
std::vector<OpCase> Cases(Op op, DType dtype, int64_t most_operations) {
  std::vector<OpCase> cases;
  for (OpCase c : OpCases()) {
    if (c.op != op || c.slow || Operations(c) > most_operations) continue;
    if (dtype == DType::kBF16 && c.kv.dtype == DType::kF16) {
      c.kv.dtype = DType::kBF16;
      c.name += "/as_bf16";
    }
    if (Concerns(c, dtype)) cases.push_back(std::move(c));
  }
  // Rows that a block of threads goes over more than once, and more than it can hold.
  if (dtype == DType::kF32 && (op == Op::kRmsNorm || op == Op::kLayerNorm)) {
    for (const int64_t cols : {4097, 8192, 40003}) {
      cases.push_back({.name = Str(Name(op), "/", cols, "/rows=3"),
                       .op = op,
                       .rows = 3,
                       .cols = cols,
                       .in_place = cols == 40003});
    }
  }
  return cases;
}

class CudaBackendTest : public testing::TestWithParam<std::tuple<DType, Op>> {
 protected:
  void SetUp() override {
    std::string why;
    const std::vector<CudaDevice> devices = CudaDevices(&why);
    if (devices.empty()) GTEST_SKIP() << "no GPU: " << why;
    emulated_ = devices[0].name.find("emulated") != std::string::npos;
  }
  static DType dtype() { return std::get<0>(GetParam()); }
  std::vector<OpCase> Cases(int64_t most_operations) const {
    if (!emulated_) most_operations = std::numeric_limits<int64_t>::max();
    return treadle::Cases(std::get<1>(GetParam()), dtype(), most_operations);
  }
  static std::unique_ptr<Backend> Make(bool deterministic) {
    auto backend = CreateCudaBackend({.dtype = dtype(), .deterministic = deterministic});
    EXPECT_EQ(backend.status(), absl::OkStatus());
    (*backend)->BindThread();
    return *std::move(backend);
  }

  bool emulated_ = false;
};

TEST_P(CudaBackendTest, MatchesTheReference) {
  const auto backend = Make(/*deterministic=*/false);
  for (const OpCase& c : Cases(kEmulatedOperations)) {
    const absl::Status status = MatchesReference(c, *backend, Arithmetic::MatrixUnits(dtype()));
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

TEST_P(CudaBackendTest, BitsDependOnTheRowAlone) {
  const auto backend = Make(/*deterministic=*/true);
  for (const OpCase& c : Cases(kEmulatedInvariance)) {
    const absl::Status status = BatchInvariance(c, *backend);
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

std::vector<std::tuple<DType, Op>> Parameters() {
  std::vector<std::tuple<DType, Op>> parameters;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (int op = 0; op <= static_cast<int>(Op::kSampleShard); ++op) {
      const auto as_op = static_cast<Op>(op);
      if (!Cases(as_op, dtype, kEmulatedInvariance).empty()) parameters.emplace_back(dtype, as_op);
    }
  }
  return parameters;
}

INSTANTIATE_TEST_SUITE_P(OpCases, CudaBackendTest, testing::ValuesIn(Parameters()),
                         [](const testing::TestParamInfo<std::tuple<DType, Op>>& info) {
                           return std::string(Name(std::get<1>(info.param))) + "_" +
                                  std::string(Name(std::get<0>(info.param)));
                         });

TEST(CudaBackendErrors, ADeviceThatIsNotThere) {
  const auto backend = CreateCudaBackend({.device = 99});
  ASSERT_FALSE(backend.ok());
  EXPECT_FALSE(backend.status().message().empty());
}

}  // namespace
}  // namespace treadle
