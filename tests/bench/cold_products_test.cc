// The kernel benchmark multiplies what models multiply: rows of Backend::InputType's type,
// and their bytes.
#include "bench/kernels/cold_products.h"

#include <gtest/gtest.h>

#include <memory>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kernels/cuda/runtime/backend_on_device.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/forwarding_backend.h"
#include "kernels/op_cases/op_cases.h"

namespace treadle {
namespace {

constexpr int64_t kN = 24, kK = 128, kRows = 6;

// An emulated GPU that keeps what the last product read, bit by bit.
class InputWatch final : public ForwardingBackend {
 public:
  explicit InputWatch(DType dtype)
      : ForwardingBackend(
            cuda::MakeCudaBackend(cuda::Device::Open(0).value(), {.dtype = dtype}).value()) {}

  void MatMul(Tensor x, std::span<const Projection> projections) override {
    x_ = x;
    bytes_.resize(static_cast<size_t>(x.rows * x.cols) * SizeOf(x.dtype));
    CopyToHost(bytes_.data(), x.data, bytes_.size());
    ForwardingBackend::MatMul(x, projections);
  }
  DType type() const { return x_.dtype; }
  float At(int64_t i) const {
    if (x_.dtype == DType::kF32) return reinterpret_cast<const float*>(bytes_.data())[i];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(bytes_.data())[i];
    return x_.dtype == DType::kF16 ? ToFloat(Half{bits}) : ToFloat(BFloat16{bits});
  }

 private:
  Tensor x_;
  std::vector<std::byte> bytes_;
};

void Expect(std::string_view format, DType dtype, DType input) {
  SCOPED_TRACE(Str(format, " in ", Name(dtype)));
  InputWatch backend(dtype);
  const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat(format), kN, kK, 1);
  ColdProducts products(backend, {{matrix.source, matrix.source}},
                        {.max_rows = kRows, .cold_bytes = 1, .asynchronous = true});
  products.Run(kRows);
  EXPECT_EQ(backend.type(), input);
  const std::vector<float> x = ColdProducts::Activations(kRows, kK);  // exact in 16 bits
  for (int64_t i = 0; i < kRows * kK; ++i) ASSERT_EQ(backend.At(i), x[i]) << i;
  const int64_t rows_bytes = static_cast<int64_t>(SizeOf(input)) * kK + 4 * 2 * kN;
  EXPECT_EQ(products.bytes(kRows) - products.bytes(1),
            static_cast<double>((kRows - 1) * rows_bytes));
}

TEST(ColdProducts, ReadWhatModelsGive) {
  Expect("bf16", DType::kBF16, DType::kBF16);
  Expect("q4_0", DType::kF16, DType::kF16);
  Expect("int8", DType::kBF16, DType::kF32);
  Expect("f32", DType::kF32, DType::kF32);
}

}  // namespace
}  // namespace treadle
