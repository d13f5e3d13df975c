// The vector kernels' own exp and what is built on it, against double libm over dense ranges, on
// every instruction set that can run here; and the saturating fp16 store against dtype.h.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cpu/isa_kernel.h"
#include "kernels/dtype.h"
#include "tests/kernels/cpu/cpu_setting.h"

namespace treadle {

// vector_exp.cc
TREADLE_ISA_KERNEL(ExpElements, void(const float* x, float* out, int64_t n));

namespace {

// SwiGLU and GELU of one row, by the backend.
void SwiGlu(CpuIsa isa, std::vector<float> gate, std::vector<float> up, float* out) {
  const auto n = std::ssize(gate);
  MakeCpuBackend({isa, ComputeMode::kExact}, 1)
      ->SwiGlu(DenseTensor(gate.data(), DType::kF32, 1, n),
               DenseTensor(up.data(), DType::kF32, 1, n), DenseTensor(out, DType::kF32, 1, n));
}
void Gelu(CpuIsa isa, std::vector<float> x, float* out) {
  const auto n = std::ssize(x);
  MakeCpuBackend({isa, ComputeMode::kExact}, 1)
      ->Gelu(DenseTensor(x.data(), DType::kF32, 1, n), DenseTensor(out, DType::kF32, 1, n));
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Both signs of a dense sample of [0, limit]; the stride is a prime, so mantissas vary.
std::vector<float> DenseRange(float limit) {
  std::vector<float> values = {0.0f, -0.0f};
  for (uint32_t bits = 1; bits <= std::bit_cast<uint32_t>(limit); bits += 1021) {
    values.push_back(std::bit_cast<float>(bits));
    values.push_back(-values.back());
  }
  return values;
}

// Distance between neighbouring floats at |x|.
double Ulp(double x) {
  const int exponent = std::max(std::ilogb(x), -126);
  return std::ldexp(1.0, exponent - 23);
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(VectorMathTest, ExpIsWithinOneUlp) {
  const std::vector<float> x = DenseRange(110.0f);
  for (const CpuIsa isa : SupportedIsas()) {
    SCOPED_TRACE(std::string(Name(isa)));
    std::vector<float> y(x.size());
    kExpElements[isa](x.data(), y.data(), static_cast<int64_t>(x.size()));
    double worst = 0.0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = std::exp(static_cast<double>(x[i]));
      if (exact > std::numeric_limits<float>::max()) {
        // The last float below the limit may round either way.
        ASSERT_TRUE(y[i] == kInfinity || x[i] < 88.723f) << x[i];
        continue;
      }
      ASSERT_TRUE(std::isfinite(y[i])) << x[i];
      worst = std::max(worst, std::abs(y[i] - exact) / Ulp(std::max(exact, 1e-300)));
    }
    EXPECT_LE(worst, 1.0);
  }
}

TEST(VectorMathTest, ExpSpecialValues) {
  const std::vector<float> x = {0.0f, -0.0f, -kInfinity, kInfinity, kNaN, -104.0f, -1e30f, 1e30f};
  for (const CpuIsa isa : SupportedIsas()) {
    std::vector<float> y(x.size());
    kExpElements[isa](x.data(), y.data(), static_cast<int64_t>(x.size()));
    EXPECT_EQ(y[0], 1.0f);
    EXPECT_EQ(y[1], 1.0f);
    EXPECT_EQ(y[2], 0.0f);
    EXPECT_EQ(y[3], kInfinity);
    EXPECT_TRUE(std::isnan(y[4]));
    EXPECT_EQ(y[5], 0.0f);
    EXPECT_EQ(y[6], 0.0f);
    EXPECT_EQ(y[7], kInfinity);
  }
}

// x / (1 + exp(-t)) with a relative error `t_error` of t: that shifts exp by t_error |t|; exp
// itself adds 1 ulp, the sum and the quotient half of one each. Below exp's overflow the result is
// -0, which is off by at most 89 exp(-88.7) = 2.7e-37.
double SigmoidTolerance(double exact, double t, double t_error) {
  const double half_ulp = 0x1p-24;
  return std::abs(exact) * (4.0 * half_ulp + t_error * std::abs(t)) * 1.01 + 2.7e-37;
}

TEST(VectorMathTest, SiluMatchesDouble) {
  const std::vector<float> x = DenseRange(200.0f);
  const std::vector<float> ones(x.size(), 1.0f);
  for (const CpuIsa isa : SupportedIsas()) {
    std::vector<float> y(x.size());
    SwiGlu(isa, x, ones, y.data());
    for (size_t i = 0; i < x.size(); ++i) {
      const double v = x[i];
      const double exact = v / (1.0 + std::exp(-v));
      ASSERT_NEAR(y[i], exact, SigmoidTolerance(exact, v, 0.0)) << x[i];
    }
  }
}

TEST(VectorMathTest, GeluMatchesItsTanhForm) {
  const std::vector<float> x = DenseRange(30.0f);
  for (const CpuIsa isa : SupportedIsas()) {
    std::vector<float> y(x.size());
    Gelu(isa, x, y.data());
    for (size_t i = 0; i < x.size(); ++i) {
      const double v = x[i];
      const double u = std::sqrt(2.0 / M_PI) * (v + 0.044715 * v * v * v);
      const double exact = v / (1.0 + std::exp(-2.0 * u));
      // 2u: four roundings and two rounded constants.
      ASSERT_NEAR(y[i], exact, SigmoidTolerance(exact, 2.0 * u, 6 * 0x1p-24)) << x[i];
      if (std::abs(v) < 5.0) {
        ASSERT_NEAR(exact, 0.5 * v * (1.0 + std::tanh(u)), 1e-14 * (1.0 + std::abs(v)));
      }
    }
  }
}

TEST(VectorMathTest, InstructionSetsGiveEqualBits) {
  if (SupportedIsas().size() < 2) GTEST_SKIP() << "this processor has no AVX-512";
  const std::vector<float> x = DenseRange(200.0f);
  std::vector<std::vector<float>> results;
  for (const CpuIsa isa : SupportedIsas()) {
    std::vector<float> y(3 * x.size());
    const int64_t n = static_cast<int64_t>(x.size());
    kExpElements[isa](x.data(), y.data(), n);
    SwiGlu(isa, x, x, y.data() + n);
    Gelu(isa, x, y.data() + 2 * n);
    results.push_back(std::move(y));
  }
  EXPECT_TRUE(SameBits(results[0], results[1]));
}

// Every fp16 value, its neighbourhood, the midpoints between neighbours and what lies beyond,
// stored as the V of one head.
TEST(VectorMathTest, HalfStoreIsTheCacheRule) {
  std::vector<float> values = {kInfinity, -kInfinity, kNaN,      -kNaN,    65519.99f, 65520.0f,
                               65536.0f,  -65520.0f,  1e30f,     -1e30f,   1e-30f,    -1e-30f,
                               0x1p-25f,  0x1.8p-25f, -0x1p-25f, 0x1p-14f, 0x1p-24f};
  for (uint32_t bits = 0; bits < 0x7c00u; ++bits) {
    const float exact = ToFloat(Half{static_cast<uint16_t>(bits)});
    const float next = ToFloat(Half{static_cast<uint16_t>(std::min(bits + 1, 0x7bffu))});
    const float middle = 0.5f * (exact + next);
    for (const float x :
         {exact, middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)}) {
      values.push_back(x);
      values.push_back(-x);
    }
  }
  while (values.size() % 16 != 5) values.push_back(1.0f);  // ends in a tail
  const int64_t n = static_cast<int64_t>(values.size());
  for (const CpuIsa isa : SupportedIsas()) {
    std::vector<float> q(n, 0.0f);
    std::vector<float> k(n, 0.0f);
    std::vector<float> v = values;
    const KvLayout layout = {1, n, /*page_size=*/16, /*num_pages=*/1, DType::kF16};
    std::vector<uint16_t> pages(static_cast<size_t>(layout.PageBytes()) / 2, 0xbeef);
    const int32_t page = 0;
    const SequenceSpan span = {0, 1, 0, &page};
    const auto row = [n](std::vector<float>& x) {
      return DenseTensor(x.data(), DType::kF32, 1, n);
    };
    MakeCpuBackend({isa, ComputeMode::kExact}, 1)
        ->RotateAndStoreKv(row(q), row(k), row(v), nullptr,
                           {layout, reinterpret_cast<std::byte*>(pages.data()), {&span, 1}});
    const uint16_t* const v_part = pages.data() + layout.PartElements();
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_EQ(v_part[i], ToHalf(values[i]).bits) << values[i] << " on " << Name(isa);
    }
    EXPECT_EQ(v_part[n], 0xbeef);
  }
}

}  // namespace
}  // namespace treadle
