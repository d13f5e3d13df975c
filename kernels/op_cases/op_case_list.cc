// The one list. Real shapes are those of the default model (SmolLM2-135M: hidden 576, feed-forward
// 1536, 9 query and 3 K/V heads of 64, vocabulary 49,152); odd ones straddle dispatch thresholds.
#include <iterator>

#include "kernels/op_cases/instrumented.h"
#include "kernels/op_cases/op_cases.h"

namespace treadle {
namespace {

using Cases = std::vector<OpCase>;

std::string Join(const std::vector<int64_t>& values) {
  std::string text;
  for (int64_t value : values) {
    if (!text.empty()) text += ',';
    text += std::to_string(value);
  }
  return text;
}

void AddMatMul(Cases& cases, OpCase c) {
  c.op = Op::kMatMul;
  c.name =
      Str("matmul/", c.format->name, "/", Join(c.outputs), "x", c.cols, c.bias ? "/bias" : "",
          c.accumulate ? "/add" : "", c.row_order ? "/reorder" : "",
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

void AddOddMatMuls(Cases& cases) {
  for (const WeightFormat& format : WeightFormats()) {
    if (format.apart()) continue;
    const bool dense = format.block == 1;
    const int64_t k = dense ? 33 : 3 * format.block;
    for (int64_t rows : RowCounts()) {
      AddMatMul(cases, {.rows = rows, .cols = k, .format = &format, .outputs = {40}});
    }
    const int64_t one = dense ? 1 : format.block;
    for (int64_t rows : {1, 6, 20}) {
      AddMatMul(cases, {.rows = rows, .cols = one, .format = &format, .outputs = {1}});
      AddMatMul(
          cases,
          {.rows = rows, .cols = one, .format = &format, .outputs = {17, 16, 5}, .bias = true});
      AddMatMul(cases, {.rows = rows,
                        .cols = k,
                        .format = &format,
                        .outputs = {48},
                        .bias = true,
                        .accumulate = true});
      AddMatMul(cases,
                {.rows = rows, .cols = k, .format = &format, .outputs = {50}, .row_order = true});
      if (!dense) continue;
      AddMatMul(cases, {.rows = rows,
                        .cols = k,
                        .format = &format,
                        .outputs = {35},
                        .row_order = true,
                        .transposed = true});
    }
  }
}

// Codes without constants among them: k may be anything, and a block of weights may straddle rows.
void AddApartMatMuls(Cases& cases) {
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

void AddOutlierMatMuls(Cases& cases) {
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
void AddLayer(Cases& cases, std::string_view format, int64_t rows, bool bench, bool slow) {
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

void AddModelMatMuls(Cases& cases) {
  for (std::string_view name : {"q4_1", "q4_0", "q8_0", "f16"}) {
    for (int64_t rows : {1, 4, 8, 16, 32, 64, 512}) {
      AddLayer(cases, name, rows, name == "q4_1" || rows == 1 || rows == 16, rows > 4);
    }
  }
  // What low-bit weights must not be slower than, and they.
  for (std::string_view name : {"bf16", "int8", "nf4"}) {
    for (int64_t rows : {1, 8, 32, 512}) AddLayer(cases, name, rows, true, rows > 1);
  }
  const auto add_head = [&](std::string_view name, int64_t rows) {
    AddMatMul(cases, {.rows = rows,
                      .cols = 576,
                      .format = FindWeightFormat(name),
                      .outputs = {49152},
                      .bench = true,
                      .slow = true});
  };
  for (int64_t rows : {1, 8, 32, 64}) add_head("q8_0", rows);
  for (int64_t rows : {1, 32}) add_head("int8", rows);
  // Formats that 576 does not suit, or that are rarer, on a feed-forward of 1536.
  for (std::string_view name :
       {"q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "iq4_nl", "mxfp4", "f32", "bf16", "fp8", "gptq4"}) {
    for (int64_t rows : {1, 16, 64}) {
      AddMatMul(cases, {.rows = rows,
                        .cols = 1536,
                        .format = FindWeightFormat(name),
                        .outputs = {576},
                        .bench = true,
                        .slow = rows > 1});
    }
  }
}

void AddEmbeds(Cases& cases) {
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

void AddFeatureOps(Cases& cases) {
  const auto add = [&](OpCase c) {
    c.name = Str(Name(c.op), c.bias ? "/bias" : "", c.in_place ? "/in_place" : "", "/", c.cols,
                 "/rows=", c.rows);
    cases.push_back(std::move(c));
  };
  for (Op op : {Op::kRmsNorm, Op::kLayerNorm, Op::kSwiGlu, Op::kGelu, Op::kGather, Op::kCopy}) {
    for (int64_t cols : {1, 7, 16, 33, 576, 1536, 2307}) {
      for (int64_t rows : {1, 3, 17, 64}) {
        add({.op = op, .rows = rows, .cols = cols});
        if (op == Op::kRmsNorm || op == Op::kSwiGlu || op == Op::kGelu) {
          add({.op = op, .rows = rows, .cols = cols, .in_place = true});
        }
        if (op == Op::kLayerNorm) {
          add({.op = op, .rows = rows, .cols = cols, .in_place = true, .bias = true});
        }
      }
    }
    const int64_t cols = op == Op::kSwiGlu || op == Op::kGelu ? 1536 : 576;
    for (int64_t rows : {32, 512}) {
      add({.op = op,
           .rows = rows,
           .cols = cols,
           .in_place = op == Op::kGelu,
           .bench = true,
           .slow = rows > 32});
    }
  }
}

struct Heads {
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
};

void AddKvOp(Cases& cases, OpCase c, std::string_view batch) {
  c.rows = 0;
  for (const CaseSequence& sequence : c.sequences) c.rows += sequence.rows;
  c.name = Str(Name(c.op), "/", c.heads, "x", c.kv.kv_heads, "x", c.kv.head_dim, "/",
               Name(c.kv.dtype), "/page=", c.kv.page_size,
               c.op == Op::kRotateAndStoreKv ? Str("/rotary=", c.rotary_dims) : "", "/", batch);
  cases.push_back(std::move(c));
}

void AddKvOps(Cases& cases) {
  const std::pair<std::string_view, std::vector<CaseSequence>> batches[] = {
      {"first", {{1, 0}}},
      {"single_rows", {{1, 0}, {1, 15}, {1, 16}, {1, 63}, {1, 64}, {1, 65}, {1, 130}}},
      {"chunks", {{17, 0}, {33, 47}, {5, 126}}},
      {"page_ends", {{1, 31}, {2, 31}, {64, 64}, {16, 0}, {32, 32}}},
      {"mixed", {{1, 200}, {30, 0}, {2, 0, false}, {1, 64}, {20, 50}, {1, 0, false}, {1, 0}}},
      // Contexts that the CUDA backend splits.
      {"long", {{1, 300}, {3, 510}, {1, 5}, {1, 600}}},
  };
  constexpr Heads kHeads[] = {{9, 3, 64}, {4, 4, 80}, {8, 2, 128}, {2, 1, 32}, {3, 3, 24}};
  for (const Heads& h : kHeads) {
    for (DType dtype : {DType::kF16, DType::kF32}) {
      for (int64_t page : {16, 32, 64}) {
        for (const auto& [name, sequences] : batches) {
          OpCase c = {.op = Op::kAttention,
                      .heads = h.heads,
                      .kv = {h.kv_heads, h.head_dim, page, 0, dtype},
                      .sequences = sequences};
          AddKvOp(cases, c, name);
          c.op = Op::kRotateAndStoreKv;
          c.rotary_dims = page == 16 ? h.head_dim : page == 32 ? h.head_dim / 2 : 0;
          AddKvOp(cases, c, name);
        }
      }
    }
  }
  const auto bench = [&](Op op, int64_t requests, CaseSequence each) {
    OpCase c = {.op = op,
                .heads = 9,
                .kv = {3, 64, 32, 0, DType::kF16},
                .rotary_dims = 64,
                .sequences = std::vector<CaseSequence>(static_cast<size_t>(requests), each),
                .bench = true,
                .slow = true};
    AddKvOp(cases, c, Str("requests=", requests, "/rows=", each.rows, "/at=", each.first_position));
  };
  for (Op op : {Op::kAttention, Op::kRotateAndStoreKv}) {
    for (int64_t requests : {1, 16, 32}) bench(op, requests, {1, 511});
    bench(op, 1, {512, 0});
    bench(op, 1, {256, 1024});
  }
  for (DType dtype : {DType::kF16, DType::kF32}) {
    OpCase c = {.op = Op::kCopyPages,
                .rows = 9,
                .kv = {3, 64, 16, 0, dtype},
                .sequences = {{40, 0}, {33, 0}}};
    c.name = Str("copy_pages/", Name(dtype));
    c.bench = dtype == DType::kF16;
    cases.push_back(std::move(c));
  }
}

void AddSamples(Cases& cases) {
  using Sampling = OpCase::Sampling;
  const std::pair<std::string_view, Sampling> kinds[] = {
      {"greedy", Sampling::kGreedy},       {"plain", Sampling::kPlain},
      {"top_k", Sampling::kTopK},          {"top_p_min_p", Sampling::kTopPMinP},
      {"penalties", Sampling::kPenalties}, {"logprobs", Sampling::kLogprobs},
      {"mixed", Sampling::kMixed},
  };
  for (const auto& [name, sampling] : kinds) {
    for (auto [vocab, rows] : {std::pair<int64_t, int64_t>{49152, 3}, {1003, 24}, {5, 9}, {1, 2}}) {
      OpCase c = {.op = Op::kSample, .rows = rows, .cols = vocab, .sampling = sampling};
      c.name = Str("sample/", name, "/", vocab, "/rows=", rows);
      cases.push_back(c);
    }
    OpCase c = {.op = Op::kSample,
                .rows = 32,
                .cols = 49152,
                .sampling = sampling,
                .bench = true,
                .slow = true};
    c.name = Str("sample/", name, "/49152/rows=32");
    cases.push_back(std::move(c));
    // A third of that vocabulary.
    for (auto [tokens, rows] : {std::pair<int64_t, int64_t>{16384, 32}, {1003, 24}, {5, 9}}) {
      OpCase shard = {.op = Op::kSampleShard, .rows = rows, .cols = tokens, .sampling = sampling};
      shard.name = Str("sample_shard/", name, "/", tokens, "/rows=", rows);
      shard.bench = shard.slow = tokens == 16384;
      cases.push_back(std::move(shard));
    }
  }
}

Cases MakeCases() {
  Cases cases;
  AddModelMatMuls(cases);
  AddOddMatMuls(cases);
  AddApartMatMuls(cases);
  AddOutlierMatMuls(cases);
  AddEmbeds(cases);
  AddFeatureOps(cases);
  AddKvOps(cases);
  AddSamples(cases);
  return cases;
}

}  // namespace

std::span<const OpCase> OpCases() {
  static const Cases cases = MakeCases();
  return cases;
}

}  // namespace treadle
