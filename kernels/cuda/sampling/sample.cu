// Sampling on the device: kernels/sampling.h in three launches for 64 rows, two for a shard's.
//
//   scan:      every logit is read once, by blocks of kChunk tokens: requests' changes (steps 1 to
//              3), the first candidates of the chunk, and what log probabilities need. That is all
//              for greedy rows, and for those with a top-k of at most 64.
//   histogram: for the other rows, candidates by bins of descending logit (sample_draw.h).
//   finish:    a block per row puts chunks together and draws.
//
// Logits stay as they are; rows that are changed and drawn from at length are copied. All sums are
// of fixed parts or of integers, so a row's result depends on that row alone.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/ops.h"
#include "kernels/cuda/sampling/sample_block.h"
#include "kernels/cuda/sampling/sample_draw.h"
#include "kernels/cuda/sampling/sample_params.h"
#include "kernels/cuda/sampling/sample_scan.h"

namespace treadle::cuda {
namespace {

TREADLE_KERNEL(kScanThreads) void ScanKernel(SampleParams p) {
  simt::AwaitEarlierLaunches();
  ScanChunk(p, *simt::DynamicShared<ScanShared>());
}

// -- histogram ------------------------------------------------------------------------------------

// The logits that a row is drawn from, all of them.
TREADLE_DEVICE const float* DrawnLogits(const SampleParams& p, const DeviceSampleRow& row, int i) {
  return IsChanged(row) ? p.scratch.changed + int64_t{i} * p.vocab : p.logits + i * p.stride;
}

// A row's first candidate.
TREADLE_DEVICE uint64_t FirstOfRow(const SampleParams& p, int row, BlockScratch& scratch) {
  const uint64_t* first = p.scratch.first + int64_t{row} * p.chunks * kMaxShardCandidates;
  uint64_t own = kNoCandidate;
  for (int i = simt::Thread(); i < p.chunks; i += simt::Threads()) {
    const uint64_t key = first[int64_t{i} * kMaxShardCandidates];
    own = key < own ? key : own;
  }
  return BlockFirst(own, scratch);
}

struct HistogramShared {
  uint32_t words[Histogram::kWords];
  BlockScratch block;
};

// Most tokens of most rows are in the last bin; those are summed apart, since atomics on one place
// wait for each other.
TREADLE_KERNEL(kScanThreads) void HistogramKernel(SampleParams p) {
  simt::AwaitEarlierLaunches();
  HistogramShared& shared = *simt::DynamicShared<HistogramShared>();
  const DeviceSampleRow& row = p.samples[simt::BlockY()];
  if (!DrawsAtLength(row, p.vocab)) return;
  const float max = LogitOf(FirstOfRow(p, simt::BlockY(), shared.block));
  if (max == -simt::Infinity()) return;

  const Weights weights(max, row.temperature);
  const Histogram bins(shared.words);
  bins.Clear();
  const int begin = simt::BlockX() * kChunk;
  const int count = p.vocab - begin < kChunk ? p.vocab - begin : kChunk;
  Mass rest;
  ForEachLogit(DrawnLogits(p, row, simt::BlockY()) + begin, count, [&](float x, int) {
    const int bin = weights.Bin(x);
    if (bin == kNoBin) return;
    const Mass mass = weights.MassOf(x);
    if (bin < kBins - 1) {
      bins.Add(bin, mass);
    } else {
      rest = rest + mass;
    }
  });
  rest = {BlockSum(rest.weight, shared.block), BlockSum(rest.count, shared.block)};
  if (simt::Thread() == 0) bins.Add(kBins - 1, rest);
  simt::SyncThreads();
  uint32_t* out =
      p.scratch.bins + (int64_t{simt::BlockY()} * p.chunks + simt::BlockX()) * Histogram::kWords;
  for (int i = simt::Thread(); i < Histogram::kWords; i += simt::Threads()) {
    out[i] = shared.words[i];
  }
}

// -- finish ---------------------------------------------------------------------------------------

struct alignas(16) FinishShared {
  uint32_t bins[Histogram::kWords];
  uint32_t split[Histogram::kWords];
  BlockScratch block;

  // Behind it, as many as KeyCapacity says.
  TREADLE_DEVICE uint64_t* keys() { return reinterpret_cast<uint64_t*>(this + 1); }
};

// Puts the first candidates of chunks, `wanted` of each, in order. Ends with a barrier.
TREADLE_DEVICE void MergeChunks(const uint64_t* lists, int list_size, int chunks, int wanted,
                                uint64_t* keys) {
  for (int i = simt::Thread(); i < chunks * wanted; i += simt::Threads()) {
    keys[i] = lists[int64_t{i / wanted} * list_size + i % wanted];
  }
  simt::SyncThreads();
  BlockSort(keys, chunks * wanted);
}

TREADLE_DEVICE void MergeFirst(const SampleParams& p, int row, int wanted, uint64_t* keys) {
  MergeChunks(p.scratch.first + int64_t{row} * p.chunks * kMaxShardCandidates, kMaxShardCandidates,
              p.chunks, wanted, keys);
}
TREADLE_DEVICE void MergeTop(const SampleParams& p, int row, int wanted, uint64_t* keys) {
  MergeChunks(p.scratch.top + int64_t{row} * p.chunks * kMaxTopLogprobs, kMaxTopLogprobs, p.chunks,
              wanted, keys);
}

// Maximum and sum of a row's raw logits.
TREADLE_DEVICE ChunkSum SumOfRow(const SampleParams& p, int row, BlockScratch& scratch) {
  const ChunkSum* sums = p.scratch.sums + int64_t{row} * p.chunks;
  float max = -simt::Infinity();
  for (int i = simt::Thread(); i < p.chunks; i += simt::Threads()) {
    max = sums[i].max > max ? sums[i].max : max;
  }
  max = BlockMax(max, scratch);
  double sum = 0;
  for (int i = simt::Thread(); i < p.chunks; i += simt::Threads()) {
    if (sums[i].max > -simt::Infinity()) {
      sum += sums[i].sum * std::exp(static_cast<double>(sums[i].max) - max);
    }
  }
  return {max, BlockSum(sum, scratch)};
}

TREADLE_DEVICE int32_t DrawAtLength(const SampleParams& p, const DeviceSampleRow& row, int at,
                                    FinishShared& shared) {
  const float max = LogitOf(FirstOfRow(p, at, shared.block));
  if (max == -simt::Infinity()) return 0;
  const Histogram bins(shared.bins);
  for (int bin = simt::Thread(); bin < kBins; bin += simt::Threads()) {
    Mass mass;
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      const uint32_t* words =
          p.scratch.bins + (int64_t{at} * p.chunks + chunk) * Histogram::kWords + bin;
      mass = mass + Mass{(uint64_t{words[2 * kBins]} << 32) | words[kBins], words[0]};
    }
    bins.Set(bin, mass);
  }
  simt::SyncThreads();
  Draw draw(DrawnLogits(p, row, at), p.vocab, Weights(max, row.temperature), bins,
            Histogram(shared.split), shared.keys(), shared.block);
  return draw.Token(row);
}

TREADLE_DEVICE int32_t SampleToken(const SampleParams& p, const DeviceSampleRow& row, int at,
                                   FinishShared& shared) {
  if (row.sample == 0) return -1;
  if (row.temperature == 0.0f) return TokenOf(FirstOfRow(p, at, shared.block));
  const int first = NumFirst(row, p.vocab);
  if (first == 0) return DrawAtLength(p, row, at, shared);
  MergeFirst(p, at, first, shared.keys());
  const float max = LogitOf(shared.keys()[0]);
  if (max == -simt::Infinity()) return 0;
  Draw draw(Weights(max, row.temperature), shared.keys(), first, shared.block);
  return draw.Token(row);
}

TREADLE_KERNEL(kFinishThreads) void FinishKernel(SampleParams p) {
  simt::AwaitEarlierLaunches();
  FinishShared& shared = *simt::DynamicShared<FinishShared>();
  const int at = simt::BlockX();
  const DeviceSampleRow& row = p.samples[at];
  const float* logits = p.logits + at * p.stride;
  SampleResult& result = p.results[at];

  const int32_t token = SampleToken(p, row, at, shared);
  const bool logprobs = WantsLogprobs(row);
  const int num_top = logprobs ? NumTop(row, p.vocab) : 0;
  ChunkSum sum = {0, 1};
  if (logprobs) sum = SumOfRow(p, at, shared.block);
  const auto logprob = [&](float logit) {
    if (logit == -simt::Infinity()) return logit;
    return static_cast<float>(static_cast<double>(logit) - sum.max - std::log(sum.sum));
  };
  if (simt::Thread() == 0) {
    result.token = token;
    p.last_samples[at] = token;
    result.logprob = logprobs && token >= 0 ? logprob(CleanLogit(logits[token])) : 0.0f;
    result.target_logprob =
        logprobs && row.target >= 0 ? logprob(CleanLogit(logits[row.target])) : 0.0f;
    result.num_top = num_top;
  }
  if (num_top > 0) {
    simt::SyncThreads();
    MergeTop(p, at, num_top, shared.keys());
  }
  for (int i = simt::Thread(); i < kMaxTopLogprobs; i += simt::Threads()) {
    TokenLogprob entry;
    if (i < num_top) entry = {TokenOf(shared.keys()[i]), logprob(LogitOf(shared.keys()[i]))};
    result.top[i] = entry;
  }
}

TREADLE_KERNEL(kFinishThreads) void FinishShardKernel(SampleParams p) {
  simt::AwaitEarlierLaunches();
  FinishShared& shared = *simt::DynamicShared<FinishShared>();
  const int at = simt::BlockX();
  const DeviceSampleRow& row = p.samples[at];
  const float* logits = p.logits + at * p.stride;
  ShardSample& shard = p.shards[at];

  const bool logprobs = WantsLogprobs(row);
  const int num_top = logprobs ? NumTop(row, p.vocab) : 0;
  const int num_first = NumFirst(row, p.vocab);
  ChunkSum sum = {0, 0};
  if (logprobs) sum = SumOfRow(p, at, shared.block);
  if (simt::Thread() == 0) {
    const int64_t target = int64_t{row.target} - p.first_token;
    const bool here = row.target >= 0 && target >= 0 && target < p.vocab;
    shard.max = sum.max;
    shard.sum = static_cast<float>(sum.sum);
    shard.target_logit = logprobs ? (here ? CleanLogit(logits[target]) : -simt::Infinity()) : 0.0f;
    shard.num_top = num_top;
    shard.num_candidates = num_first;
  }
  if (num_top > 0) {
    MergeTop(p, at, num_top, shared.keys());
  }
  for (int i = simt::Thread(); i < kMaxTopLogprobs; i += simt::Threads()) {
    TokenLogprob entry;
    if (i < num_top) entry = {p.first_token + TokenOf(shared.keys()[i]), LogitOf(shared.keys()[i])};
    shard.top[i] = entry;
  }
  simt::SyncThreads();
  if (num_first > 0) {
    MergeFirst(p, at, num_first, shared.keys());
  }
  for (int i = simt::Thread(); i < kMaxShardCandidates; i += simt::Threads()) {
    ShardCandidate entry;
    if (i < num_first) {
      const int32_t token = TokenOf(shared.keys()[i]);
      entry = {p.first_token + token, LogitOf(shared.keys()[i]), CleanLogit(logits[token])};
    }
    shard.candidates[i] = entry;
  }
}

// -- launches -------------------------------------------------------------------------------------

constexpr size_t kAlignment = 256;
// More rows take turns with the scratch memory, of which a row needs five bytes for a token.
constexpr int64_t kRowsAtOnce = 64;

int64_t NumChunks(int64_t vocab) { return (vocab + kChunk - 1) / kChunk; }

// Hands out arrays of a buffer, one behind the other; with no buffer it only counts.
class Carver {
 public:
  explicit Carver(std::byte* begin) : begin_(begin) {}
  template <typename T>
  T* Take(int64_t count) {
    T* array = begin_ == nullptr ? nullptr : reinterpret_cast<T*>(begin_ + bytes_);
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* begin_;
  size_t bytes_ = 0;
};

Scratch Carve(int64_t rows, int64_t vocab, Carver& carver) {
  const int64_t parts = rows * NumChunks(vocab);
  Scratch scratch;
  scratch.first = carver.Take<uint64_t>(parts * kMaxShardCandidates);
  scratch.top = carver.Take<uint64_t>(parts * kMaxTopLogprobs);
  scratch.sums = carver.Take<ChunkSum>(parts);
  scratch.bins = carver.Take<uint32_t>(parts * Histogram::kWords);
  scratch.changed = carver.Take<float>(rows * vocab);
  return scratch;
}

// Keys that a finishing block sorts at once: a power of two.
int64_t KeyCapacity(int64_t chunks) {
  int64_t capacity = kSorted;
  while (capacity < chunks * kMaxShardCandidates) capacity *= 2;
  return capacity;
}

// Threads for a block that takes kPerThread of `tokens` each, if it may have so many.
uint32_t ThreadsFor(int64_t tokens, int most) {
  const int64_t warps = (tokens + simt::kWarp * kPerThread - 1) / (simt::kWarp * kPerThread);
  return static_cast<uint32_t>(std::min<int64_t>(warps * simt::kWarp, most));
}

SampleParams ParamsFor(Tensor logits, int32_t first_token, int64_t first_row,
                       const DeviceBatch& batch, std::span<std::byte> scratch) {
  TREADLE_CHECK(logits.dtype == DType::kF32 && logits.cols > 0 &&
                logits.cols <= int64_t{1} << kTokenBits);
  TREADLE_CHECK(SampleScratchBytes(logits.rows, logits.cols) <= scratch.size());
  Carver carver(scratch.data());
  return {.logits = static_cast<const float*>(logits.data),
          .stride = logits.stride,
          .vocab = static_cast<int32_t>(logits.cols),
          .first_token = first_token,
          .chunks = static_cast<int32_t>(NumChunks(logits.cols)),
          .samples = batch.samples + first_row,
          .counts = batch.counts,
          .suppressed = batch.suppressed,
          .biases = batch.biases,
          .mask_words = batch.mask_words,
          .scratch = Carve(logits.rows, logits.cols, carver),
          .results = nullptr,
          .last_samples = nullptr,
          .shards = nullptr};
}

LaunchShape ScanShape(const SampleParams& p, int64_t rows, size_t shared_bytes) {
  return {.grid_x = static_cast<uint32_t>(p.chunks),
          .grid_y = static_cast<uint32_t>(rows),
          .threads = ThreadsFor(p.vocab, kScanThreads),
          .shared_bytes = shared_bytes};
}
LaunchShape FinishShape(const SampleParams& p, int64_t rows) {
  return {.grid_x = static_cast<uint32_t>(rows),
          .threads = ThreadsFor(p.vocab, kFinishThreads),
          .shared_bytes =
              sizeof(FinishShared) + static_cast<size_t>(KeyCapacity(p.chunks)) * sizeof(uint64_t)};
}

}  // namespace

size_t SampleScratchBytes(int64_t max_rows, int64_t vocab) {
  Carver carver(nullptr);
  Carve(std::min(max_rows, kRowsAtOnce), vocab, carver);
  return carver.bytes();
}

void Sample(Device& device, Tensor logits, int64_t first_row, const DeviceBatch& batch,
            std::span<std::byte> scratch, SampleResult* results, int32_t* last_samples) {
  for (int64_t begin = 0; begin < logits.rows; begin += kRowsAtOnce) {
    const Tensor part = logits.Rows(begin, std::min(kRowsAtOnce, logits.rows - begin));
    SampleParams p = ParamsFor(part, 0, first_row + begin, batch, scratch);
    p.results = results + begin;
    p.last_samples = last_samples + begin;
    device.Launch(ScanKernel, ScanShape(p, part.rows, sizeof(ScanShared)), p);
    device.Launch(HistogramKernel, ScanShape(p, part.rows, sizeof(HistogramShared)), p);
    device.Launch(FinishKernel, FinishShape(p, part.rows), p);
  }
}

void SampleShard(Device& device, Tensor logits, int32_t first_token, int64_t first_row,
                 const DeviceBatch& batch, std::span<std::byte> scratch, ShardSample* shards) {
  for (int64_t begin = 0; begin < logits.rows; begin += kRowsAtOnce) {
    const Tensor part = logits.Rows(begin, std::min(kRowsAtOnce, logits.rows - begin));
    SampleParams p = ParamsFor(part, first_token, first_row + begin, batch, scratch);
    p.shards = shards + begin;
    device.Launch(ScanKernel, ScanShape(p, part.rows, sizeof(ScanShared)), p);
    device.Launch(FinishShardKernel, FinishShape(p, part.rows), p);
  }
}

}  // namespace treadle::cuda
