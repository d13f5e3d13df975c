// One launch for the whole ragged batch (ORCA section 5): every tile of every sequence, prompt
// chunks and decoding rows alike, and one that combines the parts of decoding rows with more than
// one split (attention_map.h says which these are). Batches in which every sequence has one row
// take the same code without the prompt's part, which needs fewer registers.
//
// K/V of 16 bits and heads of up to 256 features, a multiple of 8, run on tensor cores: q (after
// scaling) and the softmax weights are rounded to the cache's type, products are summed in f32, and
// a row's sum of weights is that of the rounded ones. Everything else: attention_general.cu.
//
// Its expected cost on an H200 (4.8 TB/s, 989 TFLOP/s dense bf16). Estimates: this has not run on
// a GPU.
//   * Decoding reads 2 kv_heads head_dim 2 bytes per position of context, once for all query heads
//     of a group (8 x 128: 4 KB), and writes and reads (head_dim + 2) 4 bytes per query head and
//     split of at least 256 positions, 3 % of that for groups of 4. With head_dim 128 three blocks
//     share a multiprocessor (168 registers, 71 KB each), 32 to 64 KB in flight each, where some
//     40 KB would cover the latency: 75 to 85 % of copy bandwidth once there are a few hundred
//     (sequence, K/V head, split) triples; below that a floor of about 5 us, 2 of them the second
//     launch. One row of 16 or 4 of a matrix instruction in use is no limit: tensor cores then do
//     at least six times what memory can feed.
//   * A prompt of n rows takes 2 n^2 heads head_dim operations (n = 2048, 32 heads of 128: 34
//     GFLOP), on warpgroups where the device has them (attention_warpgroups.h says what that
//     costs). Without: with head_dim 128 a warp has 16 pairs, so 512 bytes of shared memory feed
//     8192 operations: at 128 bytes a cycle, half of the peak at most; with the softmax between, 30
//     to 40 % (85 to 115 us). With head_dim up to 64 a warp has 32 pairs and shared memory is no
//     limit, but mma reaches at most some 62 % of what wgmma does, and there is more softmax per
//     product: again 30 to 40 %.
#include <algorithm>
#include <bit>
#include <limits>

#include "kernels/cuda/attention/attention_kernel.h"
#include "kernels/cuda/attention/attention_prompt.h"
#include "kernels/cuda/ops.h"

namespace treadle::cuda {
namespace {

// -- kernels --------------------------------------------------------------------------------------

// Grid: sequences, query heads. A thread per feature.
TREADLE_KERNEL(kAttentionThreads)
void CombineKernel(AttentionParams p) {
  simt::AwaitEarlierLaunches();
  const DeviceSequence sequence = p.batch.sequences[simt::BlockX()];
  if (sequence.num_rows != 1) return;
  const int splits = SplitsOf(sequence.first_position);
  if (splits == 1) return;
  const int head = simt::BlockY();
  const int64_t first = PartIndex(p, simt::BlockX(), head, 0);
  const float* stats = p.part_stats + 2 * first;
  const float* vectors = p.part_vectors + first * p.head_dim;
  const int64_t at = sequence.first_row * p.out.stride + int64_t{head} * p.head_dim;
  for (int i = simt::Thread(); i < p.head_dim; i += kAttentionThreads) {
    float max = stats[0];
    float sum = stats[1];
    float value = vectors[i];
    for (int split = 1; split < splits; ++split) {
      const FoldFactors f = Factors(max, stats[2 * split]);
      max = f.max;
      sum = Fold(sum, stats[2 * split + 1], f);
      value = Fold(value, vectors[split * p.head_dim + i], f);
    }
    StoreOne(p.out, at + i, value * simt::Divide(1.0f, sum));
  }
}

// -- launches -------------------------------------------------------------------------------------

struct Variant {
  DType dtype;
  int features;  // head_dim is padded to this in shared memory
  AttentionCode decoding;
  AttentionCode mixed;
  AttentionCode small_mixed;  // for devices on which the shared memory of `mixed` does not fit
};

template <DType kType, int kD, int kM>
constexpr Variant MakeVariant() {
  Variant variant = {};
  variant.dtype = kType;
  variant.features = kD;
  variant.decoding = {AttentionKernel<kType, kD, NoPrompts>, kAttentionThreads,
                      DecodeTile<kType, kD>::kSharedBytes};
  variant.mixed = MakeAttentionCode<kType, kD, PromptTile<kType, kD, kM>>();
  if constexpr (kD > 96) {  // below, every device has what `mixed` needs
    variant.small_mixed = MakeAttentionCode<kType, kD, PromptTile<kType, kD, kM, true>>();
  }
  return variant;
}

constexpr Variant kVariants[] = {
    MakeVariant<DType::kF16, 32, 2>(),   MakeVariant<DType::kF16, 64, 2>(),
    MakeVariant<DType::kF16, 96, 1>(),   MakeVariant<DType::kF16, 128, 1>(),
    MakeVariant<DType::kF16, 256, 1>(),  MakeVariant<DType::kBF16, 32, 2>(),
    MakeVariant<DType::kBF16, 64, 2>(),  MakeVariant<DType::kBF16, 96, 1>(),
    MakeVariant<DType::kBF16, 128, 1>(), MakeVariant<DType::kBF16, 256, 1>(),
};

bool Fits(const AttentionCode& code, const DeviceProperties& device) {
  return code.kernel != nullptr && code.shared_bytes <= device.shared_bytes_per_block;
}

// Null: no tensor-core kernel takes this cache, or the device lacks the shared memory for prompts
// or for decoding (heads above 128 where a block has less than the 163 KB of an A100). Both or
// neither, for the general kernel rounds otherwise (N2).
const Variant* Find(const KvLayout& layout, const DeviceProperties& device) {
  if (layout.head_dim % 8 != 0) return nullptr;
  const Variant* found = nullptr;
  for (const Variant& variant : kVariants) {
    const bool takes = variant.dtype == layout.dtype && layout.head_dim <= variant.features;
    if (takes && found == nullptr) found = &variant;
  }
  const bool fits = found != nullptr && Fits(found->decoding, device) &&
                    (Fits(found->mixed, device) || Fits(found->small_mixed, device));
  return fits ? found : nullptr;
}

AttentionCode Choose(const Variant& variant, const KvLayout& layout, const DeviceBatch& batch,
                     const DeviceProperties& device, bool deterministic) {
  if (batch.max_sequence_rows <= 1) return variant.decoding;
  if (!deterministic && device.warpgroup_matrices) {
    const AttentionCode code = layout.dtype == DType::kF16
                                   ? WarpgroupAttention<DType::kF16>(layout.head_dim)
                                   : WarpgroupAttention<DType::kBF16>(layout.head_dim);
    if (Fits(code, device)) return code;
  }
  return Fits(variant.mixed, device) ? variant.mixed : variant.small_mixed;
}

size_t PartBytes(int64_t heads, int64_t splits, int64_t head_dim) {
  return static_cast<size_t>(heads * splits * (head_dim + 2)) * sizeof(float);
}

AttentionParams MakeParams(Tensor q, const KvView& kv, const DeviceBatch& batch, float scale,
                           Tensor out) {
  const KvLayout& layout = kv.layout;
  const auto narrow = [](int64_t x) { return static_cast<int32_t>(x); };
  AttentionParams p = {};
  p.q = q.Row<float>(0);
  p.out = OutputOf(out, q);
  p.q_stride = q.stride;
  p.pages = reinterpret_cast<const char*>(kv.pages);
  p.page_bytes = layout.PageStride();
  p.part_bytes = layout.PageBytes() / 2;
  p.page_shift = std::countr_zero(static_cast<uint64_t>(layout.page_size));
  p.head_dim = narrow(layout.head_dim);
  p.heads = narrow(q.cols / layout.head_dim);
  p.group = narrow(p.heads / layout.kv_heads);
  p.tile_heads = std::min(p.group, kMmaRows);
  p.head_chunks = CeilDivide(p.group, p.tile_heads);
  p.scale = scale * kLog2E;
  constexpr int64_t kNone = std::numeric_limits<int32_t>::max();
  p.window = narrow(kv.window > 0 ? std::min(kv.window, kNone) : kNone);
  p.slopes = kv.slopes;
  p.sinks = kv.sinks;
  p.splits = 1;
  p.batch = batch;
  return p;
}

void LaunchCode(Device& device, const AttentionCode& code, const KvLayout& layout,
                std::span<std::byte> scratch, AttentionParams p) {
  const DeviceBatch& batch = p.batch;
  p.tile_rows = code.pairs / p.tile_heads;
  p.one_tile_each = batch.max_sequence_rows <= p.tile_rows;

  const int32_t splits = MaxSplitsBelow(batch.max_context);
  const size_t each = PartBytes(p.heads, splits, p.head_dim);
  if (splits > 1 && scratch.size() >= each) {
    p.splits = splits;
    p.split_sequences = static_cast<int32_t>(
        std::min<size_t>(scratch.size() / each, static_cast<size_t>(batch.num_sequences)));
    p.part_stats = reinterpret_cast<float*>(scratch.data());
    p.part_vectors = p.part_stats + int64_t{2} * p.split_sequences * p.heads * splits;
  }
  const int32_t tiles = p.one_tile_each ? batch.num_sequences
                                        : TileBound(batch.rows, batch.num_sequences, p.tile_rows);
  device.Launch(code.kernel,
                {.grid_x = static_cast<uint32_t>(tiles),
                 .grid_y = static_cast<uint32_t>(layout.kv_heads * p.head_chunks),
                 .grid_z = static_cast<uint32_t>(p.splits),
                 .threads = static_cast<uint32_t>(code.threads),
                 .shared_bytes = code.shared_bytes},
                p);
  if (p.split_sequences == 0) return;
  device.Launch(CombineKernel,
                {.grid_x = static_cast<uint32_t>(p.split_sequences),
                 .grid_y = static_cast<uint32_t>(p.heads),
                 .threads = kAttentionThreads},
                p);
}

}  // namespace

void Attention(Device& device, Tensor q, const KvView& kv, const DeviceBatch& batch, float scale,
               bool deterministic, std::span<std::byte> scratch, Tensor out) {
  const KvLayout& layout = kv.layout;
  TREADLE_CHECK(layout.key_order == KeyOrder::kByPosition);
  TREADLE_CHECK(layout.page_size >= 16 &&
                std::has_single_bit(static_cast<uint64_t>(layout.page_size)));
  TREADLE_CHECK(q.cols % (layout.kv_heads * layout.head_dim) == 0);
  TREADLE_CHECK(out.cols == q.cols && out.rows == q.rows);
  if (batch.rows == 0 || batch.num_sequences == 0) return;
  const AttentionParams p = MakeParams(q, kv, batch, scale, out);
  const bool plain = kv.slopes == nullptr && kv.sinks == nullptr;
  const Variant* variant = plain ? Find(layout, device.properties()) : nullptr;
  if (variant != nullptr) {
    const AttentionCode code = Choose(*variant, layout, batch, device.properties(), deterministic);
    LaunchCode(device, code, layout, scratch, p);
  } else {
    LaunchGeneralAttention(device, layout.dtype, p);
  }
}

size_t AttentionScratchBytes(int64_t max_rows, int64_t max_context, int64_t heads,
                             int64_t head_dim) {
  const int32_t splits = MaxSplitsBelow(static_cast<int32_t>(max_context));
  if (splits == 1) return 0;
  return static_cast<size_t>(std::min(max_rows, kMaxSplitSequences)) *
         PartBytes(heads, splits, head_dim);
}

}  // namespace treadle::cuda
