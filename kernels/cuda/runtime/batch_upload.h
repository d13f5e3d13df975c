// An iteration's description, packed on the host and brought to the device in one copy.
//
// Everything lies in one buffer at fixed addresses, so captured graphs read the current batch.
// First come arrays of fixed capacity, then the sample rows, then, right behind those that there
// are, all lists (page ids, counts, masks ...) one after the other: kernels find a list by its
// index from the one place where all list arrays are said to begin. So only what is used is copied:
// at 2,048 rows 32 KB and the lists, a microsecond or two of the bus.
//
// Thread safety: packing is a pure function; a BatchUpload belongs to its device's thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/buffer.h"
#include "kernels/cuda/runtime/batch.h"
#include "kernels/cuda/runtime/device.h"

namespace treadle::cuda {

// What packing has to know besides the batch.
struct PackOptions {
  int64_t rows = 0;         // at least so many; those beyond the batch belong to no sequence
  int64_t page_size = 0;    // 0: page ids are left out
  int64_t mask_tokens = 0;  // whose bits are copied of each mask; 0: masks are left out
};

struct BatchCapacity {
  int64_t rows = 0;
  int64_t sequences = 0;
  int64_t output_rows = 0;
  int64_t tail_bytes = 0;  // of sample rows and lists

  bool Holds(const BatchCapacity& other) const {
    return rows >= other.rows && sequences >= other.sequences && output_rows >= other.output_rows &&
           tail_bytes >= other.tail_bytes;
  }
};

// The least that holds the batch.
BatchCapacity CapacityFor(const BatchInput& batch, const PackOptions& options);
// The larger of each.
BatchCapacity Max(const BatchCapacity& a, const BatchCapacity& b);

// Offsets in bytes.
struct BatchLayout {
  explicit BatchLayout(const BatchCapacity& capacity);
  BatchLayout() : BatchLayout(BatchCapacity{}) {}

  BatchCapacity capacity;
  size_t token_ids, positions, row_sequence, row_position, output_rows, sequences;
  size_t tail;
  size_t bytes;
};

struct PackedBatch {
  DeviceBatch batch;                   // addresses in `device`
  const int32_t* positions = nullptr;  // [rows] BatchInput::positions
  size_t bytes = 0;                    // that are to be copied
};
// Packs into `host` [layout.bytes] what will lie at `device`. Requires a layout that holds the
// batch, and spans that lie within its rows.
//
// Bounds in the result: if batch.max_context is set, max_context is at least that, and
// num_sequences is the number of rows if no sequence has more than one (see Backend::BeginBatch);
// otherwise both are exact.
PackedBatch PackBatch(const BatchInput& batch, const PackOptions& options,
                      const BatchLayout& layout, std::byte* host, const std::byte* device);

class BatchUpload {
 public:
  // Uses marks first_mark and first_mark + 1 of the device.
  BatchUpload(Device& device, int first_mark) : device_(device), first_mark_(first_mark) {}

  // Not while a graph is captured. Waits for the device if addresses change.
  absl::Status Reserve(const BatchCapacity& capacity);
  // Packs and copies; grows first if it must (then not while a graph is captured). Waits only if
  // the copy of the batch before the last one is still on its way.
  absl::Status Upload(const BatchInput& batch, const PackOptions& options);

  // What the last Upload described.
  const DeviceBatch& batch() const { return packed_.batch; }
  const int32_t* positions() const { return packed_.positions; }
  // Changes whenever device addresses do.
  int64_t generation() const { return generation_; }

 private:
  Device& device_;
  const int first_mark_;
  BatchLayout layout_;
  Buffer on_device_;
  struct Slot {
    Buffer pinned;
    bool copying = false;  // perhaps
  };
  std::array<Slot, 2> slots_;
  size_t next_slot_ = 0;
  PackedBatch packed_;
  int64_t generation_ = 0;
};

}  // namespace treadle::cuda
