// How attention's work is cut over the threads: no cut changes a bit, because blocks are fixed and
// are combined in ascending order wherever they were computed.
#include <algorithm>

#include "kernels/cpu/ops/ops_state.h"

namespace treadle {
namespace {

// Rows of one item: together with the query heads of a group about this many queries share each
// converted block. A multiple of the register tile's six for groups of 1, 2, 3, 4, 5 and 6.
constexpr int64_t kItemQueries = 120;
// Below this many multiplications the caller works alone: waking the pool would cost more.
constexpr int64_t kSerialWork = 1 << 15;
// Pieces per thread that are enough for an even end.
constexpr int64_t kPiecesPerThread = 4;
// Queries of an item that AMX leaves to vectors (measured on a Xeon with AMX, 2026-11-26).
constexpr int64_t kFewQueries = 6;
// Features of K whose products with a query are exact in 32 bits (KvLayout).
constexpr int64_t kMaxCodeDim = 1024;
// The cost of a block besides its queries (its conversion), in queries.
constexpr int64_t kBlockOverhead = 4;

float* ReserveFloats(ScratchMemory& memory, int64_t floats) {
  const size_t bytes = static_cast<size_t>(floats) * sizeof(float);
  memory.Reserve(bytes);
  return memory.Take<float>(bytes);
}

int64_t Cost(const AttentionArguments& a, int64_t block_begin, int64_t block_end) {
  const int64_t end = std::min(block_end * kAttentionBlock, a.first_position + a.rows);
  return (a.rows * a.group + kBlockOverhead) * (end - block_begin * kAttentionBlock);
}

// Whether AMX's tiles are what attends: for few queries K and V are read where they lie.
bool TilesPay(const AttentionArguments& a) {
  return (a.bf16 || a.codes) && a.rows * a.group > kFewQueries;
}

// One item per sequence, K/V head and tile of rows.
void MakeItems(Tensor q, const KvView& kv, float scale, ComputeMode compute, Tensor out,
               std::vector<AttentionItem>& items) {
  const KvLayout& layout = kv.layout;
  const bool bf16 = compute == ComputeMode::kBf16;
  const bool codes =
      layout.dtype == DType::kI8 && layout.latent_dim == 0 && layout.head_dim <= kMaxCodeDim;
  const int64_t group = q.cols / layout.head_dim / layout.kv_heads;
  const int64_t item_rows = std::max<int64_t>(1, kItemQueries / group);
  const int64_t head_bytes = layout.PartBytes() / layout.kv_heads;
  const int64_t head_scales = layout.page_size * static_cast<int64_t>(sizeof(BFloat16));
  items.clear();
  for (const SequenceSpan& span : kv.sequences) {
    for (int64_t head = 0; head < layout.kv_heads; ++head) {
      for (int64_t begin = 0; begin < span.num_rows; begin += item_rows) {
        const int64_t rows = std::min(item_rows, span.num_rows - begin);
        const int64_t position = span.first_position + begin;
        AttentionArguments a = {};
        a.q = q.Row<float>(span.first_row + begin) + head * group * layout.head_dim;
        a.q_stride = q.stride;
        a.rows = rows;
        a.group = group;
        a.head_dim = layout.head_dim;
        a.value_dim = layout.ValueDim();
        a.first_position = position;
        a.window = kv.window;
        if (kv.slopes != nullptr) a.slopes = kv.slopes + head * group;
        if (kv.sinks != nullptr) a.sinks = kv.sinks + head * group;
        a.block_begin = kv.FirstSeen(position) / kAttentionBlock;
        a.block_end = (position + rows + kAttentionBlock - 1) / kAttentionBlock;
        a.scale = scale;
        a.bf16 = bf16 && !codes;
        a.codes = codes;
        a.dtype = layout.dtype;
        a.k = kv.pages + head * head_bytes;
        a.k_scales = kv.pages + layout.Parts() * layout.PartBytes() + head * head_scales;
        a.v_scales = a.k_scales;
        if (layout.latent_dim == 0) {
          a.v = a.k + layout.PartBytes();
          a.v_scales += layout.kv_heads * head_scales;
        }
        a.page_bytes = layout.PageStride();
        a.page_size = layout.page_size;
        a.pages = span.pages;
        a.out = out.Row<float>(span.first_row + begin) + head * group * a.value_dim;
        a.out_stride = out.stride;
        items.push_back({a, 0});
      }
    }
  }
}

}  // namespace

void CpuOps::Attention(Tensor q, const KvView& kv, float scale, Tensor out) {
  const KvLayout& layout = kv.layout;
  TREADLE_CHECK(layout.dtype != DType::kBF16);
  TREADLE_CHECK(q.cols % (layout.head_dim * layout.kv_heads) == 0);
  TREADLE_CHECK(out.cols == q.cols / layout.head_dim * layout.ValueDim());
  State& s = *state_;
  MakeItems(q, kv, scale, compute_, out, s.items);
  if (s.items.empty()) return;
  s.PlanAttention();
  s.RunAttention();
}

void CpuOps::State::PlanAttention() {
  int64_t total = 0;
  for (const AttentionItem& item : items) {
    total += Cost(item.arguments, item.arguments.block_begin, item.arguments.block_end);
  }
  const int64_t threads = pool.size();
  serial_attention = threads == 1 || total * items[0].arguments.head_dim < kSerialWork;
  const int64_t wanted = threads * kPiecesPerThread;
  const bool split = !serial_attention && static_cast<int64_t>(items.size()) < wanted;

  pieces.clear();
  split_items.clear();
  int64_t partial_floats = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    AttentionArguments& a = items[i].arguments;
    const int64_t cost = Cost(a, a.block_begin, a.block_end);
    const int64_t blocks = a.block_end - a.block_begin;
    const int64_t parts =
        split ? std::clamp<int64_t>((cost * wanted + total - 1) / total, 1, blocks) : 1;
    if (parts > 1) {
      split_items.push_back(static_cast<int32_t>(i));
      items[i].partial_offset = partial_floats;
      partial_floats += blocks * kAttentionPartialFloats[isa](a.rows * a.group, a.value_dim);
    }
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = a.block_begin + blocks * part / parts;
      const int64_t end = a.block_begin + blocks * (part + 1) / parts;
      pieces.push_back({Cost(a, begin, end), static_cast<int32_t>(i), static_cast<int32_t>(begin),
                        static_cast<int32_t>(end)});
    }
  }
  float* base = ReserveFloats(partials, partial_floats);
  for (const int32_t i : split_items) items[i].arguments.partials = base + items[i].partial_offset;
  // Expensive ones first, so that the threads end together; the order never shows in a result.
  if (!serial_attention) {
    std::sort(pieces.begin(), pieces.end(),
              [](const AttentionPiece& a, const AttentionPiece& b) { return a.cost > b.cost; });
  }
}

void CpuOps::State::RunAttention() {
  int64_t scratch_floats = 0;
  for (const AttentionItem& item : items) {
    const AttentionArguments& a = item.arguments;
    scratch_floats =
        std::max(scratch_floats, kAttentionScratchFloats[isa](a.rows * a.group, a.head_dim));
  }
  const auto run_piece = [this](const AttentionPiece& piece, float* thread_scratch) {
    AttentionArguments a = items[piece.item].arguments;
    if (a.partials != nullptr) {
      a.partials += (piece.block_begin - a.block_begin) *
                    kAttentionPartialFloats[isa](a.rows * a.group, a.value_dim);
    }
    a.block_begin = piece.block_begin;
    a.block_end = piece.block_end;
    a.scratch = thread_scratch;
    if (isa == CpuIsa::kAmx && TilesPay(a)) {
      return a.codes ? avx512::AttendCodesOnTiles(a) : avx512::AttendBf16OnTiles(a);
    }
    kAttendBlocks[isa](a);
  };
  if (serial_attention) {
    float* scratch = ReserveFloats(attention_scratch, scratch_floats);
    for (const AttentionPiece& piece : pieces) run_piece(piece, scratch);
    return;
  }
  float* scratch = ReserveFloats(attention_scratch, scratch_floats * pool.size());
  pool.ParallelForEach(std::ssize(pieces), [&](int worker, int64_t i, int64_t) {
    run_piece(pieces[i], scratch + worker * scratch_floats);
  });
  pool.ParallelForEach(std::ssize(split_items), [&](int worker, int64_t i, int64_t) {
    AttentionArguments a = items[split_items[i]].arguments;
    a.scratch = scratch + worker * scratch_floats;
    kCombineAttention[isa](a);
  });
}

}  // namespace treadle
