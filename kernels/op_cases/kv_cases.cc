// Ops on the K/V cache.
#include <algorithm>
#include <cmath>

#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/random.h"

namespace treadle {
namespace {

void AddKvOp(std::vector<OpCase>& cases, OpCase c, std::string_view batch) {
  c.rows = 0;
  for (const CaseSequence& sequence : c.sequences) c.rows += sequence.rows;
  c.name = Str(Name(c.op), "/", c.heads, "x", c.kv.kv_heads, "x", c.kv.head_dim, "/",
               c.kv.latent_dim > 0 ? Str("latent=", c.kv.latent_dim, "/") : "", Name(c.kv.dtype),
               "/page=", c.kv.page_size,
               c.op == Op::kRotateAndStoreKv ? Str("/rotary=", c.rotary_dims) : "",
               c.window > 0 ? Str("/window=", c.window) : "", c.sloped ? "/sloped" : "",
               c.sunk ? "/sunk" : "", "/", batch);
  cases.push_back(std::move(c));
}

// RotateAndStoreKv and Attention.
void AddSequenceOps(std::vector<OpCase>& cases, Op op) {
  struct Heads {
    int64_t heads, kv_heads, head_dim, latent_dim = 0;
  };
  struct BatchOf {
    std::string_view name;
    std::vector<CaseSequence> sequences;
    int64_t window;  // of a further case
  };
  const BatchOf batches[] = {
      {"first", {{1, 0}}, 1},
      {"single_rows", {{1, 0}, {1, 15}, {1, 16}, {1, 63}, {1, 64}, {1, 65}, {1, 130}}, 64},
      {"chunks", {{17, 0}, {33, 47}, {5, 126}}, 5},
      {"page_ends", {{1, 31}, {2, 31}, {64, 64}, {16, 0}, {32, 32}}, 32},
      {"mixed", {{1, 200}, {30, 0}, {2, 0, false}, {1, 64}, {20, 50}, {1, 0, false}, {1, 0}}, 17},
      // Contexts that the CUDA backend splits.
      {"long", {{1, 300}, {3, 510}, {1, 5}, {1, 600}}, 70},
  };
  constexpr Heads kHeads[] = {{9, 3, 64}, {4, 4, 80},     {8, 2, 128},    {2, 1, 32},
                              {3, 3, 24}, {3, 1, 44, 36}, {16, 1, 96, 80}};
  for (const Heads& h : kHeads) {
    for (DType dtype : {DType::kF16, DType::kF32, DType::kI8}) {
      for (int64_t page : {16, 32, 64}) {
        for (const auto& [name, sequences, window] : batches) {
          OpCase c = {.op = op,
                      .heads = h.heads,
                      .kv = {h.kv_heads, h.head_dim, page, 0, dtype},
                      .sequences = sequences};
          c.kv.latent_dim = h.latent_dim;
          if (op == Op::kRotateAndStoreKv) {
            c.rotary_dims = page == 16 ? h.head_dim : page == 32 ? h.head_dim / 2 : 0;
            if (h.latent_dim > 0) c.rotary_dims = h.head_dim - h.latent_dim;
          }
          AddKvOp(cases, c, name);
          c.window = window;
          if (op == Op::kAttention && page == 16) AddKvOp(cases, c, name);
          c.window = 0;
          c.sloped = true;
          if (op == Op::kAttention && page == 32) AddKvOp(cases, c, name);
          c.sloped = false;
          c.sunk = true;
          if (op == Op::kAttention && page == 64) AddKvOp(cases, c, name);
          c.window = window;
          if (op == Op::kAttention && page == 64) AddKvOp(cases, c, name);
        }
      }
    }
  }
  const auto bench = [&](int64_t requests, CaseSequence each, DType dtype = DType::kF16,
                         const Heads& h = {9, 3, 64}) {
    OpCase c = {.op = op,
                .heads = h.heads,
                .kv = {h.kv_heads, h.head_dim, 32, 0, dtype},
                .rotary_dims = 64,
                .sequences = std::vector<CaseSequence>(static_cast<size_t>(requests), each),
                .bench = true,
                .slow = true};
    c.kv.latent_dim = h.latent_dim;
    AddKvOp(cases, c, Str("requests=", requests, "/rows=", each.rows, "/at=", each.first_position));
  };
  for (const DType dtype : {DType::kF16, DType::kI8}) {
    for (int64_t requests : {1, 16, 32}) bench(requests, {1, 511}, dtype);
    bench(1, {512, 0}, dtype);
    bench(1, {256, 1024}, dtype);
    if (op != Op::kAttention) continue;
    for (int64_t requests : {1, 8}) {  // long contexts
      bench(requests, {1, 2047}, dtype);
      bench(requests, {1, 8191}, dtype);
    }
  }
  constexpr Heads kLatents = {16, 1, 576, 512};  // DeepSeek-V2-Lite's
  for (const CaseSequence& each : {CaseSequence{1, 511}, {1, 8191}, {512, 0}}) {
    bench(1, each, DType::kF16, kLatents);
  }
}
void AddRotations(std::vector<OpCase>& cases) { AddSequenceOps(cases, Op::kRotateAndStoreKv); }
void AddAttentions(std::vector<OpCase>& cases) { AddSequenceOps(cases, Op::kAttention); }

void AddPageCopies(std::vector<OpCase>& cases) {
  for (DType dtype : {DType::kF16, DType::kF32, DType::kI8}) {
    OpCase c = {.op = Op::kCopyPages,
                .rows = 9,
                .kv = {3, 64, 16, 0, dtype},
                .sequences = {{40, 0}, {33, 0}}};
    c.name = Str("copy_pages/", Name(dtype));
    c.bench = dtype == DType::kF16;
    cases.push_back(std::move(c));
  }
  cases.push_back({.name = "copy_pages/state",
                   .op = Op::kCopyPages,
                   .rows = 9,
                   .kv = {.page_size = 16, .dtype = DType::kF32, .state = {150, 3, 2, 6, 24, 9}},
                   .sequences = {{40, 0}, {33, 0}}});
}

// The inputs that the two ops on sequences share: the cache, and q.
GuardedTensor& PrepareSequences(OpRun& run, Random& random, bool fill_chunk, Role q_role) {
  const OpCase& c = run.op_case();
  run.cache =
      std::make_unique<KvCaseCache>(c.kv, c.sequences, run.backend(), random, c.bf16, fill_chunk);
  GuardedTensor& q = run.Add("q", q_role, c.rows, c.heads * c.kv.head_dim);
  q.Fill([&] { return random.Normal(); });
  return q;
}

void PrepareRotation(OpRun& run, uint64_t seed) {
  const OpCase& c = run.op_case();
  Random random(seed);
  GuardedTensor& q = PrepareSequences(run, random, /*fill_chunk=*/false, Role::kOutput);
  GuardedTensor& k = run.Add("k", Role::kLost, c.rows, c.kv.kv_heads * c.kv.head_dim);
  GuardedTensor& v = run.Add("v", Role::kInput, c.rows, k.cols());
  k.Fill([&] { return random.Normal(); });
  // Some values that f16 cannot hold or holds as subnormals.
  v.Fill([&] {
    const float scale = random.Below(50) == 0 ? 1e5f : random.Below(50) == 0 ? 1e-6f : 1.0f;
    return scale * random.Normal();
  });
  RotaryTable table = {.half_dim = c.rotary_dims / 2, .max_positions = 1};
  for (const CaseSequence& sequence : c.sequences) {
    table.max_positions = std::max(table.max_positions, LiveEnd(sequence));
  }
  // One long row each: the op sees a plain array.
  const int64_t half = std::max<int64_t>(table.half_dim, 1);
  GuardedTensor& cos = run.Add("cos", Role::kInput, 1, table.max_positions * half);
  GuardedTensor& sin = run.Add("sin", Role::kInput, 1, table.max_positions * half);
  for (int64_t p = 0; p < table.max_positions; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(p) * std::pow(1e4, -static_cast<double>(i) / half);
      cos.Row(0)[p * half + i] = static_cast<float>(std::cos(angle));
      sin.Row(0)[p * half + i] = static_cast<float>(std::sin(angle));
    }
  }
  table.cos = cos.view().Row<float>(0);
  table.sin = sin.view().Row<float>(0);
  run.call = [&run, &q, &k, &v, table, spans = std::vector<SequenceSpan>()](int64_t begin,
                                                                            int64_t count) mutable {
    run.backend().RotateAndStoreKv(q.Rows(begin, count), k.Rows(begin, count), v.Rows(begin, count),
                                   table.half_dim > 0 ? &table : nullptr,
                                   run.ViewOf(begin, count, spans));
  };
  const auto stored = static_cast<double>(SizeOf(c.kv.dtype)) / sizeof(float);
  run.bytes_moved = 2 * q.bytes() + (2 + 2 * stored) * k.bytes();
  run.operations_done = 3.0 * static_cast<double>(c.rows * (q.cols() + k.cols()));
}

void PrepareAttention(OpRun& run, uint64_t seed) {
  const OpCase& c = run.op_case();
  Random random(seed);
  GuardedTensor& q = PrepareSequences(run, random, /*fill_chunk=*/true, Role::kInput);
  GuardedTensor& out = run.AddForProducts("out", c.rows, c.heads * c.kv.ValueDim());
  const float scale = 1 / std::sqrt(static_cast<float>(c.kv.head_dim));
  GuardedTensor& slopes = run.Add("slopes", Role::kInput, 1, c.heads);
  slopes.Fill([&, head = 0]() mutable {
    return std::exp2(-8.0f * static_cast<float>(++head) / static_cast<float>(c.heads));
  });
  GuardedTensor& sinks = run.Add("sinks", Role::kInput, 1, c.heads);
  sinks.Fill([&] { return 2 * random.Normal(); });  // some above all scores
  run.call = [&run, &c, &q, &slopes, &sinks, &out, scale, spans = std::vector<SequenceSpan>()](
                 int64_t begin, int64_t count) mutable {
    KvView kv = run.ViewOf(begin, count, spans);
    if (c.sloped) kv.slopes = slopes.view().Row<float>(0);
    if (c.sunk) kv.sinks = sinks.view().Row<float>(0);
    run.backend().Attention(q.Rows(begin, count), kv, scale, out.Rows(begin, count));
  };
  double slots = 0;
  double pairs = 0;
  for (const CaseSequence& sequence : c.sequences) {
    slots += static_cast<double>(LiveEnd(sequence));
    for (int64_t i = 0; sequence.live && i < sequence.rows; ++i) {
      pairs += static_cast<double>(sequence.first_position + i + 1);
    }
  }
  const KvLayout& layout = run.cache->layout();
  run.bytes_moved =
      slots * static_cast<double>(layout.PageBytes()) / static_cast<double>(layout.page_size) +
      q.bytes() + out.bytes();
  run.operations_done = 2.0 * pairs * static_cast<double>(q.cols() + out.cols());
}

void PreparePageCopy(OpRun& run, uint64_t seed) {
  const OpCase& c = run.op_case();
  Random random(seed);
  run.cache = std::make_unique<KvCaseCache>(c.kv, c.sequences, run.backend(), random, c.bf16, true);
  const int64_t pages = run.cache->layout().num_pages;
  std::vector<PageCopy> copies;
  for (int64_t i = 0; i < c.rows; ++i) {  // in order: a copy may read what an earlier one wrote
    const int64_t from = random.Below(pages);
    const int64_t to = (from + 1 + random.Below(pages - 1)) % pages;
    copies.push_back({static_cast<int32_t>(from), static_cast<int32_t>(to)});
  }
  run.call = [&run, copies](int64_t begin, int64_t count) {
    run.backend().CopyPages(run.cache->layout(), run.cache->pages(),
                            std::span(copies).subspan(begin, count));
  };
  run.bytes_moved = 2.0 * static_cast<double>(c.rows * run.cache->layout().PageBytes());
}

}  // namespace

extern const OpRow kRotateAndStoreKvRow = {"rotate_and_store_kv", AddRotations, PrepareRotation};
extern const OpRow kAttentionRow = {"attention", AddAttentions, PrepareAttention};
extern const OpRow kCopyPagesRow = {"copy_pages", AddPageCopies, PreparePageCopy};

}  // namespace treadle
