// Embed and MatMul: ops on packed weights. Real shapes are those of the default model
// (SmolLM2-135M: hidden 576, feed-forward 1536, 9 query and 3 K/V heads of 64, vocabulary 49,152);
// odd ones straddle dispatch thresholds.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/op_cases/instrumented.h"
#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/random.h"

namespace treadle {
namespace {

std::string Join(const std::vector<int64_t>& values) {
  std::string text;
  for (int64_t value : values) {
    if (!text.empty()) text += ',';
    text += std::to_string(value);
  }
  return text;
}

void AddMatMul(std::vector<OpCase>& cases, OpCase c) {
  c.op = Op::kMatMul;
  c.name =
      Str("matmul/", c.format->name, "/", Join(c.outputs), "x", c.cols, c.bias ? "/bias" : "",
          c.accumulate ? "/add" : "", c.row_order ? "/reorder" : "", c.parts ? "/parts" : "",
          c.transposed ? "/transposed" : "", c.scale_block > 0 ? Str("/block=", c.scale_block) : "",
          c.outlier_threshold != 6.0f ? Str("/threshold=", c.outlier_threshold) : "",
          c.outlier_rule == OutlierRule::kPerCall ? "/per_call" : "", "/rows=", c.rows);
  cases.push_back(std::move(c));
}

// On both sides of every kernel's thresholds.
std::vector<int64_t> RowCounts() {
  if (kInstrumented) return {1, 3, 9, 17};
  return {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 64, 512};
}

void AddOddMatMuls(std::vector<OpCase>& cases) {
  for (const WeightFormat& format : WeightFormats()) {
    if (format.apart()) continue;
    const auto add = [&](OpCase c) {
      c.format = &format;
      AddMatMul(cases, std::move(c));
    };
    const bool dense = format.block == 1;
    const int64_t k = dense ? 33 : 3 * format.block;
    const int64_t one = format.block;
    for (int64_t rows : RowCounts()) add({.rows = rows, .cols = k, .outputs = {40}});
    for (int64_t rows : {1, 6, 20}) {
      add({.rows = rows, .cols = one, .outputs = {1}});
      add({.rows = rows, .cols = one, .outputs = {17, 16, 5}, .bias = true});
      add({.rows = rows, .cols = k, .outputs = {48}, .bias = true, .accumulate = true});
      add({.rows = rows, .cols = k, .outputs = {50}, .row_order = true});
      if (!dense) continue;
      add({.rows = rows, .cols = k, .outputs = {35}, .row_order = true, .transposed = true});
    }
  }
}

// Codes without constants among them: k may be anything, and a block of weights may straddle rows.
void AddApartMatMuls(std::vector<OpCase>& cases) {
  constexpr int64_t kBlocks[] = {64, 32, 128, 4096, 96 * 40};  // the last: all of [40, 96]
  for (const WeightFormat& format : WeightFormats()) {
    if (!format.apart()) continue;
    const bool k_bit = format.codebook.empty();
    const bool by_rows = format.code_bits == 8 && !k_bit;
    size_t next_block = 0;
    const auto add = [&](OpCase c) {
      c.format = &format;
      c.scale_block = by_rows ? 0 : kBlocks[next_block++ % std::size(kBlocks)];
      AddMatMul(cases, std::move(c));
    };
    if (k_bit || format.name.starts_with("gptq")) {
      for (int64_t rows : {1, 5, 20}) add({.rows = rows, .cols = 96, .outputs = {40}});
      add({.rows = 3, .cols = 33, .outputs = {17, 5}, .bias = true, .row_order = true});
      continue;
    }
    for (int64_t rows : RowCounts()) add({.rows = rows, .cols = 96, .outputs = {40}});
    for (int64_t rows : {1, 6, 20}) {
      add({.rows = rows, .cols = 1, .outputs = {1}});
      add({.rows = rows, .cols = 33, .outputs = {17, 16, 5}, .bias = true});
      add({.rows = rows, .cols = 160, .outputs = {48}, .bias = true, .accumulate = true});
      add({.rows = rows, .cols = 576, .outputs = {50}, .row_order = true});
    }
  }
}

// Every format, and each kernel's thresholds.
void AddPartMatMuls(std::vector<OpCase>& cases) {
  for (const WeightFormat& format : WeightFormats()) {
    const int64_t k = std::lcm<int64_t>(32, format.block);
    for (const int64_t rows : {1, 7, 34}) {
      AddMatMul(cases, {.rows = rows,
                        .cols = k,
                        .format = &format,
                        .outputs = {40, 17, 33},
                        .bias = rows == 7,
                        .parts = true});
    }
  }
}

void AddOutlierMatMuls(std::vector<OpCase>& cases) {
  const WeightFormat* format = FindWeightFormat("int8");
  for (int64_t rows : {1, 7, 20}) {
    OpCase c = {.rows = rows, .cols = 1536, .format = format, .outputs = {33, 20}, .bias = true};
    AddMatMul(cases, c);
    for (float threshold : {0.0f, 3.0f}) {
      c.outlier_threshold = threshold;
      AddMatMul(cases, c);
    }
    c.outlier_threshold = 6.0f;
    c.outlier_rule = OutlierRule::kPerCall;
    AddMatMul(cases, c);
  }
  // A prompt: where the CUDA backend has warpgroups, they take it (with four multiprocessors).
  AddMatMul(cases, {.rows = 135, .cols = 70, .format = format, .outputs = {140, 135, 130}});
}

// The four products of a layer of the default model.
void AddLayer(std::vector<OpCase>& cases, std::string_view format, int64_t rows, bool bench,
              bool slow) {
  OpCase c = {.rows = rows,
              .cols = 576,
              .format = FindWeightFormat(format),
              .outputs = {576, 192, 192},
              .bench = bench,
              .slow = slow};
  AddMatMul(cases, c);
  c.outputs = {1536, 1536};
  AddMatMul(cases, c);
  c.outputs = {576};
  c.accumulate = true;
  AddMatMul(cases, c);
  c.cols = 1536;
  AddMatMul(cases, c);
}

void AddModelMatMuls(std::vector<OpCase>& cases) {
  for (std::string_view name : {"q4_1", "q4_0", "q8_0", "f16"}) {
    for (int64_t rows : {1, 4, 8, 16, 32, 64, 512}) {
      AddLayer(cases, name, rows, name == "q4_1" || rows == 1 || rows == 16, rows > 4);
    }
  }
  // The products that low-bit weights must not be slower than, and theirs.
  for (std::string_view name : {"bf16", "int8", "nf4"}) {
    for (int64_t rows : {1, 8, 32, 512}) AddLayer(cases, name, rows, true, rows > 1);
  }
  const auto add = [&](std::string_view name, OpCase c) {
    c.format = FindWeightFormat(name);
    c.bench = true;
    AddMatMul(cases, std::move(c));
  };
  const auto add_head = [&](std::string_view name, int64_t rows) {
    add(name, {.rows = rows, .cols = 576, .outputs = {49152}, .slow = true});
  };
  for (int64_t rows : {1, 8, 32, 64}) add_head("q8_0", rows);
  for (int64_t rows : {1, 32}) add_head("int8", rows);
  // Formats that 576 does not suit, or that are rarer, on a feed-forward of 1536.
  for (std::string_view name : {"q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl",
                                "iq4_xs", "mxfp4", "f32", "bf16", "fp8", "gptq4"}) {
    for (int64_t rows : {1, 16, 64}) {
      add(name, {.rows = rows, .cols = 1536, .outputs = {576}, .slow = rows > 1});
    }
  }
}

void AddEmbeds(std::vector<OpCase>& cases) {
  const auto add = [&](OpCase c) {
    c.op = Op::kEmbed;
    c.name = Str("embed/", c.format->name, "/", c.outputs[0], "x", c.cols,
                 c.accumulate ? "/add" : "", "/rows=", c.rows);
    cases.push_back(std::move(c));
  };
  for (const WeightFormat& format : WeightFormats()) {
    const int64_t k = format.block == 1 ? 45 : 2 * format.block;
    add({.rows = 1, .cols = k, .format = &format, .outputs = {37}});
    add({.rows = 19, .cols = k, .format = &format, .outputs = {37}});
    add({.rows = 19, .cols = k, .format = &format, .outputs = {50}, .accumulate = true});
  }
  const WeightFormat* q8_0 = FindWeightFormat("q8_0");
  add({.rows = 512, .cols = 576, .format = q8_0, .outputs = {4096}, .bench = true, .slow = true});
}

void AddMatMuls(std::vector<OpCase>& cases) {
  AddModelMatMuls(cases);
  AddOddMatMuls(cases);
  AddApartMatMuls(cases);
  AddPartMatMuls(cases);
  AddOutlierMatMuls(cases);
}

// A random matrix [n, cols] as the case wants it stored.
PackedCase& AddWeight(OpRun& run, int64_t n, uint64_t seed) {
  const OpCase& c = run.op_case();
  PackedCase& weight = run.weights.emplace_back();
  RandomMatrix& matrix = weight.matrix;
  matrix = MakeRandomMatrix(*c.format, n, c.cols, seed, c.scale_block);
  matrix.source.transposed = c.transposed;
  matrix.source.of_layer = c.op == Op::kMatMul;
  if (matrix.constants != nullptr) {
    matrix.constants->outlier_threshold = c.outlier_threshold;
    matrix.constants->outlier_rule = c.outlier_rule;
  }
  if (c.row_order) {
    Random random(seed);
    matrix.row_order.resize(static_cast<size_t>(n));
    std::iota(matrix.row_order.begin(), matrix.row_order.end(), 0);
    for (int64_t i = n - 1; i > 0; --i) {
      std::swap(matrix.row_order[i], matrix.row_order[random.Below(i + 1)]);
    }
    matrix.source.row_order = matrix.row_order;
  }
  auto packed = run.backend().Pack(matrix.source);
  TREADLE_CHECK(packed.ok());
  weight.packed = *std::move(packed);
  return weight;
}

void PrepareEmbed(OpRun& run, uint64_t seed) {
  const OpCase& c = run.op_case();
  const PackedCase& table = AddWeight(run, c.outputs[0], seed);
  GuardedTensor& out = run.Add("out", Role::kOutput, c.rows, c.cols);
  Random random(seed);
  // The table is all of a vocabulary, or a part of it.
  run.first_id = random.Below(2) == 0 ? 0 : 37;
  const auto n = static_cast<int32_t>(c.outputs[0]);
  const int32_t elsewhere[] = {-1, run.first_id - 1, run.first_id + n, run.first_id + n + 5};
  for (int64_t i = 0; i < c.rows; ++i) {
    run.ids.push_back(random.Below(8) == 0 ? elsewhere[random.Below(4)]
                                           : run.first_id + static_cast<int32_t>(random.Below(n)));
  }
  if (c.accumulate) out.Fill([&] { return random.Normal(); });
  run.call = [&run, &c, &table, &out](int64_t begin, int64_t count) {
    run.backend().Embed(*table.packed, std::span(run.ids).subspan(begin, count), run.first_id,
                        c.accumulate, out.Rows(begin, count));
  };
  const double row = static_cast<double>(table.packed->bytes()) / c.outputs[0];
  run.bytes_moved = static_cast<double>(c.rows) * row + out.bytes();
  run.operations_done = 2.0 * static_cast<double>(c.rows * c.cols);
}

// In every three rows the first has a few (as real models: in features that recur, and elsewhere),
// the last has elements just below the threshold, and the other none.
void PlantOutliers(GuardedTensor& tensor, Random& random) {
  const int64_t feature = random.Below(tensor.cols());
  for (int64_t row = 0; row < tensor.rows(); ++row) {
    float* x = tensor.Row(row);
    if (row % 3 == 2) x[feature] = std::nextafter(6.0f, 0.0f);
    if (row % 3 != 0) continue;
    x[feature] = row % 2 == 0 ? 6.0f : -60.0f;
    for (int64_t i = 0; i < tensor.cols() / 512; ++i) x[random.Below(tensor.cols())] = 25.0f;
    if (row % 4 == 3) x[0] = x[tensor.cols() - 1] = -7.5f;
  }
}

// The name of each product's output.
constexpr std::string_view kOutNames[] = {"out 0", "out 1", "out 2"};
constexpr std::string_view kBiasNames[] = {"bias 0", "bias 1", "bias 2"};

void PrepareMatMul(OpRun& run, uint64_t seed) {
  const OpCase& c = run.op_case();
  for (const int64_t n : c.outputs) AddWeight(run, n, seed + run.weights.size());
  DType input = DType::kF32;
  if (c.input_type) {
    std::vector<const PackedMatrix*> packed;
    for (const PackedCase& weight : run.weights) packed.push_back(weight.packed.get());
    input = run.backend().InputType(packed);
  }
  GuardedTensor& x = run.Add("x", Role::kInput, c.rows, c.cols, input);
  Random random(seed);
  if (c.format->activations == ActivationPolicy::kRowInt8) {
    x.Fill([&] { return random.Normal(); });  // within 3.5
    PlantOutliers(x, random);
  } else {
    x.Fill([&] { return random.Normal() * (random.Below(100) == 0 ? 20.0f : 1.0f); });
  }
  if (c.rows > 1) std::fill_n(x.Row(1), c.cols, 0.0f);  // a zero row has absmax 0
  run.bytes_moved = x.bytes();
  std::vector<Projection> whole;
  for (size_t i = 0; i < c.outputs.size(); ++i) {
    const int64_t n = c.outputs[i];
    const auto [first, end] = c.RowsOf(i);
    GuardedTensor& out = run.Add(kOutNames[i], Role::kOutput, end - first, n);
    GuardedTensor& bias = run.Add(kBiasNames[i], Role::kInput, 1, n);
    bias.Fill([&] { return random.Normal(); });
    if (c.accumulate) out.Fill([&] { return random.Normal(); });
    whole.push_back({.weight = run.weights[i].packed.get(),
                     .bias = c.bias ? bias.view().Row<float>(0) : nullptr,
                     .out = out.view(),
                     .accumulate = c.accumulate,
                     .first_row = first});
    run.bytes_moved +=
        static_cast<double>(run.weights[i].packed->bytes()) + (c.accumulate ? 2 : 1) * out.bytes();
    run.operations_done += 2.0 * static_cast<double>(n * c.cols * out.rows());
  }
  run.call = [&run, &x, whole, projections = whole](int64_t begin, int64_t count) mutable {
    for (size_t i = 0; i < whole.size(); ++i) {
      const auto& [weight, bias, out, accumulate, first_row] = whole[i];
      const int64_t first = std::clamp(first_row, begin, begin + count);
      const int64_t end = std::clamp(first_row + out.rows, begin, begin + count);
      projections[i].first_row = first - begin;
      projections[i].out = out.Rows(end > first ? first - first_row : 0, end - first);
    }
    run.backend().MatMul(x.Rows(begin, count), projections);
  };
}

}  // namespace

extern const OpRow kEmbedRow = {"embed", AddEmbeds, PrepareEmbed};
extern const OpRow kMatMulRow = {"matmul", AddMatMuls, PrepareMatMul};

}  // namespace treadle
