#include "kernels/cpu/ops/sample_kernels.h"

#include "kernels/cpu/vector_math.h"

namespace treadle::TREADLE_ISA {
namespace {

constexpr float kLargest = 3.4028234663852886e38f;

// NaN to -inf (it never wins against the accumulator below), +inf to the largest float.
TREADLE_SIMD Vec Clean(Vec x) { return Min(Broadcast(kLargest), Max(x, Broadcast(-kInfinity))); }

}  // namespace

float MaxLogit(const float* x, int64_t n) {
  Vec largest[4];
  for (Vec& part : largest) part = Broadcast(-kInfinity);
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int64_t part = 0; part < 4; ++part) {
      largest[part] = Max(Load(x + i + part * kLanes), largest[part]);  // NaN: the old one
    }
  }
  for (; i < n; i += kLanes) {
    const Mask valid = FirstLanes(n - i);
    const Vec value = Select(valid, LoadLanes(x + i, n - i < kLanes ? n - i : kLanes), largest[0]);
    largest[0] = Max(value, largest[0]);
  }
  const Vec all = Max(Max(largest[0], largest[1]), Max(largest[2], largest[3]));
  return MaxLane(Clean(all));
}

int64_t FirstAtLeast(const float* x, int64_t from, int64_t n, float floor) {
  const Vec bound = Broadcast(floor);
  for (int64_t i = from; i < n; i += kLanes) {
    const int64_t lanes = n - i < kLanes ? n - i : kLanes;
    const uint32_t valid = (1u << lanes) - 1u;
    const uint32_t bits = AtLeastBits(LoadLanes(x + i, lanes), bound) & valid;
    if (bits != 0) return i + __builtin_ctz(bits);
  }
  return -1;
}

float SumExp(const float* x, int64_t n, float max, float factor) {
  Vec sum = Zero();
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    const Vec value =
        Select(FirstLanes(lanes), Clean(LoadLanes(x + i, lanes)), Broadcast(-kInfinity));
    sum = Add(sum, Exp(Mul(Sub(value, Broadcast(max)), Broadcast(factor))));
  });
  return Sum(sum);
}

int64_t GatherBand(const float* x, int64_t n, float floor, float ceiling, float max, float factor,
                   int32_t* ids, float* weights) {
  int64_t count = 0;
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    const Vec value = Clean(LoadLanes(x + i, lanes));
    uint32_t bits = AtLeastBits(value, Broadcast(floor)) & ~AtLeastBits(value, Broadcast(ceiling)) &
                    ((1u << lanes) - 1u);
    for (; bits != 0; bits &= bits - 1) {
      const int64_t id = i + __builtin_ctz(bits);
      ids[count] = static_cast<int32_t>(id);
      weights[count++] = x[id] > kLargest ? kLargest : x[id];
    }
  });
  for (int64_t i = 0; i < count; i += kLanes) {  // in place: values to weights
    const Vec value =
        Sub(LoadLanes(weights + i, count - i < kLanes ? count - i : kLanes), Broadcast(max));
    Store(weights + i, Exp(Mul(value, Broadcast(factor))));
  }
  return count;
}

}  // namespace treadle::TREADLE_ISA
