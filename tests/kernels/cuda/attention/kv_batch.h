// A ragged batch over a paged K/V cache on the emulated device, for tests of the ops on the cache.
// Slots that no live row's sequence has filled hold NaN, and so do rows and columns that no op may
// touch. Inputs depend on (shape, spans, seed) only.
#pragma once

#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <vector>

#include "kernels/cuda/ops.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/op_cases/random.h"

namespace treadle::cuda {

struct KvShape {
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t head_dim = 64;
  DType type = DType::kF16;
  int64_t page_size = 16;
  int64_t gap = 4;     // elements between rows of q, k, v and out
  int64_t window = 0;  // KvView::window

  KvLayout Layout(int64_t pages) const {
    return {kv_heads, head_dim, page_size, pages, type, KeyOrder::kByPosition};
  }
};

// Consecutive rows of one sequence; not live: rows that belong to none.
struct RowSpan {
  int32_t rows = 1;
  int32_t position = 0;
  bool live = true;
};

inline float Rounded(float x, DType type) {
  if (type == DType::kF16) return ToFloat(ToHalf(x));
  if (type == DType::kBF16) return ToFloat(ToBFloat16(x));
  return x;
}
// Rows of f32 on the device with NaN around them.
class DeviceRows {
 public:
  DeviceRows(Device& device, int64_t rows, int64_t cols, int64_t gap)
      : device_(device), rows_(rows), cols_(cols), stride_(cols + gap) {
    host_.assign(static_cast<size_t>((rows + 2) * stride_), NAN);
    buffer_ = device.Allocate(host_.size() * sizeof(float)).value();
  }
  float* Row(int64_t row) { return host_.data() + (row + 1) * stride_; }
  const float* Row(int64_t row) const { return host_.data() + (row + 1) * stride_; }
  void Upload() {
    device_.CopyToDevice(buffer_.data(), host_.data(), host_.size() * sizeof(float));
  }
  // The rows of now, as [rows + 2, stride] with the guards.
  std::vector<float> Download() const {
    std::vector<float> now(host_.size());
    device_.CopyToHost(now.data(), buffer_.data(), now.size() * sizeof(float));
    return now;
  }
  const std::vector<float>& initial() const { return host_; }
  Tensor view() const {
    return {reinterpret_cast<float*>(buffer_.data()) + stride_, DType::kF32, rows_, cols_, stride_};
  }
  int64_t stride() const { return stride_; }
  int64_t cols() const { return cols_; }

 private:
  Device& device_;
  const int64_t rows_, cols_, stride_;
  std::vector<float> host_;
  Buffer buffer_;
};

// How a launch's upper bounds exceed what is there, as in a captured graph.
struct Slack {
  int32_t rows = 0;
  int32_t sequences = 0;
  int32_t context = 0;
  int32_t sequence_rows = 0;
};

class KvBatch {
 public:
  // fill_rows: the cache holds the rows' own K/V as well as what came before them.
  KvBatch(Device& device, const KvShape& shape, std::vector<RowSpan> spans, uint64_t seed,
          bool fill_rows)
      : device_(device), shape_(shape), spans_(std::move(spans)), random_(seed) {
    int32_t pages = 3;
    for (const RowSpan& span : spans_) {
      first_row_.push_back(rows_);
      rows_ += span.rows;
      pages += PagesOf(span);
    }
    layout_ = shape.Layout(pages);
    std::vector<int32_t> ids(static_cast<size_t>(pages));
    std::iota(ids.begin(), ids.end(), 0);
    for (size_t i = ids.size() - 1; i > 0; --i) {
      std::swap(ids[i], ids[static_cast<size_t>(random_.Below(static_cast<int64_t>(i) + 1))]);
    }
    size_t next = 0;
    for (const RowSpan& span : spans_) {
      first_page_.push_back(static_cast<int32_t>(next));
      next += static_cast<size_t>(PagesOf(span));
    }
    page_ids_ = ids;
    cache_.assign(static_cast<size_t>(pages * layout_.PageBytes()), std::byte{0xff});
    for (size_t s = 0; s < spans_.size(); ++s) {
      const int32_t end = spans_[s].position + (fill_rows ? spans_[s].rows : 0);
      for (int32_t p = 0; spans_[s].live && p < end; ++p) FillSlot(s, p);
    }
    on_device_ = device.Allocate(cache_.size()).value();
    UploadCache();
  }

  int64_t rows() const { return rows_; }
  const std::vector<RowSpan>& spans() const { return spans_; }
  int32_t first_row(size_t s) const { return first_row_[s]; }
  const KvShape& shape() const { return shape_; }
  const KvLayout& layout() const { return layout_; }
  Random& random() { return random_; }
  std::byte* pages() const { return on_device_.data(); }
  void UploadCache() { device_.CopyToDevice(on_device_.data(), cache_.data(), cache_.size()); }
  const std::vector<std::byte>& initial_cache() const { return cache_; }
  std::vector<std::byte> DownloadCache() const {
    std::vector<std::byte> now(cache_.size());
    device_.CopyToHost(now.data(), on_device_.data(), now.size());
    return now;
  }
  // Byte offset of an element in the cache.
  size_t KeyAt(size_t s, int32_t p, int64_t head, int64_t i) const {
    return ElementAt(s, p, layout_.KeyElement(head, p % layout_.page_size, i));
  }
  size_t ValueAt(size_t s, int32_t p, int64_t head, int64_t i) const {
    return ElementAt(s, p, layout_.ValueElement(head, p % layout_.page_size, i));
  }
  float Key(size_t s, int32_t p, int64_t head, int64_t i) const {
    return LoadElement(shape_.type, &cache_[KeyAt(s, p, head, i)], 0);
  }
  float Value(size_t s, int32_t p, int64_t head, int64_t i) const {
    return LoadElement(shape_.type, &cache_[ValueAt(s, p, head, i)], 0);
  }
  // Makes one element of K, or of V, NaN, on host and device.
  void SpoilKey(size_t s, int32_t p, int64_t head, int64_t i) {
    StoreElement(shape_.type, NAN, &cache_[KeyAt(s, p, head, i)], 0);
    UploadCache();
  }
  void SpoilValue(size_t s, int32_t p, int64_t head, int64_t i) {
    StoreElement(shape_.type, NAN, &cache_[ValueAt(s, p, head, i)], 0);
    UploadCache();
  }

  // Rows [begin, begin + count) as the whole batch. Valid until the next call.
  DeviceBatch Upload(int32_t begin, int32_t count, const Slack& slack = {}) {
    std::vector<DeviceSequence> sequences;
    std::vector<int32_t> row_sequence(static_cast<size_t>(count + slack.rows), -1);
    std::vector<int32_t> row_position(row_sequence.size(), 0);
    DeviceBatch batch;
    for (size_t s = 0; s < spans_.size(); ++s) {
      const int32_t first = std::max(first_row_[s], begin);
      const int32_t end = std::min(first_row_[s] + spans_[s].rows, begin + count);
      if (!spans_[s].live || first >= end) continue;
      const int32_t position = spans_[s].position + first - first_row_[s];
      for (int32_t row = first; row < end; ++row) {
        row_sequence[static_cast<size_t>(row - begin)] = static_cast<int32_t>(sequences.size());
        row_position[static_cast<size_t>(row - begin)] = position + row - first;
      }
      sequences.push_back({first - begin, end - first, position, first_page_[s]});
      batch.max_context = std::max(batch.max_context, position + end - first);
      batch.max_sequence_rows = std::max(batch.max_sequence_rows, end - first);
    }
    batch.rows = count + slack.rows;
    sequences.resize(sequences.size() + static_cast<size_t>(slack.sequences));
    batch.num_sequences = static_cast<int32_t>(sequences.size());
    batch.max_context += slack.context;
    batch.max_sequence_rows += slack.sequence_rows;
    uploads_.clear();
    batch.sequences = Put(sequences);
    batch.pages = Put(page_ids_);
    batch.row_sequence = Put(row_sequence);
    batch.row_position = Put(row_position);
    return batch;
  }
  DeviceBatch Upload() { return Upload(0, static_cast<int32_t>(rows_)); }

 private:
  int32_t PagesOf(const RowSpan& span) const {
    const auto page = static_cast<int32_t>(shape_.page_size);
    return (span.position + span.rows + page - 1) / page;
  }
  size_t ElementAt(size_t s, int32_t p, int64_t element) const {
    const int64_t page = page_ids_[static_cast<size_t>(first_page_[s] + p / layout_.page_size)];
    return static_cast<size_t>(page * layout_.PageBytes() +
                               element * static_cast<int64_t>(SizeOf(shape_.type)));
  }
  void FillSlot(size_t s, int32_t p) {
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      for (int64_t i = 0; i < shape_.head_dim; ++i) {
        StoreElement(shape_.type, random_.Normal(), &cache_[KeyAt(s, p, head, i)], 0);
        StoreElement(shape_.type, random_.Normal(), &cache_[ValueAt(s, p, head, i)], 0);
      }
    }
  }
  template <typename T>
  const T* Put(const std::vector<T>& values) {
    uploads_.push_back(device_.Allocate(values.size() * sizeof(T) + 1).value());
    if (!values.empty()) {
      device_.CopyToDevice(uploads_.back().data(), values.data(), values.size() * sizeof(T));
    }
    return reinterpret_cast<const T*>(uploads_.back().data());
  }

  Device& device_;
  const KvShape shape_;
  const std::vector<RowSpan> spans_;
  Random random_;
  KvLayout layout_;
  int32_t rows_ = 0;
  std::vector<int32_t> first_row_;   // per span
  std::vector<int32_t> first_page_;  // per span, into page_ids_
  std::vector<int32_t> page_ids_;
  std::vector<std::byte> cache_;
  Buffer on_device_;
  std::deque<Buffer> uploads_;
};

}  // namespace treadle::cuda
