// Memory of the CPU backend. That of packed weights: large chunks on huge pages, handed out in the
// order of packing, which is the order of use, so that prefetching runs on from one matrix into the
// next.
//
// Thread safety: confined to the thread that packs. A piece keeps its chunk alive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace treadle {

class WeightArena {
 public:
  // Zero-filled, 64-byte aligned.
  absl::StatusOr<std::shared_ptr<uint8_t>> Allocate(size_t bytes);

 private:
  std::shared_ptr<uint8_t> chunk_;
  size_t capacity_ = 0;
  size_t used_ = 0;
};

// Scratch that grows and is never given back: the steady state allocates nothing. Handed out piece
// by piece, 64-byte aligned. Confined to one thread.
class ScratchMemory {
 public:
  static constexpr size_t Aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

  // Begins anew with room for pieces whose Aligned sizes make `bytes`; contents may be lost.
  void Reserve(size_t bytes);
  template <typename T>
  T* Take(size_t bytes) {
    T* const piece = reinterpret_cast<T*>(memory_.get() + used_);
    used_ += Aligned(bytes);
    return piece;
  }

 private:
  std::shared_ptr<uint8_t> memory_;
  size_t capacity_ = 0;
  size_t used_ = 0;
};

// Zero-filled anonymous memory that costs nothing until it is touched; 2 MB aligned and on huge
// pages from 128 KB on. Null if the system refuses.
std::shared_ptr<uint8_t> MapMemory(size_t bytes);

}  // namespace treadle
