// Route and Mix: which experts a row goes to, and the sum of what they made of it.
#include "kernels/backend.h"
#include "kernels/cpu/isa_kernel.h"

namespace treadle {

// `rows` rows. Strides count elements.
struct RouteArguments {
  const float* logits;  // [rows, experts]
  int64_t logits_stride;
  int64_t rows;
  int64_t experts;
  int64_t chosen;
  Routing routing;
  float* ids;  // [rows, chosen]
  int64_t ids_stride;
  float* weights;  // [rows, chosen]
  int64_t weights_stride;
};
// One row, of which columns [0, cols) are made.
struct MixArguments {
  const float* x;  // [*, cols]
  int64_t x_stride;
  const int32_t* places;  // [chosen]
  const float* weights;   // [chosen]
  int64_t chosen;
  bool accumulate;
  float* out;  // [cols]
  int64_t cols;
};
TREADLE_ISA_KERNEL(RouteRows, void(const RouteArguments&));
TREADLE_ISA_KERNEL(MixExperts, void(const MixArguments&));

}  // namespace treadle

#ifdef TREADLE_ISA
#include "kernels/cpu/vector_math.h"

namespace treadle::TREADLE_ISA {
namespace {

// The order that experts are chosen by: NaN is less than all else.
TREADLE_SIMD float KeyOf(float x) { return x == x ? x : -kInfinity; }

// The sum of exp(x - largest) over n values, which `powers`, if set, gets one by one.
TREADLE_SIMD float SumOfPowers(const float* x, int64_t n, float largest, float* powers) {
  Vec sum = Zero();
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    const Vec power = Exp(Sub(LoadLanes(x + i, lanes), Broadcast(largest)));
    sum = Add(sum, Select(FirstLanes(lanes), power, Zero()));
    if (powers != nullptr) StoreLanes(powers + i, power, lanes);
  });
  return Sum(sum);
}

// sums = sigmoid(x) + bias, n values; null: 0.
TREADLE_SIMD void AddBias(const float* x, const float* bias, int64_t n, float* sums) {
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    const Vec sigmoid = TimesSigmoid(Broadcast(1.0f), LoadLanes(x + i, lanes));
    const Vec more = bias == nullptr ? Zero() : LoadLanes(bias + i, lanes);
    StoreLanes(sums + i, Add(sigmoid, more), lanes);
  });
}

// Leaves the keys of experts outside the used groups at less than all others.
void KeepUsedGroups(const Routing& routing, int64_t experts, float* keys) {
  const int64_t each = experts / routing.groups;
  float scores[kMaxExperts];
  for (int64_t group = 0; group < routing.groups; ++group) {
    float first = -kInfinity, second = -kInfinity;
    for (int64_t i = group * each; i < (group + 1) * each; ++i) {
      const float key = KeyOf(keys[i]);
      if (key > first) {
        second = first;
        first = key;
      } else if (key > second) {
        second = key;
      }
    }
    scores[group] = routing.sigmoid ? first + second : first;
  }
  for (int64_t group = 0; group < routing.groups; ++group) {
    int64_t before = 0;  // groups that are used rather than this one
    for (int64_t other = 0; other < routing.groups; ++other) {
      before += scores[other] > scores[group] || (scores[other] == scores[group] && other < group);
    }
    if (before < routing.used_groups) continue;
    for (int64_t i = group * each; i < (group + 1) * each; ++i) keys[i] = -kInfinity;
  }
}

// x = sigmoid(x), n values. Returns their sum.
TREADLE_SIMD float ToSigmoids(float* x, int64_t n) {
  Vec sum = Zero();
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    const Vec sigmoid = TimesSigmoid(Broadcast(1.0f), LoadLanes(x + i, lanes));
    sum = Add(sum, Select(FirstLanes(lanes), sigmoid, Zero()));
    StoreLanes(x + i, sigmoid, lanes);
  });
  return Sum(sum);
}

}  // namespace

void RouteRows(const RouteArguments& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* x = a.logits + row * a.logits_stride;
    float* ids = a.ids + row * a.ids_stride;
    float* weights = a.weights + row * a.weights_stride;
    float own[kMaxExperts];  // sums of sigmoids and biases, or logits of used groups
    const bool grouped = a.routing.groups > 1;
    const bool scored = a.routing.sigmoid && (grouped || a.routing.bias != nullptr);
    if (scored) {
      AddBias(x, a.routing.bias, a.experts, own);
    } else if (grouped) {
      ForEachVec(a.experts, [&](int64_t i, int64_t lanes) {
        StoreLanes(own + i, LoadLanes(x + i, lanes), lanes);
      });
    }
    if (grouped) KeepUsedGroups(a.routing, a.experts, own);
    const float* keys = scored || grouped ? own : x;
    int64_t last = -1;  // the one that was chosen before
    for (int64_t j = 0; j < a.chosen; ++j) {
      const float bound = last < 0 ? kInfinity : KeyOf(keys[last]);
      int64_t best = -1;
      for (int64_t i = 0; i < a.experts; ++i) {
        const float key = KeyOf(keys[i]);
        const bool left = key < bound || (key == bound && i > last);
        if (left && (best < 0 || key > KeyOf(keys[best]))) best = i;
      }
      ids[j] = static_cast<float>(best);
      weights[j] = x[best];
      last = best;
    }
    float sum;
    if (a.routing.sigmoid) {
      sum = ToSigmoids(weights, a.chosen);
      if (!a.routing.normalize) sum = 1;
    } else {
      const float largest = weights[0];
      sum = SumOfPowers(weights, a.chosen, largest, weights);
      if (!a.routing.normalize) sum = SumOfPowers(x, a.experts, largest, nullptr);
    }
    const Vec scale = Broadcast(a.routing.scale);
    ForEachVec(a.chosen, [&](int64_t i, int64_t lanes) {
      const Vec share = Div(LoadLanes(weights + i, lanes), Broadcast(sum));
      StoreLanes(weights + i, Mul(share, scale), lanes);
    });
    for (int64_t j = 0; j < a.chosen && a.routing.expert_scales != nullptr; ++j) {
      weights[j] *= a.routing.expert_scales[static_cast<int64_t>(ids[j])];
    }
  }
}

void MixExperts(const MixArguments& a) {
  ForEachVec(a.cols, [&](int64_t i, int64_t lanes) {
    Vec sum = Zero();
    for (int64_t j = 0; j < a.chosen; ++j) {
      const float* x = a.x + a.places[j] * a.x_stride;
      sum = Fma(Broadcast(a.weights[j]), LoadLanes(x + i, lanes), sum);
    }
    if (a.accumulate) sum = Add(LoadLanes(a.out + i, lanes), sum);
    StoreLanes(a.out + i, sum, lanes);
  });
}

}  // namespace treadle::TREADLE_ISA
#else
#include "kernels/cpu/ops/cpu_ops.h"
#include "kernels/cpu/ops/split_rows.h"

namespace treadle {

void CpuOps::Route(Tensor logits, const Routing& routing, Tensor ids, Tensor weights) {
  CheckSameShape(ids, weights);
  TREADLE_CHECK(logits.rows == ids.rows && ids.cols <= logits.cols && logits.cols <= kMaxExperts);
  TREADLE_CHECK(logits.cols % routing.groups == 0 &&
                ids.cols <= routing.used_groups * (logits.cols / routing.groups));
  SplitRows(pool_, logits.rows, logits.cols * ids.cols, [&](int64_t begin, int64_t end) {
    kRouteRows[isa_]({logits.Row<float>(begin), logits.stride, end - begin, logits.cols, ids.cols,
                      routing, ids.Row<float>(begin), ids.stride, weights.Row<float>(begin),
                      weights.stride});
  });
}

void CpuOps::Mix(Tensor x, std::span<const int32_t> places, Tensor weights, bool accumulate,
                 Tensor out) {
  TREADLE_CHECK(x.cols == out.cols && weights.rows == out.rows);
  TREADLE_CHECK(std::ssize(places) == weights.rows * weights.cols);
  for (const int32_t place : places) TREADLE_CHECK(place >= 0 && place < x.rows);
  SplitElements(pool_, out.rows, out.cols, [&](int64_t row, int64_t col, int64_t count) {
    kMixExperts[isa_]({x.Row<float>(0) + col, x.stride, places.data() + row * weights.cols,
                       weights.Row<float>(row), weights.cols, accumulate, out.Row<float>(row) + col,
                       count});
  });
}

}  // namespace treadle
#endif
