// Steps 4 to 8 of kernels/sampling.h by one block, without sorting the vocabulary.
//
// Top-k, top-p and the draw itself each ask for one place in the candidates' order: the first at
// which a running sum (of candidates, or of weight) exceeds a target. A histogram over bins of
// descending logits tells the bin. What is in it, and if that is few what comes before it too, is
// gathered and sorted; there the place is found, and usually also those of the later steps. A bin
// of too many candidates (ties, flat rows) is first split by the candidates' own bits.
//
// Sums are of integers, so results do not depend on which thread added what, and when.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime/batch.h"
#include "kernels/cuda/sampling/sample_block.h"

namespace treadle::cuda {

// Candidates that are sorted at once.
inline constexpr int kSorted = 2048;
// One pass over a bin splits it into so many parts at most.
inline constexpr int kSplitBits = 9;
static_assert(1 << kSplitBits == kBins);

class Draw {
 public:
  // All candidates of positive weight are in `bins` (filled, and followed by a barrier) and can be
  // read again from logits [vocab]. keys: [kSorted]; all in shared memory but for the logits.
  TREADLE_DEVICE Draw(const float* logits, int vocab, Weights weights, Histogram bins,
                      Histogram split, uint64_t* keys, BlockScratch& scratch)
      : logits_(logits),
        vocab_(vocab),
        weights_(weights),
        bins_(bins),
        split_(split),
        keys_(keys),
        scratch_(scratch) {}

  // All candidates that can be drawn are keys[0, count), in order.
  TREADLE_DEVICE Draw(Weights weights, uint64_t* keys, int count, BlockScratch& scratch)
      : Draw(nullptr, 0, weights, Histogram(nullptr), Histogram(nullptr), keys, scratch) {
    complete_ = true;
    held_ = {.first_bin = 0, .last_bin = kBins - 1};
    held_count_ = count;
  }

  TREADLE_DEVICE int32_t Token(const DeviceSampleRow& row) {
    Mass kept = Total();
    uint64_t last = kNoCandidate;           // of what is kept
    for (int step = 0; step < 3; ++step) {  // a loop, so that there is one copy of Locate
      Measure measure = Measure::kWeight;
      uint64_t target = 0;
      if (step == 0) {
        if (row.top_k <= 0 || static_cast<uint64_t>(row.top_k) >= kept.count) continue;
        measure = Measure::kCount;
        target = static_cast<uint64_t>(row.top_k) - 1;
      } else if (step == 1) {
        if (!(row.top_p < 1.0f)) continue;
        target = BelowShare(row.top_p, kept.weight);
      } else {
        if (row.min_p > 0.0f) kept.weight = WeightAtLeast(row.min_p, last);
        target = MultiplyHigh(CounterBits(row.seed, row.candidate, row.position), kept.weight);
      }
      const Place place = Locate(measure, target);
      last = keys_[place.index];
      kept = place.before + place.own;
      simt::SyncThreads();
    }
    return TokenOf(last);
  }

 private:
  // Candidates of these bins whose keys are in [base, base + 2^bits).
  struct Range {
    int first_bin = 0;
    int last_bin = -1;
    uint64_t base = 0;
    int bits = kOrderBits;
  };

  // The largest integer that is less than share * weight, so that to exceed it is to reach that
  // product. share: in (0, 1).
  TREADLE_DEVICE static uint64_t BelowShare(float share, uint64_t weight) {
    const double product = static_cast<double>(share) * static_cast<double>(weight);
    const uint64_t floor = static_cast<uint64_t>(product);
    return floor > 0 && static_cast<double>(floor) == product ? floor - 1 : floor;
  }

  TREADLE_DEVICE Mass Total() {
    const int count = complete_ ? held_count_ : kBins;
    Mass own;
    for (int i = simt::Thread(); i < count; i += simt::Threads()) {
      own = own + (complete_ ? HeldMass(i) : bins_[i]);
    }
    return {BlockSum(own.weight, scratch_), BlockSum(own.count, scratch_)};
  }

  TREADLE_DEVICE Mass HeldMass(int i) const { return weights_.MassOf(LogitOf(keys_[i])); }

  // The sum of the candidates up to `last` whose weight is at least min_p.
  TREADLE_DEVICE uint64_t WeightAtLeast(float min_p, uint64_t last) {
    uint64_t own = 0;
    const auto add = [&](float x, uint64_t key) {
      const float weight = weights_.Weight(x);
      if (key <= last && weight >= min_p) own += Weights::InUnits(weight);
    };
    // Where a prefix is held after a step, `last` is in it.
    const bool held = complete_ || (last != kNoCandidate && held_.first_bin == 0 && IsWhole(held_));
    if (held) {
      for (int i = simt::Thread(); i < held_count_; i += simt::Threads()) {
        add(LogitOf(keys_[i]), keys_[i]);
      }
    } else {
      ForEachLogit(logits_, vocab_, [&](float x, int token) { add(x, OrderKey(x, token)); });
    }
    return BlockSum(own, scratch_);
  }

  // index: into keys_.
  TREADLE_DEVICE Place Locate(Measure measure, uint64_t target) {
    if (!complete_) {
      const Place bin = BlockFind(
          kBins, [this](int i) { return bins_[i]; }, Mass{}, measure, target, scratch_);
      if (bin.index < held_.first_bin || bin.index > held_.last_bin || !IsWhole(held_)) {
        Hold(bin, measure, target);
      }
    }
    return BlockFind(
        held_count_, [this](int i) { return HeldMass(i); }, before_held_, measure, target,
        scratch_);
  }

  TREADLE_DEVICE static bool IsWhole(const Range& range) { return range.bits == kOrderBits; }

  // Gathers the range's candidates around the target, which is in the bin.
  TREADLE_DEVICE void Hold(Place bin, Measure measure, uint64_t target) {
    held_ = {.first_bin = bin.index, .last_bin = bin.index};
    before_held_ = bin.before;
    if (bin.before.count + bin.own.count <= kSorted) {
      held_.first_bin = 0;
      before_held_ = {};
    } else if (bin.own.count > kSorted) {
      Split(measure, target);
    }
    if (simt::Thread() == 0) scratch_.counter = 0;
    simt::SyncThreads();
    ForEachIn(held_,
              [this](float, uint64_t key) { keys_[simt::AtomicAdd(&scratch_.counter, 1)] = key; });
    simt::SyncThreads();
    held_count_ = static_cast<int>(scratch_.counter);
    BlockSort(keys_, held_count_);
  }

  // Narrows the bin that is to be held down to at most kSorted keys with the target among them.
  TREADLE_DEVICE void Split(Measure measure, uint64_t target) {
    // The bits in which no two of its keys differ need no splitting.
    uint64_t any = 0;
    uint64_t all = kNoCandidate;
    ForEachIn(held_, [&](float, uint64_t key) {
      any |= key;
      all &= key;
    });
    any = BlockReduce(
        any, [](uint64_t a, uint64_t b) { return a | b; }, scratch_);
    all = BlockReduce(
        all, [](uint64_t a, uint64_t b) { return a & b; }, scratch_);
    int bits = 0;
    while ((any ^ all) >> bits != 0) ++bits;
    held_.base = any >> bits << bits;
    Place part;
    do {
      held_.bits = bits;
      const int shift = bits > kSplitBits ? bits - kSplitBits : 0;
      split_.Clear();
      ForEachIn(held_, [&](float x, uint64_t key) {
        split_.Add(static_cast<int>((key - held_.base) >> shift), weights_.MassOf(x));
      });
      simt::SyncThreads();
      part = BlockFind(
          kBins, [this](int i) { return split_[i]; }, before_held_, measure, target, scratch_);
      before_held_ = part.before;
      held_.base += static_cast<uint64_t>(part.index) << shift;
      bits = shift;
    } while (part.own.count > kSorted);
    held_.bits = bits;
  }

  // visit(x, key) for each candidate of the range, by some thread.
  template <typename Visit>
  TREADLE_DEVICE void ForEachIn(const Range& range, Visit visit) const {
    ForEachLogit(logits_, vocab_, [&](float x, int token) {
      const int bin = weights_.Bin(x);
      if (bin < range.first_bin || bin > range.last_bin) return;
      const uint64_t key = OrderKey(x, token);
      if ((key - range.base) >> range.bits == 0) visit(x, key);
    });
  }

  const float* logits_;  // [vocab]
  int vocab_;
  Weights weights_;
  Histogram bins_;
  Histogram split_;
  uint64_t* keys_;  // [kSorted]: what is held, in order
  BlockScratch& scratch_;

  bool complete_ = false;
  Range held_;
  Mass before_held_;
  int held_count_ = 0;
};

}  // namespace treadle::cuda
