// AddLowRank. Two adapters of different rank and type, each on a third of the rows.
#include <array>

#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/random.h"

namespace treadle {
namespace {

constexpr std::array kTypes = {DType::kF32, DType::kF16, DType::kBF16};

void AddLowRanks(std::vector<OpCase>& cases) {
  const auto add = [&](OpCase c) {
    c.op = Op::kAddLowRank;
    c.name =
        Str("add_low_rank/", c.cols, "x", c.chosen, "x", c.outputs[0],
            c.outputs.size() > 1 ? "/fused" : "", c.normalize ? "/inner" : "", "/rows=", c.rows);
    cases.push_back(std::move(c));
  };
  for (const int64_t rows : {1, 3, 8, 70}) {
    add({.rows = rows, .cols = 64, .outputs = {64}, .chosen = 16});
    add({.rows = rows, .cols = 33, .outputs = {300, 17, 1}, .chosen = 5});
    add({.rows = rows, .cols = 9, .outputs = {47}, .chosen = 9, .normalize = true});
  }
  for (const int64_t rows : {1, 16, 512}) {
    add({.rows = rows, .cols = 576, .outputs = {1536, 1536}, .chosen = 16, .bench = true});
    add({.rows = rows, .cols = 1536, .outputs = {576}, .chosen = 16, .bench = true});
  }
}

// chosen: the first adapter's rank; normalize: x is multiplied by A already.
void PrepareLowRank(OpRun& run, uint64_t seed) {
  const OpCase& c = run.op_case();
  Random random(seed);
  GuardedTensor& x = run.Add("x", Role::kInput, c.rows, c.cols);
  x.Fill([&] { return random.Normal(); });
  // The factors of an adapter for an output.
  struct Factors {
    const GuardedTensor *a, *b;
    int64_t rank;
    size_t output, adapter;
  };
  std::vector<Factors> all;
  std::vector<GuardedTensor*> outputs;
  for (size_t i = 0; i < c.outputs.size(); ++i) {
    outputs.push_back(&run.Add("out", Role::kOutput, c.rows, c.outputs[i]));
    outputs.back()->Fill([&] { return random.Normal(); });
    for (size_t adapter = 0; adapter < 2; ++adapter) {
      const int64_t rank = c.chosen + (c.normalize ? 0 : 8 * static_cast<int64_t>(adapter));
      const DType type = kTypes[(i + adapter + static_cast<size_t>(c.rows)) % kTypes.size()];
      // [rows, cols], and zeros.
      const auto make = [&](std::string_view name, int64_t rows, int64_t cols) {
        GuardedTensor& factor = run.Add(name, Role::kInput, 1, LowRankElements(rows, cols), type);
        factor.Fill([] { return 0; });
        for (int64_t at = 0; at < rows * cols; ++at) {
          factor.Row(0)[LowRankAt(rows, at / cols, at % cols)] = random.Normal() / 4;
        }
        return &factor;
      };
      const GuardedTensor* const a = c.normalize ? nullptr : make("a", c.cols, rank);
      all.push_back({a, make("b", rank, c.outputs[i]), rank, i, adapter});
    }
    const double bytes = static_cast<double>(c.chosen * (c.cols + c.outputs[i]));
    run.bytes_moved += bytes * sizeof(float) + 2 * outputs.back()->bytes();
    run.operations_done += 2.0 * static_cast<double>(c.rows) * bytes * 2 / 3;
  }
  run.call = [&run, &x, all, outputs](int64_t begin, int64_t count) {
    // The rows of each adapter; every third has none.
    std::array<std::vector<int32_t>, 3> rows;
    for (int64_t row = 0; row < count; ++row) {
      rows[static_cast<size_t>((begin + row) % 3)].push_back(static_cast<int32_t>(row));
    }
    std::vector<LowRankProduct> products;
    for (const Factors& f : all) {
      products.push_back({.by = {.a = f.a == nullptr ? nullptr : f.a->view().data,
                                 .b = f.b->view().data,
                                 .type = f.b->dtype(),
                                 .rank = f.rank},
                          .rows = rows[f.adapter],
                          .out = outputs[f.output]->Rows(begin, count)});
    }
    run.backend().AddLowRank(x.Rows(begin, count), products);
  };
}

}  // namespace

extern const OpRow kAddLowRankRow = {"add_low_rank", AddLowRanks, PrepareLowRank};

}  // namespace treadle
