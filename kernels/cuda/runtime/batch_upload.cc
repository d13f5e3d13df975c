#include "kernels/cuda/runtime/batch_upload.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

namespace treadle::cuda {
namespace {

constexpr size_t kAlignment = 64;

size_t AlignUp(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

int64_t NumPages(const SequenceSpan& span, int64_t page_size) {
  if (page_size == 0) return 0;
  return (span.first_position + span.num_rows + page_size - 1) / page_size;
}

std::span<const uint32_t> MaskOf(const SampleRow& row, int64_t tokens) {
  if (row.mask == nullptr) return {};
  return {row.mask, static_cast<size_t>((tokens + 31) / 32)};
}

// How many rows a batch has, and how many sequences its launches are sized for.
int64_t NumRows(const BatchInput& batch, const PackOptions& options) {
  auto rows = static_cast<int64_t>(std::max(batch.token_ids.size(), batch.positions.size()));
  rows = std::max(rows, options.rows);
  for (const SequenceSpan& span : batch.sequences) {
    rows = std::max<int64_t>(rows, span.first_row + span.num_rows);
  }
  return rows;
}
int64_t LongestChunk(const BatchInput& batch) {
  int64_t longest = 0;
  for (const SequenceSpan& span : batch.sequences) {
    longest = std::max<int64_t>(longest, span.num_rows);
  }
  return longest;
}
int64_t NumSequences(const BatchInput& batch, int64_t rows) {
  const auto real = static_cast<int64_t>(batch.sequences.size());
  return batch.max_context > 0 && LongestChunk(batch) <= 1 ? std::max(real, rows) : real;
}
int64_t NumOutputs(const BatchInput& batch) {
  return static_cast<int64_t>(std::max(batch.output_rows.size(), batch.samples.size()));
}

// Bytes of a list and of what may lie unused before it.
template <typename T>
int64_t ListBytes(size_t count) {
  return static_cast<int64_t>(count == 0 ? 0 : (count + 1) * sizeof(T));
}

// Writes lists behind the sample rows. An index counts elements of the list's type from `base`.
class ListWriter {
 public:
  ListWriter(std::byte* base, size_t used, size_t capacity)
      : base_(base), used_(used), capacity_(capacity) {}

  template <typename T>
  int32_t Append(std::span<const T> list) {
    if (list.empty()) return 0;
    used_ = AlignUp(used_, sizeof(T));
    const size_t index = used_ / sizeof(T);
    TREADLE_CHECK(used_ + list.size_bytes() <= capacity_);
    std::memcpy(base_ + used_, list.data(), list.size_bytes());
    used_ += list.size_bytes();
    return static_cast<int32_t>(index);
  }
  size_t used() const { return used_; }

 private:
  std::byte* const base_;
  size_t used_;
  const size_t capacity_;
};

DeviceSampleRow Flat(const SampleRow& row, const PackOptions& options, ListWriter& lists) {
  DeviceSampleRow flat = FlatRow(row);
  if (row.parameters == nullptr) return flat;
  flat.first_count = lists.Append(row.counts);
  flat.num_counts = static_cast<int32_t>(row.counts.size());
  flat.first_suppressed = lists.Append(row.suppressed);
  flat.num_suppressed = static_cast<int32_t>(row.suppressed.size());
  flat.first_bias = lists.Append(std::span(row.parameters->logit_bias));
  flat.num_biases = static_cast<int32_t>(row.parameters->logit_bias.size());
  const std::span<const uint32_t> mask = MaskOf(row, options.mask_tokens);
  if (!mask.empty()) flat.first_mask_word = lists.Append(mask);
  return flat;
}

template <typename T>
T* At(std::byte* base, size_t offset) {
  return reinterpret_cast<T*>(base + offset);
}
template <typename T>
const T* At(const std::byte* base, size_t offset) {
  return reinterpret_cast<const T*>(base + offset);
}

DeviceBatch Addresses(const BatchLayout& layout, const std::byte* device) {
  return {.token_ids = At<int32_t>(device, layout.token_ids),
          .sequences = At<DeviceSequence>(device, layout.sequences),
          .window_sequences = At<DeviceSequence>(device, layout.window_sequences),
          .pages = At<int32_t>(device, layout.tail),
          .row_sequence = At<int32_t>(device, layout.row_sequence),
          .row_position = At<int32_t>(device, layout.row_position),
          .output_rows = At<int32_t>(device, layout.output_rows),
          .samples = At<DeviceSampleRow>(device, layout.tail),
          .counts = At<TokenCount>(device, layout.tail),
          .suppressed = At<int32_t>(device, layout.tail),
          .biases = At<LogitBias>(device, layout.tail),
          .mask_words = At<uint32_t>(device, layout.tail)};
}

// Sequences with their pages.
void PackSpans(std::span<const SequenceSpan> spans, const PackOptions& options, ListWriter& lists,
               DeviceSequence* to) {
  for (const SequenceSpan& span : spans) {
    TREADLE_CHECK(span.first_row >= 0 && span.num_rows >= 0 && span.first_position >= 0);
    const auto num_pages = static_cast<size_t>(NumPages(span, options.page_size));
    *to++ = {.first_row = span.first_row,
             .num_rows = span.num_rows,
             .first_position = span.first_position,
             .first_page = lists.Append(std::span(span.pages, num_pages))};
  }
}

// And whose each row is.
void PackSequences(const BatchInput& batch, const PackOptions& options, const BatchLayout& layout,
                   std::byte* host, ListWriter& lists, DeviceBatch& bounds) {
  auto* const row_sequence = At<int32_t>(host, layout.row_sequence);
  auto* const row_position = At<int32_t>(host, layout.row_position);
  std::fill_n(row_sequence, bounds.rows, -1);
  std::fill_n(row_position, bounds.rows, 0);
  const auto pack = [&](std::span<const SequenceSpan> spans, size_t at) {
    auto* const sequences = At<DeviceSequence>(host, at);
    std::fill_n(sequences, bounds.num_sequences, DeviceSequence{});
    PackSpans(spans, options, lists, sequences);
  };
  pack(batch.sequences, layout.sequences);
  if (!batch.window_sequences.empty()) pack(batch.window_sequences, layout.window_sequences);
  int64_t context = batch.max_context;
  for (size_t s = 0; s < batch.sequences.size(); ++s) {
    const SequenceSpan& span = batch.sequences[s];
    for (int32_t i = 0; i < span.num_rows; ++i) {
      row_sequence[span.first_row + i] = static_cast<int32_t>(s);
      row_position[span.first_row + i] = span.first_position + i;
    }
    context = std::max<int64_t>(context, span.first_position + span.num_rows);
  }
  bounds.max_context = static_cast<int32_t>(context);
  bounds.max_sequence_rows = static_cast<int32_t>(LongestChunk(batch));
}

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

void CopyIds(std::span<const int32_t> ids, int32_t* to) { std::copy(ids.begin(), ids.end(), to); }

}  // namespace

BatchCapacity CapacityFor(const BatchInput& batch, const PackOptions& options) {
  const int64_t rows = NumRows(batch, options);
  int64_t tail = NumOutputs(batch) * static_cast<int64_t>(sizeof(DeviceSampleRow));
  for (const auto& spans : {batch.sequences, batch.window_sequences}) {
    for (const SequenceSpan& span : spans) {
      tail += ListBytes<int32_t>(static_cast<size_t>(NumPages(span, options.page_size)));
    }
  }
  for (const SampleRow& row : batch.samples) {
    if (row.parameters == nullptr) continue;
    tail += ListBytes<TokenCount>(row.counts.size()) + ListBytes<int32_t>(row.suppressed.size()) +
            ListBytes<LogitBias>(row.parameters->logit_bias.size()) +
            ListBytes<uint32_t>(MaskOf(row, options.mask_tokens).size());
  }
  return {.rows = rows,
          .sequences = NumSequences(batch, rows),
          .window_sequences = batch.window_sequences.empty() ? 0 : NumSequences(batch, rows),
          .output_rows = NumOutputs(batch),
          .tail_bytes = tail};
}

BatchCapacity Max(const BatchCapacity& a, const BatchCapacity& b) {
  return {.rows = std::max(a.rows, b.rows),
          .sequences = std::max(a.sequences, b.sequences),
          .window_sequences = std::max(a.window_sequences, b.window_sequences),
          .output_rows = std::max(a.output_rows, b.output_rows),
          .tail_bytes = std::max(a.tail_bytes, b.tail_bytes)};
}

BatchLayout::BatchLayout(const BatchCapacity& sizes) : capacity(sizes) {
  size_t end = 0;
  const auto place = [&](int64_t count, size_t element) {
    const size_t at = end;
    end = AlignUp(end + static_cast<size_t>(count) * element, kAlignment);
    return at;
  };
  token_ids = place(sizes.rows, sizeof(int32_t));
  positions = place(sizes.rows, sizeof(int32_t));
  row_sequence = place(sizes.rows, sizeof(int32_t));
  row_position = place(sizes.rows, sizeof(int32_t));
  output_rows = place(sizes.output_rows, sizeof(int32_t));
  sequences = place(sizes.sequences, sizeof(DeviceSequence));
  window_sequences = place(sizes.window_sequences, sizeof(DeviceSequence));
  tail = place(sizes.tail_bytes, 1);
  bytes = end;
}

PackedBatch PackBatch(const BatchInput& batch, const PackOptions& options,
                      const BatchLayout& layout, std::byte* host, const std::byte* device) {
  TREADLE_CHECK(layout.capacity.Holds(CapacityFor(batch, options)));
  PackedBatch packed;
  packed.batch = Addresses(layout, device);
  packed.positions = At<int32_t>(device, layout.positions);
  DeviceBatch& bounds = packed.batch;
  bounds.rows = static_cast<int32_t>(NumRows(batch, options));
  bounds.num_sequences = static_cast<int32_t>(NumSequences(batch, bounds.rows));
  bounds.num_output_rows = static_cast<int32_t>(NumOutputs(batch));

  CopyIds(batch.token_ids, At<int32_t>(host, layout.token_ids));
  CopyIds(batch.positions, At<int32_t>(host, layout.positions));
  CopyIds(batch.output_rows, At<int32_t>(host, layout.output_rows));
  ListWriter lists(host + layout.tail, batch.samples.size() * sizeof(DeviceSampleRow),
                   static_cast<size_t>(layout.capacity.tail_bytes));
  PackSequences(batch, options, layout, host, lists, bounds);
  auto* const samples = At<DeviceSampleRow>(host, layout.tail);
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    samples[i] = Flat(batch.samples[i], options, lists);
  }
  packed.bytes = layout.tail + lists.used();
  return packed;
}

absl::Status BatchUpload::Reserve(const BatchCapacity& capacity) {
  const BatchCapacity all = Max(layout_.capacity, capacity);
  if (layout_.capacity.Holds(all)) return absl::OkStatus();
  TREADLE_CHECK(!device_.capturing());
  TREADLE_RETURN_IF_ERROR(device_.Synchronize());
  const BatchLayout layout(all);
  TREADLE_ASSIGN_OR_RETURN(on_device_, device_.Allocate(layout.bytes));
  for (Slot& slot : slots_) {
    TREADLE_ASSIGN_OR_RETURN(slot.pinned, device_.AllocateHost(layout.bytes));
    slot.copying = false;
  }
  layout_ = layout;
  ++generation_;
  return absl::OkStatus();
}

absl::Status BatchUpload::Upload(const BatchInput& batch, const PackOptions& options) {
  TREADLE_CHECK(!device_.capturing());
  const BatchCapacity need = CapacityFor(batch, options);
  if (!layout_.capacity.Holds(need)) {
    BatchCapacity more = need;  // lists grow token by token, buffers not
    more.tail_bytes *= 2;
    TREADLE_RETURN_IF_ERROR(Reserve(more));
  }
  Slot& slot = slots_[next_slot_];
  const int mark = first_mark_ + static_cast<int>(next_slot_);
  next_slot_ = 1 - next_slot_;
  if (slot.copying) TREADLE_RETURN_IF_ERROR(device_.WaitForMark(mark));
  packed_ = PackBatch(batch, options, layout_, slot.pinned.data(), on_device_.data());
  slot.copying = packed_.bytes > 0;
  if (!slot.copying) return absl::OkStatus();
  device_.CopyToDeviceAsync(on_device_.data(), slot.pinned.data(), packed_.bytes);
  device_.SetMark(mark);
  return absl::OkStatus();
}

absl::Status AnnouncedBatch::Reserve(const BackendLimits& limits, int64_t padded_sequences) {
  packing_.page_size = std::max(packing_.page_size, limits.page_size);
  vocab_ = std::max(vocab_, limits.vocab);
  const int64_t sequences = std::max(limits.max_sequences, padded_sequences);
  const int64_t outputs = std::max(limits.max_output_rows, padded_sequences);
  const int64_t pages_each =
      limits.page_size == 0 ? 0 : limits.page_tables * (limits.max_context / limits.page_size + 2);
  const int64_t bytes_each =
      static_cast<int64_t>(sizeof(DeviceSampleRow)) + limits.vocab / 8 + kListBytesPerRow;
  return upload_.Reserve(
      {.rows = limits.max_rows,
       .sequences = sequences,
       .window_sequences = limits.page_tables > 1 ? sequences : 0,
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

absl::StatusOr<DeviceBatch> AnnouncedBatch::UploadSequences(const KvView& kv, int64_t rows) {
  if (std::exchange(packing_.page_size, kv.layout.page_size) != kv.layout.page_size) {
    uploaded_ = false;
  }
  const auto are = [&kv](std::span<const SequenceSpan> announced) {
    return kv.sequences.data() == announced.data() && kv.sequences.size() == announced.size();
  };
  const bool window = are(announced_.window_sequences);
  if (window || are(announced_.sequences)) {
    TREADLE_RETURN_IF_ERROR(Upload());
    DeviceBatch found = batch();
    if (window) found.sequences = found.window_sequences;
    if (found.rows == rows) return found;
  }
  TREADLE_RETURN_IF_ERROR(UploadOther({.sequences = kv.sequences}, rows));
  TREADLE_CHECK(batch().rows == rows);  // no sequence has rows beyond
  return batch();
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
