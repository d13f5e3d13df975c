#include "kernels/cuda/runtime/announced_batch.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace treadle::cuda {
namespace {

// Room for counts, suppressed tokens and biases, per output row, before buffers must grow.
constexpr int64_t kListBytesPerRow = 4096;

// Where `part` begins in `whole`; -1 if it is not a part of it.
template <typename T>
int64_t OffsetIn(std::span<const T> whole, std::span<const T> part) {
  const std::less_equal<const T*> before;  // compares pointers into different arrays too
  if (!before(whole.data(), part.data()) ||
      !before(part.data() + part.size(), whole.data() + whole.size())) {
    return -1;
  }
  return part.data() - whole.data();
}

}  // namespace

absl::Status AnnouncedBatch::Reserve(const BackendLimits& limits, int64_t padded_sequences) {
  packing_.page_size = std::max(packing_.page_size, limits.page_size);
  vocab_ = std::max(vocab_, limits.vocab);
  const int64_t sequences = std::max(limits.max_sequences, padded_sequences);
  const int64_t outputs = std::max(limits.max_output_rows, padded_sequences);
  const int64_t pages_each = limits.page_size == 0 ? 0 : limits.max_context / limits.page_size + 2;
  const int64_t bytes_each =
      static_cast<int64_t>(sizeof(DeviceSampleRow)) + limits.vocab / 8 + kListBytesPerRow;
  return upload_.Reserve(
      {.rows = limits.max_rows,
       .sequences = sequences,
       .output_rows = outputs,
       .tail_bytes =
           sequences * pages_each * static_cast<int64_t>(sizeof(int32_t)) + outputs * bytes_each});
}

absl::Status AnnouncedBatch::Announce(const BatchInput& batch) {
  announced_ = batch;
  uploaded_ = false;
  packing_.mask_tokens = vocab_;
  return Upload();
}

absl::Status AnnouncedBatch::Upload() {
  if (std::exchange(uploaded_, true)) return absl::OkStatus();
  return upload_.Upload(announced_, packing_);
}

absl::Status AnnouncedBatch::UploadOther(const BatchInput& batch, int64_t rows,
                                         int64_t mask_tokens) {
  uploaded_ = false;
  PackOptions packing = packing_;
  packing.rows = rows;
  packing.mask_tokens = mask_tokens;
  return upload_.Upload(batch, packing);
}

absl::StatusOr<const int32_t*> AnnouncedBatch::Ids(std::span<const int32_t> ids) {
  const int64_t token = OffsetIn(announced_.token_ids, ids);
  const int64_t position = OffsetIn(announced_.positions, ids);
  if (token < 0 && position < 0) {
    TREADLE_RETURN_IF_ERROR(UploadOther({.token_ids = ids}));
    return batch().token_ids;
  }
  TREADLE_RETURN_IF_ERROR(Upload());
  return token >= 0 ? batch().token_ids + token : upload_.positions() + position;
}

absl::StatusOr<const int32_t*> AnnouncedBatch::OutputRows(std::span<const int32_t> rows) {
  const int64_t first = OffsetIn(announced_.output_rows, rows);
  TREADLE_RETURN_IF_ERROR(first >= 0 ? Upload() : UploadOther({.output_rows = rows}));
  return batch().output_rows + std::max<int64_t>(first, 0);
}

absl::Status AnnouncedBatch::UploadSequences(const KvView& kv, int64_t rows) {
  if (std::exchange(packing_.page_size, kv.layout.page_size) != kv.layout.page_size) {
    uploaded_ = false;
  }
  if (kv.sequences.data() == announced_.sequences.data() &&
      kv.sequences.size() == announced_.sequences.size()) {
    TREADLE_RETURN_IF_ERROR(Upload());
    if (batch().rows == rows) return absl::OkStatus();
  }
  TREADLE_RETURN_IF_ERROR(UploadOther({.sequences = kv.sequences}, rows));
  TREADLE_CHECK(batch().rows == rows);  // no sequence has rows beyond
  return absl::OkStatus();
}

absl::StatusOr<AnnouncedBatch::Samples> AnnouncedBatch::UploadSamples(
    std::span<const SampleRow> rows, int64_t tokens) {
  const int64_t first = OffsetIn(announced_.samples, rows);
  if (first >= 0) {
    const auto masked = [](const SampleRow& row) { return row.mask != nullptr; };
    if (packing_.mask_tokens < tokens && std::ranges::any_of(announced_.samples, masked)) {
      packing_.mask_tokens = tokens;
      uploaded_ = false;
    }
    TREADLE_RETURN_IF_ERROR(Upload());
  } else {
    TREADLE_RETURN_IF_ERROR(UploadOther({.samples = rows}, /*rows=*/0, tokens));
  }
  return Samples{.first = std::max<int64_t>(first, 0), .announced = first >= 0};
}

}  // namespace treadle::cuda
