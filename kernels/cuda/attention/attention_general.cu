#include "base/status.h"
#include "kernels/cuda/attention/attention_fold.h"
#include "kernels/cuda/attention/attention_params.h"
#include "kernels/cuda/attention/kv_element.h"
#include "kernels/cuda/runtime/simt.h"

namespace treadle::cuda {
namespace {

// K or V of one head of one sequence.
template <DType kType>
struct HeadPart {
  using Stored = typename KvElement<kType>::Stored;
  const char* first;  // of page 0
  int64_t page_bytes;
  const int32_t* page_ids;
  int32_t page_shift;
  int32_t head_dim;

  TREADLE_DEVICE const Stored* Row(int32_t position) const {
    const int64_t page = page_ids[position >> page_shift];
    const int64_t slot = position & ((1 << page_shift) - 1);
    return reinterpret_cast<const Stored*>(first + page * page_bytes) + slot * head_dim;
  }
};

// Scores of the block's positions [begin, end) become weights; the others are not looked at. They
// fall by `slope` with the distance to the query at `own`. Returns their maximum.
template <DType kType>
TREADLE_DEVICE float Scores(const HeadPart<kType>& keys, const float* q, float scale, float slope,
                            int32_t own, int32_t begin, int32_t end, float* scores) {
  float max = -simt::Infinity();
  for (int32_t position = begin + simt::Lane(); position < end; position += simt::kWarp) {
    const auto* key = keys.Row(position);
    float dot = 0;
    for (int i = 0; i < keys.head_dim; ++i) {
      dot = simt::Fma(q[i], KvElement<kType>::Load(key[i]), dot);
    }
    dot = simt::Fma(slope, static_cast<float>(position - own), dot * scale);
    scores[position - begin] = dot;
    max = dot > max ? dot : max;
  }
  return simt::WarpMax(max);
}

// Grid: rows, groups of kAttentionWarps query heads. Shared: per warp the block's weights, then the
// vector so far.
template <DType kType>
TREADLE_KERNEL(kAttentionThreads)
void GeneralAttentionKernel(AttentionParams p) {
  simt::AwaitEarlierLaunches();
  const int row = simt::BlockX();
  const int head = simt::BlockY() * kAttentionWarps + simt::Warp();
  const int32_t s = p.batch.row_sequence[row];
  if (s < 0 || head >= p.heads) return;  // whole warps; none meets another

  const int64_t in_page = (int64_t{head / p.group} * p.head_dim << p.page_shift) *
                          static_cast<int64_t>(sizeof(typename KvElement<kType>::Stored));
  HeadPart<kType> keys;
  keys.first = p.pages + in_page;
  keys.page_bytes = p.page_bytes;
  keys.page_ids = p.batch.pages + p.batch.sequences[s].first_page;
  keys.page_shift = p.page_shift;
  keys.head_dim = p.head_dim;
  HeadPart<kType> values = keys;
  values.first += p.part_bytes;

  float* weights = simt::DynamicShared<float>() + simt::Warp() * (kBlockPositions + p.head_dim);
  float* vector = weights + kBlockPositions;
  for (int i = simt::Lane(); i < p.head_dim; i += simt::kWarp) vector[i] = 0;
  const float* q = p.q + row * p.q_stride + int64_t{head} * p.head_dim;
  const int32_t limit = p.batch.row_position[row] + 1;
  float max = p.sinks == nullptr ? -simt::Infinity() : p.sinks[head] * kLog2E;
  float sum = p.sinks == nullptr ? 0.0f : 1.0f;  // the sink's own weight
  const int32_t first = FirstSeen(limit - 1, p.window);
  const float slope = p.slopes == nullptr ? 0.0f : p.slopes[head] * kLog2E;
  for (int32_t block = first / kBlockPositions; block * kBlockPositions < limit; ++block) {
    const int32_t block_begin = block * kBlockPositions;
    const int32_t begin = block_begin > first ? block_begin : first;
    const int32_t end =
        block_begin + kBlockPositions < limit ? block_begin + kBlockPositions : limit;
    const FoldFactors f =
        Factors(max, Scores(keys, q, p.scale, slope, limit - 1, begin, end, weights));
    max = f.max;
    float part = 0;
    for (int32_t i = simt::Lane(); i < end - begin; i += simt::kWarp) {
      weights[i] = Weight(weights[i], Shift(max));
      part += weights[i];
    }
    sum = Fold(sum, simt::WarpSum(part), {max, f.left, 1.0f});
    simt::SyncWarp();
    for (int i = simt::Lane(); i < p.head_dim; i += simt::kWarp) {
      float x = vector[i] * f.left;
      for (int32_t at = begin; at < end; ++at) {
        x = simt::Fma(weights[at - begin], KvElement<kType>::Load(values.Row(at)[i]), x);
      }
      vector[i] = x;
    }
    simt::SyncWarp();
  }
  const int64_t at = row * p.out.stride + int64_t{head} * p.head_dim;
  const float inverse = simt::Divide(1.0f, sum);
  for (int i = simt::Lane(); i < p.head_dim; i += simt::kWarp) {
    StoreOne(p.out, at + i, vector[i] * inverse);
  }
}

}  // namespace

void LaunchGeneralAttention(Device& device, DType kv_type, const AttentionParams& p) {
  const auto kernel = kv_type == DType::kF32   ? GeneralAttentionKernel<DType::kF32>
                      : kv_type == DType::kF16 ? GeneralAttentionKernel<DType::kF16>
                                               : GeneralAttentionKernel<DType::kBF16>;
  TREADLE_CHECK(kv_type != DType::kI8);
  device.Launch(kernel,
                {.grid_x = static_cast<uint32_t>(p.batch.rows),
                 .grid_y = static_cast<uint32_t>(CeilDivide(p.heads, kAttentionWarps)),
                 .threads = kAttentionThreads,
                 .shared_bytes = sizeof(float) * kAttentionWarps *
                                 static_cast<size_t>(kBlockPositions + p.head_dim)},
                p);
}

}  // namespace treadle::cuda
