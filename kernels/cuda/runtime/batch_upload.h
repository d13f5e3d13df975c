// An iteration's description, packed on the host and brought to the device in one copy.
//
// Everything lies in one buffer at fixed addresses, so captured graphs read the current batch.
// First come arrays of fixed capacity, then the sample rows, then, right behind those that there
// are, all lists (page ids, counts, masks ...) one after the other: kernels find a list by its
// index from the one place where all list arrays are said to begin. So only what is used is copied:
// at 2,048 rows 32 KB and the lists, a microsecond or two of the bus.
//
// Thread safety: packing is a pure function; the classes belong to their device's thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/buffer.h"
#include "kernels/cuda/runtime/batch.h"
#include "kernels/cuda/runtime/device.h"

namespace treadle::cuda {

// The numbers that packing needs besides the batch.
struct PackOptions {
  int64_t rows = 0;         // at least so many; those beyond the batch belong to no sequence
  int64_t page_size = 0;    // 0: page ids are left out
  int64_t mask_tokens = 0;  // whose bits are copied of each mask; 0: masks are left out
};

struct BatchCapacity {
  int64_t rows = 0;
  int64_t sequences = 0;
  int64_t window_sequences = 0;
  int64_t output_rows = 0;
  int64_t tail_bytes = 0;  // of sample rows and lists

  bool Holds(const BatchCapacity& other) const {
    return rows >= other.rows && sequences >= other.sequences &&
           window_sequences >= other.window_sequences && output_rows >= other.output_rows &&
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
  size_t token_ids, positions, row_sequence, row_position, output_rows, sequences, window_sequences;
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

  // The batch of the last Upload.
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

// Which batch lies on the device: the announced one (Backend::BeginBatch), or, for an op that is
// given anything else, one made for it alone.
//
// An op's span counts as announced if it is the announced memory or a part of it. Whatever an op
// finds missing (another batch was uploaded in between, page ids were left out because the page
// size was not known) is uploaded again. That cannot happen while a graph is captured: the ops of a
// graph are about the announced batch, and have run once before.
class AnnouncedBatch {
 public:
  // Uses marks first_mark and first_mark + 1 of the device.
  AnnouncedBatch(Device& device, int first_mark) : upload_(device, first_mark) {}

  // padded_sequences: rows of the largest batch of one row per sequence.
  absl::Status Reserve(const BackendLimits& limits, int64_t padded_sequences);
  absl::Status Announce(const BatchInput& batch);
  // Brings the announced batch to the device if it is not there.
  absl::Status Upload();

  const BatchInput& announced() const { return announced_; }
  // The batch that was uploaded last.
  const DeviceBatch& batch() const { return upload_.batch(); }
  // Changes whenever device addresses do.
  int64_t generation() const { return upload_.generation(); }

  // Where an op finds its arguments on the device. Embed's: [ids.size()]
  absl::StatusOr<const int32_t*> Ids(std::span<const int32_t> ids);
  // Gather's. [rows.size()]
  absl::StatusOr<const int32_t*> OutputRows(std::span<const int32_t> rows);
  // The uploaded batch, of `rows` rows, whose `sequences` are kv.sequences.
  absl::StatusOr<DeviceBatch> UploadSequences(const KvView& kv, int64_t rows);
  // After success, batch() has the samples from the returned one on. tokens: whose mask bits are
  // wanted.
  struct Samples {
    int64_t first = 0;
    bool announced = false;
  };
  absl::StatusOr<Samples> UploadSamples(std::span<const SampleRow> rows, int64_t tokens);

 private:
  absl::Status UploadOther(const BatchInput& batch, int64_t rows = 0, int64_t mask_tokens = 0);

  BatchUpload upload_;
  int64_t vocab_ = 0;  // reserved; 0: masks are uploaded once Sample has said how long they are
  PackOptions packing_;
  BatchInput announced_;
  bool uploaded_ = true;  // the announced batch
};

}  // namespace treadle::cuda
