// Norms, activations, Gather and Copy: each row of the output from rows of features.
#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/random.h"

namespace treadle {
namespace {

constexpr int64_t kCols[] = {1, 7, 16, 33, 576, 1536, 2307};

std::string NameOf(const OpCase& c) {
  return Str(Name(c.op), c.bias ? "/bias" : "", c.in_place ? "/in_place" : "",
             c.accumulate ? "/accumulate" : "", "/", c.cols, "/rows=", c.rows);
}

// Every shape as it is and as `twist` makes it, if that differs; and as benchmarks of `bench`.
void AddShapes(std::vector<OpCase>& cases, OpCase plain, OpCase twist, OpCase bench) {
  const auto add = [&](OpCase c) {
    c.name = NameOf(c);
    cases.push_back(std::move(c));
  };
  for (const int64_t cols : kCols) {
    for (const int64_t rows : {1, 3, 17, 64}) {
      for (OpCase c : {plain, twist}) {
        c.rows = rows;
        c.cols = cols;
        if (cases.empty() || NameOf(c) != cases.back().name) add(c);
      }
    }
  }
  bench.bench = true;
  for (const int64_t rows : {32, 512}) {
    bench.rows = rows;
    bench.slow = rows > 32;
    add(bench);
  }
}

double Elements(const OpRun& run) {
  return static_cast<double>(run.op_case().rows * run.op_case().cols);
}

// Input x and the output, which are one tensor in place. Rows that products read are not in place.
struct InOut {
  GuardedTensor& x;
  GuardedTensor& out;
};
InOut AddInOut(OpRun& run) {
  const OpCase& c = run.op_case();
  GuardedTensor& out = c.accumulate ? run.Add("out", Role::kOutput, c.rows, c.cols)
                                    : run.AddForProducts("out", c.rows, c.cols);
  if (c.in_place && out.dtype() == DType::kF32) return {out, out};
  return {run.Add("x", Role::kInput, c.rows, c.cols), out};
}

// -- norms ----------------------------------------------------------------------------------------

constexpr float kNormEps = 1e-5f;

void PrepareNorm(OpRun& run, uint64_t seed) {
  const OpCase& c = run.op_case();
  const auto [x, out] = AddInOut(run);
  GuardedTensor& weight = run.Add("weight", Role::kInput, 1, c.cols);
  GuardedTensor& bias = run.Add("bias", Role::kInput, 1, c.cols);
  Random random(seed);
  // Real residuals have a few features that dwarf the rest.
  x.Fill([&] { return random.Normal() * (random.Below(64) == 0 ? 30.0f : 1.0f); });
  weight.Fill([&] { return random.Normal(); });
  bias.Fill([&] { return random.Normal(); });
  if (c.accumulate) out.Fill([&] { return random.Normal(); });
  run.call = [&run, &c, &x = x, &out = out, &weight, &bias](int64_t begin, int64_t count) {
    const float* const w = weight.view().Row<float>(0);
    const float* const b = c.bias ? bias.view().Row<float>(0) : nullptr;
    if (c.op == Op::kRmsNorm) {
      run.backend().RmsNorm(x.Rows(begin, count), w, kNormEps, c.accumulate,
                            out.Rows(begin, count));
    } else {
      run.backend().LayerNorm(x.Rows(begin, count), w, b, kNormEps, out.Rows(begin, count));
    }
  };
  run.bytes_moved = x.bytes() + out.bytes();
  run.operations_done = 4 * Elements(run);
}

void AddRmsNorms(std::vector<OpCase>& cases) {
  const OpCase plain = {.op = Op::kRmsNorm, .cols = 576};
  AddShapes(cases, plain, {.op = Op::kRmsNorm, .in_place = true}, plain);
  OpCase accumulating = {.op = Op::kRmsNorm, .rows = 17, .cols = 577, .accumulate = true};
  accumulating.name = NameOf(accumulating);
  cases.push_back(accumulating);
}
void AddLayerNorms(std::vector<OpCase>& cases) {
  const OpCase plain = {.op = Op::kLayerNorm, .cols = 576};
  AddShapes(cases, plain, {.op = Op::kLayerNorm, .in_place = true, .bias = true}, plain);
}

// -- activations ----------------------------------------------------------------------------------

constexpr float kSwiGluLimit = 1.5f;  // which many values exceed
constexpr XieluScales kXielu = {.positive = 0.8f, .negative = 1.3f};

void PrepareActivation(OpRun& run, uint64_t seed) {
  const OpCase& c = run.op_case();
  const auto [x, out] = AddInOut(run);
  GuardedTensor& up = run.Add("up", Role::kInput, c.rows, c.chosen > 0 ? c.chosen : c.cols);
  Random random(seed);
  constexpr float kEdges[] = {0.0f, -0.0f, 88.0f, -88.0f, 104.0f, -104.0f, 1e5f, -1e5f, 1e-30f};
  x.Fill([&] {
    return random.Below(16) == 0 ? kEdges[random.Below(std::size(kEdges))] : 3 * random.Normal();
  });
  up.Fill([&] { return random.Normal(); });
  run.call = [&run, &c, &x = x, &out = out, &up](int64_t begin, int64_t count) {
    const Tensor from = x.Rows(begin, count), to = out.Rows(begin, count);
    if (c.op == Op::kGelu) return run.backend().Gelu(from, to);
    if (c.op == Op::kSigmoidGate) {
      return run.backend().SigmoidGate(up.Rows(begin, count), from, to);
    }
    if (c.op == Op::kMultiply) return run.backend().Multiply(from, up.Rows(begin, count), to);
    if (c.op == Op::kGeluErf) return run.backend().GeluErf(from, to);
    if (c.op == Op::kRelu) return run.backend().Relu(from, to);
    if (c.op == Op::kSoftCap) return run.backend().SoftCap(from, 2.5f, to);
    if (c.op == Op::kXielu) return run.backend().Xielu(from, kXielu, to);
    if (c.op == Op::kGeGlu) return run.backend().GeGlu(from, up.Rows(begin, count), to);
    if (c.op == Op::kClampedSwiGlu) {
      return run.backend().ClampedSwiGlu(from, up.Rows(begin, count), kSwiGluLimit, to);
    }
    run.backend().SwiGlu(from, up.Rows(begin, count), to);
  };
  const bool gated = c.op == Op::kSwiGlu || c.op == Op::kClampedSwiGlu || c.op == Op::kGeGlu ||
                     c.op == Op::kSigmoidGate || c.op == Op::kMultiply;
  run.bytes_moved = x.bytes() + out.bytes() + (gated ? up.bytes() : 0);
  run.operations_done = 8 * Elements(run);
}

template <Op kOp>
void AddGated(std::vector<OpCase>& cases) {
  const OpCase plain = {.op = kOp, .cols = 1536};
  AddShapes(cases, plain, {.op = kOp, .in_place = true}, plain);
}
void AddSigmoidGates(std::vector<OpCase>& cases) {
  AddGated<Op::kSigmoidGate>(cases);
  cases.push_back({.name = "sigmoid_gate/one/rows=17",
                   .op = Op::kSigmoidGate,
                   .rows = 17,
                   .cols = 576,
                   .chosen = 1});
}
template <Op op>
void AddActivations(std::vector<OpCase>& cases) {
  const OpCase in_place = {.op = op, .cols = 1536, .in_place = true};
  AddShapes(cases, {.op = op}, in_place, in_place);
}

// -- copies ---------------------------------------------------------------------------------------

void PrepareCopy(OpRun& run, uint64_t seed) {
  const OpCase& c = run.op_case();
  GuardedTensor& x = run.Add("x", Role::kInput, 2 * c.rows + 1, c.cols);
  GuardedTensor& out = run.Add("out", Role::kOutput, c.rows, c.cols);
  Random random(seed);
  x.Fill([&] { return random.Normal(); });
  for (int64_t i = 0; i < c.rows; ++i) {
    run.ids.push_back(static_cast<int32_t>(random.Below(x.rows())));
  }
  run.call = [&run, &c, &x, &out](int64_t begin, int64_t count) {
    if (c.op == Op::kCopy) return run.backend().Copy(x.Rows(begin, count), out.Rows(begin, count));
    run.backend().Gather(x.view(), std::span(run.ids).subspan(begin, count),
                         out.Rows(begin, count));
  };
  run.bytes_moved = 8 * Elements(run);
}

void AddGathers(std::vector<OpCase>& cases) {
  const OpCase plain = {.op = Op::kGather, .cols = 576};
  AddShapes(cases, plain, plain, plain);
}
void AddCopies(std::vector<OpCase>& cases) {
  const OpCase plain = {.op = Op::kCopy, .cols = 576};
  AddShapes(cases, plain, plain, plain);
}

}  // namespace

extern const OpRow kRmsNormRow = {"rms_norm", AddRmsNorms, PrepareNorm};
extern const OpRow kLayerNormRow = {"layer_norm", AddLayerNorms, PrepareNorm};
extern const OpRow kSwiGluRow = {"swiglu", AddGated<Op::kSwiGlu>, PrepareActivation};
extern const OpRow kClampedSwiGluRow = {"clamped_swiglu", AddGated<Op::kClampedSwiGlu>,
                                        PrepareActivation};
extern const OpRow kGeGluRow = {"geglu", AddGated<Op::kGeGlu>, PrepareActivation};
extern const OpRow kSigmoidGateRow = {"sigmoid_gate", AddSigmoidGates, PrepareActivation};
extern const OpRow kMultiplyRow = {"multiply", AddGated<Op::kMultiply>, PrepareActivation};
extern const OpRow kGeluRow = {"gelu", AddActivations<Op::kGelu>, PrepareActivation};
extern const OpRow kGeluErfRow = {"gelu_erf", AddActivations<Op::kGeluErf>, PrepareActivation};
extern const OpRow kReluRow = {"relu", AddActivations<Op::kRelu>, PrepareActivation};
extern const OpRow kSoftCapRow = {"soft_cap", AddActivations<Op::kSoftCap>, PrepareActivation};
extern const OpRow kXieluRow = {"xielu", AddActivations<Op::kXielu>, PrepareActivation};
extern const OpRow kGatherRow = {"gather", AddGathers, PrepareCopy};
extern const OpRow kCopyRow = {"copy", AddCopies, PrepareCopy};

}  // namespace treadle
