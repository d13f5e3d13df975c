// The op cases on the CUDA backend: against the reference, and bit for bit against themselves in
// other batches. Built twice: on the emulated GPU, where every thread is a fiber and only cases of
// limited size are worth the time, and on a real one, if there is one.
#include "kernels/cuda/cuda_backend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/forwarding_backend.h"
#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/random.h"
#include "kernels/reference/reference_backend.h"
#include "tests/kernels/op_checks.h"

namespace treadle {
namespace {

// A case that only host backends run: latents and groups of experts (HasLatents), K/V of 8 bits
// (HasKvType).
bool IsOfHosts(const OpCase& c) {
  return c.kv.latent_dim > 0 || c.groups > 1 || c.kv.dtype == DType::kI8;
}

// Which part of the list a type of products has to see: ops without products see it once.
bool Concerns(const OpCase& c, DType dtype) {
  if (c.format != nullptr) return true;
  if (IsOfHosts(c)) return false;
  return dtype == (c.kv.head_dim > 0 ? c.kv.dtype : DType::kF32);
}

// Time of the emulation, in operations of one case; a GPU has time for all.
constexpr int64_t kEmulatedOperations = 4'000'000;
constexpr int64_t kEmulatedInvariance = 1'000'000;  // runs each case three times

int64_t Operations(const OpCase& c) {
  int64_t outputs = c.op == Op::kMatMul ? 0 : 1;
  for (const int64_t n : c.op == Op::kMatMul ? c.outputs : std::vector<int64_t>()) outputs += n;
  if (c.op == Op::kAddLowRank) outputs = c.chosen * std::ssize(c.outputs);
  if (c.op == Op::kGatedDelta) {  // of each row: the state twice, and a page of keys
    const StateLayout& s = c.kv.state;
    return 2 * c.rows * (s.heads * s.key_dim * s.value_dim + s.key_heads * s.key_dim * 32);
  }
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
  // Pages of states of a number of floats that is no multiple of four.
  if (dtype == DType::kF32 && op == Op::kCopyPages) {
    cases.push_back({.name = "copy_pages/odd_states",
                     .op = op,
                     .rows = 1,
                     .kv = {.page_size = 16, .dtype = dtype, .state = {111, 3, 1, 7, 24, 9}},
                     .sequences = {{1, 40}, {1, 20}}});
  }
  // More products, and more rows, than a launch takes.
  if (dtype == DType::kF32 && op == Op::kAddLowRank) {
    cases.push_back({.name = "add_low_rank/launches",
                     .op = op,
                     .rows = 600,
                     .cols = 9,
                     .outputs = {17, 3, 3, 3, 3, 3, 3, 3, 3},
                     .chosen = 5});
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

// Cases of an op whose rows may be of Backend::InputType.
std::vector<OpCase> InputTypeCases(Op op, int64_t most_operations) {
  std::vector<OpCase> cases;
  for (const OpCase& c : OpCases()) {
    const int64_t cols = c.op == Op::kAttention ? c.heads * c.kv.head_dim : c.cols;
    const bool rounds = c.format == nullptr || c.format->activations == ActivationPolicy::kFloat;
    if (c.op == op && !IsOfHosts(c) && !c.slow && cols % 64 == 0 && rounds &&
        Operations(c) <= most_operations) {
      cases.push_back(c);
    }
  }
  return cases;
}

// An op gives with rows of Backend::InputType, bit for bit, what it gives with f32 rows:
// its own output rounded, or the products of its input rounded.
class InputTypeTest : public CudaBackendTest {
 protected:
  std::vector<OpCase> Cases(int64_t most_operations) const {
    if (!emulated_) most_operations = std::numeric_limits<int64_t>::max();
    return InputTypeCases(std::get<1>(GetParam()), most_operations);
  }
  static float Round(float x) {
    return dtype() == DType::kF16 ? ToFloat(ToHalf(x)) : ToFloat(ToBFloat16(x));
  }
  static void ExpectBitsOfFloats(Backend& backend, const std::vector<OpCase>& cases) {
    for (OpCase c : cases) {
      const auto floats = Prepare(c, backend, 1);
      c.input_type = true;
      const auto rounded = Prepare(c, backend, 1);
      EXPECT_LT(rounded->bytes(), floats->bytes()) << c.name << " ran with floats";
      floats->Run();
      rounded->Run();
      std::vector<float> expected = Output(*floats);
      if (c.op != Op::kMatMul) std::ranges::transform(expected, expected.begin(), Round);
      const std::vector<float> found = Output(*rounded);
      ASSERT_EQ(found.size(), expected.size());
      EXPECT_EQ(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)), 0)
          << c.name;
      EXPECT_EQ(CheckGuards(*rounded), absl::OkStatus()) << c.name;
    }
  }
};

TEST_P(InputTypeTest, GivesTheBitsOfFloats) {
  const Op op = std::get<1>(GetParam());
  const std::vector<OpCase> cases = Cases(kEmulatedInvariance);
  ASSERT_FALSE(cases.empty());
  for (const bool deterministic : {true, false}) {
    // Other kernels: attention on warpgroups, products of the library. A real library may choose
    // its algorithm by what an address is a multiple of.
    const bool others = op == Op::kAttention || (op == Op::kMatMul && emulated_);
    if (deterministic || others) ExpectBitsOfFloats(*Make(deterministic), cases);
  }
}

std::vector<std::tuple<DType, Op>> Parameters() {
  std::vector<std::tuple<DType, Op>> parameters;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const Op op : kOps) {
      if (!Cases(op, dtype, kEmulatedInvariance).empty()) parameters.emplace_back(dtype, op);
    }
  }
  return parameters;
}

// The ops that read or leave rows of Backend::InputType: their cases have a tensor of 16 bits if a
// backend asks for one.
std::vector<Op> OpsWithInputType() {
  class HalfInputs final : public ForwardingBackend {
   public:
    HalfInputs() : ForwardingBackend(CreateReferenceBackend()) {}
    DType InputType(std::span<const PackedMatrix* const>) const override { return DType::kF16; }
  };
  HalfInputs backend;
  std::vector<Op> ops;
  for (const Op op : kOps) {
    std::vector<OpCase> cases = InputTypeCases(op, kEmulatedInvariance);
    if (cases.empty() || op == Op::kAddLowRank) continue;  // whose factors have 16 bits
    cases[0].input_type = true;
    const auto run = Prepare(cases[0], backend, 1);
    if (std::ranges::count(run->tensors, DType::kF16, &GuardedTensor::dtype) > 0) ops.push_back(op);
  }
  return ops;
}

std::string CaseName(const testing::TestParamInfo<std::tuple<DType, Op>>& info) {
  return Str(Name(std::get<1>(info.param)), "_", Name(std::get<0>(info.param)));
}
INSTANTIATE_TEST_SUITE_P(OpCases, CudaBackendTest, testing::ValuesIn(Parameters()), CaseName);
INSTANTIATE_TEST_SUITE_P(OpCases, InputTypeTest,
                         testing::Combine(testing::Values(DType::kF16, DType::kBF16),
                                          testing::ValuesIn(OpsWithInputType())),
                         CaseName);

// AddLowRank of rows of Backend::InputType gives what it gives with floats of the same values.
TEST(CudaLowRank, RowsMayHaveSixteenBits) {
  std::string why;
  if (CudaDevices(&why).empty()) GTEST_SKIP() << "no GPU: " << why;
  constexpr int64_t kRows = 3, kCols = 40, kOut = 20, kRank = 6;
  const std::vector<int32_t> rows = {0, 2};
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    const auto backend = CreateCudaBackend({.dtype = dtype}).value();
    backend->BindThread();
    Random random(7);
    std::vector<Buffer> buffers;
    const auto upload = [&](DType type, const std::vector<float>& values) {
      std::vector<std::byte> bytes(values.size() * SizeOf(type));
      for (int64_t i = 0; i < std::ssize(values); ++i) {
        StoreElement(type, values[static_cast<size_t>(i)], bytes.data(), i);
      }
      buffers.push_back(backend->Allocate(bytes.size()).value());
      backend->CopyToDevice(buffers.back().data(), bytes.data(), bytes.size());
      return buffers.back().data();
    };
    const auto normal = [&](int64_t count) {
      std::vector<float> values(static_cast<size_t>(count));
      for (float& value : values) {
        value = dtype == DType::kF16 ? ToFloat(ToHalf(random.Normal()))
                                     : ToFloat(ToBFloat16(random.Normal()));
      }
      return values;
    };
    const std::vector<float> x = normal(kRows * kCols);
    const LowRank by = {.a = upload(dtype, normal(LowRankElements(kCols, kRank))),
                        .b = upload(dtype, normal(LowRankElements(kRank, kOut))),
                        .type = dtype,
                        .rank = kRank};
    std::vector<float> found[2];
    for (const DType type : {DType::kF32, dtype}) {
      const std::vector<float> zeros(kRows * kOut);
      const Tensor out = DenseTensor(upload(DType::kF32, zeros), DType::kF32, kRows, kOut);
      const LowRankProduct product[] = {{.by = by, .rows = rows, .out = out}};
      backend->AddLowRank(DenseTensor(upload(type, x), type, kRows, kCols), product);
      EXPECT_EQ(backend->Synchronize(), absl::OkStatus());
      found[type == dtype].resize(zeros.size());
      backend->CopyToHost(found[type == dtype].data(), out.data, zeros.size() * sizeof(float));
    }
    EXPECT_NE(found[0][0], 0.0f);
    EXPECT_EQ(found[0], found[1]);
  }
}

TEST(CudaBackendErrors, ADeviceThatIsNotThere) {
  const auto backend = CreateCudaBackend({.device = 99});
  ASSERT_FALSE(backend.ok());
  EXPECT_FALSE(backend.status().message().empty());
}

}  // namespace
}  // namespace treadle
