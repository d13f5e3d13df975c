// Memory for packed weights: large chunks on huge pages, handed out in the order of packing, which
// is the order of use, so that prefetching runs on from one matrix into the next.
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

// Zero-filled anonymous memory that costs nothing until it is touched; 2 MB aligned and on huge
// pages if it is that large. Null if the system refuses.
std::shared_ptr<uint8_t> MapMemory(size_t bytes);

}  // namespace treadle
