// Ops on state pages.
#include <cmath>

#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/random.h"

namespace treadle {
namespace {

void AddStateOps(std::vector<OpCase>& cases, Op op) {
  struct BatchOf {
    std::string_view name;
    std::vector<CaseSequence> sequences;
  };
  const BatchOf batches[] = {
      {"first", {{1, 0}}},
      {"single_rows", {{1, 0}, {1, 15}, {1, 16}, {1, 63}, {1, 64}, {1, 65}, {1, 130}}},
      {"chunks", {{17, 0}, {33, 47}, {5, 126}}},
      {"mixed", {{1, 40}, {70, 0}, {2, 0, false}, {1, 64}, {20, 50}, {1, 0, false}, {1, 0}}}};
  const auto add = [&](OpCase c, std::string_view batch) {
    const StateLayout& s = c.kv.state;
    for (const CaseSequence& sequence : c.sequences) c.rows += sequence.rows;
    c.cols = s.channels;
    c.name = Str(Name(op), "/", s.key_heads, "x", s.heads, "x", s.key_dim, "x", s.value_dim,
                 s.tiled ? "/tiled" : "", c.chosen > 0 ? "/skips" : "", "/channels=", s.channels,
                 "/taps=", s.taps, c.silu ? "/silu" : "", c.bias ? "/bias" : "",
                 "/page=", c.kv.page_size, "/", batch);
    cases.push_back(std::move(c));
  };
  // Channels: two of each key head's, and the values.
  constexpr StateLayout kShapes[] = {
      {256, 4, 2, 4, 32, 32}, {150, 3, 2, 6, 24, 9, true}, {512, 2, 1, 2, 128, 128}};
  const auto add_all = [&](const StateLayout& shape, int64_t skips) {
    for (const int64_t page : {16, 32}) {
      for (const auto& [name, sequences] : batches) {
        add({.op = op,
             .rows = 0,
             .bias = shape.taps == 3,
             .chosen = skips,
             .kv = {.page_size = page, .dtype = DType::kF32, .state = shape},
             .sequences = sequences,
             .silu = shape.taps == 4},
            name);
      }
    }
  };
  for (const StateLayout& shape : kShapes) add_all(shape, 0);
  if (op == Op::kConvolve) {
    add_all({.channels = 70, .taps = 3}, 0);  // and nothing else
  } else {
    for (const StateLayout& shape : {kShapes[0], kShapes[2], StateLayout{111, 3, 1, 7, 24, 9}}) {
      add_all(shape, 1);
    }
  }
  const auto bench = [&](size_t requests, CaseSequence each, const StateLayout& shape) {
    add({.op = op,
         .rows = 0,
         .chosen = shape.key_heads == 1 ? 1 : 0,
         .kv = {.page_size = 32, .dtype = DType::kF32, .state = shape},
         .sequences = std::vector<CaseSequence>(requests, each),
         .silu = true,
         .bench = true,
         .slow = true},
        Str("requests=", requests, "/rows=", each.rows, "/at=", each.first_position));
  };
  // Qwen 3.5's 0.8B and Granite 4's H-Micro.
  for (const StateLayout& shape :
       {StateLayout{6144, 4, 16, 16, 128, 128}, StateLayout{4352, 4, 1, 64, 128, 64}}) {
    for (const size_t requests : {1, 8}) bench(requests, {1, 527}, shape);
    bench(1, {512, 0}, shape);
  }
}
void AddConvolutions(std::vector<OpCase>& cases) { AddStateOps(cases, Op::kConvolve); }
void AddDeltas(std::vector<OpCase>& cases) { AddStateOps(cases, Op::kGatedDelta); }

double StateBytes(const OpRun& run) {
  const StateLayout& state = run.op_case().kv.state;
  return static_cast<double>(std::ssize(run.op_case().sequences) * state.heads * state.key_dim *
                             state.value_dim) *
         sizeof(float);
}

void MakeCache(OpRun& run, Random& random) {
  const OpCase& c = run.op_case();
  run.cache = std::make_unique<KvCaseCache>(c.kv, c.sequences, run.backend(), random,
                                            /*bf16=*/false, /*fill_chunk=*/false);
}

void PrepareConvolution(OpRun& run, uint64_t seed) {
  const OpCase& c = run.op_case();
  const StateLayout& state = c.kv.state;
  Random random(seed);
  MakeCache(run, random);
  const auto normal = [&] { return random.Normal(); };
  GuardedTensor& x = run.Add("x", Role::kInput, c.rows, c.cols);
  GuardedTensor& out = run.Add("out", Role::kOutput, c.rows, c.cols);
  GuardedTensor& weight = run.Add("weight", Role::kInput, 1, state.taps * c.cols);
  GuardedTensor& bias = run.Add("bias", Role::kInput, 1, c.cols);
  for (GuardedTensor* tensor : {&x, &weight, &bias}) tensor->Fill(normal);
  run.call = [&run, &c, &x, &out, &weight, &bias, spans = std::vector<SequenceSpan>()](
                 int64_t begin, int64_t count) mutable {
    run.backend().Convolve(x.Rows(begin, count), weight.view().Row<float>(0),
                           c.bias ? bias.view().Row<float>(0) : nullptr, c.silu,
                           run.ViewOf(begin, count, spans), out.Rows(begin, count));
  };
  run.bytes_moved = 3 * x.bytes();
  run.operations_done = 2.0 * static_cast<double>(c.rows * c.cols * state.taps);
}

void PrepareDelta(OpRun& run, uint64_t seed) {
  const OpCase& c = run.op_case();
  const StateLayout& state = c.kv.state;
  Random random(seed);
  MakeCache(run, random);
  const auto normal = [&] { return random.Normal(); };
  const int64_t values = state.heads * state.value_dim;
  GuardedTensor& qkv =
      run.Add("qkv", Role::kInput, c.rows, 2 * state.key_heads * state.key_dim + values);
  GuardedTensor& decay = run.Add("decay", Role::kInput, c.rows, state.heads);
  const bool skips = c.chosen > 0;  // instead of beta
  GuardedTensor& beta = skips ? run.Add("skips", Role::kInput, 1, state.heads)
                              : run.Add("beta", Role::kInput, c.rows, state.heads);
  GuardedTensor& rates = run.Add("rates", Role::kInput, 1, state.heads);
  GuardedTensor& biases = run.Add("biases", Role::kInput, 1, state.heads);
  GuardedTensor& out = run.Add("out", Role::kOutput, c.rows, values);
  for (GuardedTensor* tensor : {&qkv, &decay, &beta, &biases}) tensor->Fill(normal);
  rates.Fill([&] { return std::exp2(random.Normal() - 2); });
  run.call = [&run, &qkv, &decay, &beta, &rates, &biases, &out, skips,
              spans = std::vector<SequenceSpan>()](int64_t begin, int64_t count) mutable {
    run.backend().GatedDelta(qkv.Rows(begin, count), decay.Rows(begin, count),
                             skips ? Tensor() : beta.Rows(begin, count), rates.view().Row<float>(0),
                             biases.view().Row<float>(0),
                             skips ? beta.view().Row<float>(0) : nullptr,
                             run.ViewOf(begin, count, spans), out.Rows(begin, count));
  };
  run.bytes_moved = qkv.bytes() + out.bytes() + StateBytes(run);
  // A state is decayed, read twice and changed.
  run.operations_done =
      7.0 * static_cast<double>(c.rows * state.heads * state.key_dim * state.value_dim);
}

}  // namespace

extern const OpRow kConvolveRow = {"convolve", AddConvolutions, PrepareConvolution};
extern const OpRow kGatedDeltaRow = {"gated_delta", AddDeltas, PrepareDelta};

}  // namespace treadle
