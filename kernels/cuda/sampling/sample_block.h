// The work that a block of the sampling kernels does together: reductions, a search in running
// sums, a sort.
//
// Every function is called by all threads of the block and ends with a barrier, so that the shared
// memory it was given may be used again at once; what is to be read from shared memory must have
// been written before a barrier. All threads get the result.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime/simt.h"
#include "kernels/cuda/sampling/sample_order.h"

namespace treadle::cuda {

// Logits of a row that a thread has on their way at once.
inline constexpr int kLoads = 8;

// Shared memory of the functions below.
struct BlockScratch {
  uint64_t warps[64];
  uint64_t found[5];
  uint32_t counter;
};

// combine: commutative. One fixed order for a number of threads. T: of 4 or 8 bytes.
template <typename T, typename Combine>
TREADLE_DEVICE T BlockReduce(T value, Combine combine, BlockScratch& scratch) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  T* const warps = reinterpret_cast<T*>(scratch.warps);
  TREADLE_UNROLL
  for (int mask = simt::kWarp / 2; mask > 0; mask >>= 1) {
    value = combine(value, simt::ShuffleXor(value, mask));
  }
  if (simt::Lane() == 0) warps[simt::Warp()] = value;
  simt::SyncThreads();
  value = warps[0];
  for (int warp = 1; warp < simt::Threads() / simt::kWarp; ++warp) {
    value = combine(value, warps[warp]);
  }
  simt::SyncThreads();
  return value;
}

template <typename T>
TREADLE_DEVICE T BlockSum(T value, BlockScratch& scratch) {
  return BlockReduce(
      value, [](T a, T b) { return a + b; }, scratch);
}
TREADLE_DEVICE float BlockMax(float value, BlockScratch& scratch) {
  return BlockReduce(
      value, [](float a, float b) { return a > b ? a : b; }, scratch);
}
// The first in order.
TREADLE_DEVICE uint64_t BlockFirst(uint64_t key, BlockScratch& scratch) {
  return BlockReduce(
      key, [](uint64_t a, uint64_t b) { return a < b ? a : b; }, scratch);
}

// A place in a sequence of masses.
struct Place {
  int index = 0;
  Mass before;  // of all that comes before it
  Mass own;
};

// The sum that a search compares with its target.
enum class Measure { kWeight, kCount };
TREADLE_DEVICE uint64_t Of(Mass mass, Measure measure) {
  return measure == Measure::kCount ? mass.count : mass.weight;
}

// The first of item(0) .. item(count - 1) at which `before` plus the sum of items up to and
// including it exceeds the target. There must be one, and `before` must not exceed it.
template <typename Item>
TREADLE_DEVICE Place BlockFind(int count, Item item, Mass before, Measure measure, uint64_t target,
                               BlockScratch& scratch) {
  const int each = (count + simt::Threads() - 1) / simt::Threads();
  const int begin = simt::Thread() * each;
  const int end = begin + each < count ? begin + each : count;
  Mass own;
  for (int i = begin; i < end; ++i) own = own + item(i);

  Mass upto = own;  // of this warp's threads
  TREADLE_UNROLL
  for (int delta = 1; delta < simt::kWarp; delta *= 2) {
    const Mass other = {simt::ShuffleUp(upto.weight, delta), simt::ShuffleUp(upto.count, delta)};
    if (simt::Lane() >= delta) upto = upto + other;
  }
  if (simt::Lane() == simt::kWarp - 1) {
    scratch.warps[2 * simt::Warp()] = upto.weight;
    scratch.warps[2 * simt::Warp() + 1] = upto.count;
  }
  simt::SyncThreads();
  Mass sum = {before.weight + upto.weight - own.weight, before.count + upto.count - own.count};
  for (int warp = 0; warp < simt::Warp(); ++warp) {
    sum = sum + Mass{scratch.warps[2 * warp], scratch.warps[2 * warp + 1]};
  }
  if (Of(sum, measure) <= target && target < Of(sum + own, measure)) {
    int at = begin;
    Mass mass = item(at);
    while (Of(sum + mass, measure) <= target) {
      sum = sum + mass;
      mass = item(++at);
    }
    scratch.found[0] = static_cast<uint64_t>(at);
    scratch.found[1] = sum.weight;
    scratch.found[2] = sum.count;
    scratch.found[3] = mass.weight;
    scratch.found[4] = mass.count;
  }
  simt::SyncThreads();
  const Place place = {static_cast<int>(scratch.found[0]),
                       {scratch.found[1], scratch.found[2]},
                       {scratch.found[3], scratch.found[4]}};
  simt::SyncThreads();
  return place;
}

// Batcher's bitonic sort, ascending. keys: shared, with room up to the next power of two, which is
// filled with kNoCandidate.
TREADLE_DEVICE void BlockSort(uint64_t* keys, int count) {
  int size = 2;
  while (size < count) size *= 2;
  for (int i = count + simt::Thread(); i < size; i += simt::Threads()) keys[i] = kNoCandidate;
  simt::SyncThreads();
  for (int run = 2; run <= size; run *= 2) {
    for (int stride = run / 2; stride > 0; stride /= 2) {
      for (int i = simt::Thread(); i < size / 2; i += simt::Threads()) {
        const int low = 2 * i - (i & (stride - 1));
        const uint64_t a = keys[low];
        const uint64_t b = keys[low + stride];
        const bool ascending = (low & run) == 0;
        if ((a > b) == ascending) {
          keys[low] = b;
          keys[low + stride] = a;
        }
      }
      simt::SyncThreads();
    }
  }
}

// visit(x, token) for each clean logit of [0, count), by some thread.
template <typename Visit>
TREADLE_DEVICE void ForEachLogit(const float* logits, int count, Visit visit) {
  for (int base = simt::Thread(); base < count; base += kLoads * simt::Threads()) {
    float x[kLoads];
    TREADLE_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const int token = base + i * simt::Threads();
      x[i] = token < count ? logits[token] : 0.0f;
    }
    TREADLE_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const int token = base + i * simt::Threads();
      if (token < count) visit(CleanLogit(x[i]), token);
    }
  }
}

// Masses of kBins places in shared memory, which any thread adds to at any time. Weights are of two
// words, because atomics are.
class Histogram {
 public:
  static constexpr int kWords = 3 * kBins;

  TREADLE_DEVICE explicit Histogram(uint32_t* words) : words_(words) {}

  // Ends with a barrier.
  TREADLE_DEVICE void Clear() const {
    for (int i = simt::Thread(); i < kWords; i += simt::Threads()) words_[i] = 0;
    simt::SyncThreads();
  }
  TREADLE_DEVICE void Add(int bin, Mass mass) const {
    simt::AtomicAdd(words_ + bin, static_cast<uint32_t>(mass.count));
    const uint32_t low = static_cast<uint32_t>(mass.weight);
    uint32_t high = static_cast<uint32_t>(mass.weight >> 32);
    if (low != 0 && simt::AtomicAdd(words_ + kBins + bin, low) > ~low) ++high;  // a carry
    if (high != 0) simt::AtomicAdd(words_ + 2 * kBins + bin, high);
  }
  TREADLE_DEVICE void Set(int bin, Mass mass) const {
    words_[bin] = static_cast<uint32_t>(mass.count);
    words_[kBins + bin] = static_cast<uint32_t>(mass.weight);
    words_[2 * kBins + bin] = static_cast<uint32_t>(mass.weight >> 32);
  }
  TREADLE_DEVICE Mass operator[](int bin) const {
    return {(uint64_t{words_[2 * kBins + bin]} << 32) | words_[kBins + bin], words_[bin]};
  }

 private:
  uint32_t* words_;  // [3, kBins]: counts, weights' lower and upper words
};

}  // namespace treadle::cuda
