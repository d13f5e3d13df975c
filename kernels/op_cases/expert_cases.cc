// Route and Mix. Real shapes: 8 of 128 experts (Qwen3-30B-A3B) and 2 of 8 (Mixtral).
#include <cmath>

#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/random.h"

namespace treadle {
namespace {

void Add(std::vector<OpCase>& cases, OpCase c) {
  c.name = Str(Name(c.op), "/", c.chosen, "x", c.cols, c.normalize ? "/normalize" : "",
               c.sigmoid ? "/sigmoid" : "", c.bias ? "/bias" : "", c.scaled ? "/scales" : "",
               c.groups > 1 ? Str("/groups=", c.used_groups, "of", c.groups) : "",
               c.accumulate ? "/add" : "", "/rows=", c.rows);
  cases.push_back(std::move(c));
}

void AddRoutes(std::vector<OpCase>& cases) {
  for (const int64_t rows : {1, 3, 70}) {
    for (const bool normalize : {false, true}) {
      for (const auto& [experts, chosen] :
           {std::pair(1, 1), {6, 2}, {8, 8}, {37, 5}, {128, 8}, {130, 33}}) {
        Add(cases, {.op = Op::kRoute,
                    .rows = rows,
                    .cols = experts,
                    .chosen = chosen,
                    .normalize = normalize});
        Add(cases, {.op = Op::kRoute,
                    .rows = rows,
                    .cols = experts,
                    .bias = normalize,
                    .chosen = chosen,
                    .normalize = normalize,
                    .sigmoid = true});
      }
    }
  }
  for (const bool sigmoid : {false, true}) {
    Add(cases, {.op = Op::kRoute,
                .rows = 70,
                .cols = 37,
                .chosen = 5,
                .normalize = true,
                .sigmoid = sigmoid,
                .scaled = true});
  }
  struct Groups {
    int64_t experts, chosen, groups, used;
  };
  for (const auto& [experts, chosen, groups, used] :
       {Groups{4, 2, 2, 1}, {21, 5, 7, 3}, {256, 8, 8, 4}}) {
    for (const auto& [sigmoid, bias] : {std::pair(false, false), {true, false}, {true, true}}) {
      Add(cases, {.op = Op::kRoute,
                  .rows = 70,
                  .cols = experts,
                  .bias = bias,
                  .chosen = chosen,
                  .normalize = sigmoid,
                  .sigmoid = sigmoid,
                  .groups = groups,
                  .used_groups = used});
    }
  }
  Add(cases,
      {.op = Op::kRoute, .rows = 32, .cols = 128, .chosen = 8, .normalize = true, .bench = true});
}

void PrepareRoute(OpRun& run, uint64_t seed) {
  const OpCase& c = run.op_case();
  GuardedTensor& logits = run.Add("logits", Role::kInput, c.rows, c.cols);
  GuardedTensor& ids = run.Add("ids", Role::kOutput, c.rows, c.chosen);
  GuardedTensor& weights = run.Add("weights", Role::kOutput, c.rows, c.chosen);
  GuardedTensor *bias = nullptr, *scales = nullptr;
  if (c.bias) bias = &run.Add("bias", Role::kInput, 1, c.cols);
  if (c.scaled) scales = &run.Add("scales", Role::kInput, 1, c.cols);
  Random random(seed);
  // One row in three has ties, of experts with biases in steps.
  if (c.bias) bias->Fill([&] { return std::round(4 * random.Normal()) / 16; });
  if (c.scaled) scales->Fill([&] { return std::fabs(random.Normal()); });
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t i = 0; i < c.cols; ++i) {
      const float x = (c.bias ? 1 : 3) * random.Normal();
      // Sums of a group's sigmoids of x and -x would be ties of another rounding.
      logits.Row(row)[i] = row % 3 == 1 ? std::round(c.groups > 1 ? std::fabs(x) : x) : x;
    }
  }
  run.call = [&run, &c, &logits, &ids, &weights, bias, scales](int64_t begin, int64_t count) {
    const Routing routing = {
        .sigmoid = c.sigmoid,
        .normalize = c.normalize,
        .scale = c.sigmoid ? 2.5f : 1.0f,
        .bias = bias == nullptr ? nullptr : bias->view().Row<float>(0),
        .expert_scales = scales == nullptr ? nullptr : scales->view().Row<float>(0),
        .groups = c.groups,
        .used_groups = c.used_groups};
    run.backend().Route(logits.Rows(begin, count), routing, ids.Rows(begin, count),
                        weights.Rows(begin, count));
  };
  run.bytes_moved = logits.bytes() + ids.bytes() + weights.bytes();
}

void AddMixes(std::vector<OpCase>& cases) {
  for (const int64_t rows : {1, 3, 34}) {
    for (const bool add : {false, true}) {
      for (const auto& [cols, chosen] : {std::pair(1, 1), {33, 2}, {576, 8}}) {
        Add(cases,
            {.op = Op::kMix, .rows = rows, .cols = cols, .accumulate = add, .chosen = chosen});
      }
    }
  }
  for (const int64_t rows : {1, 32}) {
    Add(cases, {.op = Op::kMix,
                .rows = rows,
                .cols = 2048,
                .accumulate = true,
                .chosen = 8,
                .bench = true});
  }
}

void PrepareMix(OpRun& run, uint64_t seed) {
  const OpCase& c = run.op_case();
  const int64_t items = c.rows * c.chosen;
  GuardedTensor& x = run.Add("x", Role::kInput, items, c.cols);
  GuardedTensor& weights = run.Add("weights", Role::kInput, c.rows, c.chosen);
  GuardedTensor& out = run.Add("out", Role::kOutput, c.rows, c.cols);
  Random random(seed);
  x.Fill([&] { return random.Normal(); });
  weights.Fill([&] { return std::fabs(random.Normal()); });
  if (c.accumulate) out.Fill([&] { return random.Normal(); });
  for (int64_t i = 0; i < items; ++i) run.ids.push_back(static_cast<int32_t>(random.Below(items)));
  run.call = [&run, &c, &x, &weights, &out](int64_t begin, int64_t count) {
    run.backend().Mix(x.view(), std::span(run.ids).subspan(begin * c.chosen, count * c.chosen),
                      weights.Rows(begin, count), c.accumulate, out.Rows(begin, count));
  };
  run.bytes_moved = x.bytes() + (c.accumulate ? 2 : 1) * out.bytes();
  run.operations_done = 2.0 * static_cast<double>(items * c.cols);
}

}  // namespace

extern const OpRow kRouteRow = {"route", AddRoutes, PrepareRoute};
extern const OpRow kMixRow = {"mix", AddMixes, PrepareMix};

}  // namespace treadle
