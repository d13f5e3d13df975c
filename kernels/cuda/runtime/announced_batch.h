// Which batch lies on the device: the announced one (Backend::BeginBatch), or, for an op that is
// given anything else, one made for it alone.
//
// An op's span counts as announced if it is the announced memory or a part of it. Whatever an op
// finds missing (another batch was uploaded in between, page ids were left out because the page
// size was not known) is uploaded again. That cannot happen while a graph is captured: the ops of a
// graph are about the announced batch, and have run once before.
//
// Thread safety: belongs to its device's thread.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/runtime/batch_upload.h"
#include "kernels/cuda/runtime/device.h"

namespace treadle::cuda {

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
  // After success, batch() is about kv.sequences and has `rows` rows.
  absl::Status UploadSequences(const KvView& kv, int64_t rows);
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
