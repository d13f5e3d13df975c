#include "models/adapter.h"

#include <algorithm>

#include "base/status.h"

namespace treadle {

absl::StatusOr<const void*> Adapter::Upload(Backend& backend, DType type, int64_t cols,
                                            std::span<const float> values) {
  const int64_t stride = LowRankStride(cols), rows = std::ssize(values) / cols;
  const auto size = static_cast<size_t>(rows * stride) * SizeOf(type);
  std::vector<std::byte> padded(size);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < cols; ++i) {
      StoreElement(type, values[static_cast<size_t>(row * cols + i)], padded.data(),
                   row * stride + i);
    }
  }
  TREADLE_ASSIGN_OR_RETURN(Buffer buffer, backend.Allocate(size));
  backend.CopyToDevice(buffer.data(), padded.data(), size);
  return buffers_.emplace_back(std::move(buffer)).data();
}

absl::Status Adapter::Add(Backend& backend, const Linear& linear, DType type, int64_t rank,
                          std::span<const float> a, std::span<const float> b) {
  LowRank& factors = factors_[static_cast<size_t>(linear.index())];
  TREADLE_ASSIGN_OR_RETURN(factors.a, Upload(backend, type, rank, a));
  TREADLE_ASSIGN_OR_RETURN(factors.b, Upload(backend, type, std::ssize(b) / rank, b));
  factors.type = type;
  factors.rank = rank;
  return absl::OkStatus();
}

absl::StatusOr<Tensor> Adapter::UploadTable(Backend& backend, int64_t rows,
                                            std::span<const float> values) {
  TREADLE_ASSIGN_OR_RETURN(Buffer table, backend.Allocate(values.size_bytes()));
  backend.CopyToDevice(table.data(), values.data(), values.size_bytes());
  std::byte* const data = buffers_.emplace_back(std::move(table)).data();
  return DenseTensor(data, DType::kF32, rows, std::ssize(values) / rows);
}

absl::Status Adapter::AddSoftPrompt(Backend& backend, std::span<const float> rows) {
  TREADLE_ASSIGN_OR_RETURN(soft_prompt_, UploadTable(backend, virtual_tokens_, rows));
  return absl::OkStatus();
}

absl::Status Adapter::AddEmbedding(Backend& backend, int64_t rank, std::span<const float> a,
                                   std::span<const float> b) {
  TREADLE_ASSIGN_OR_RETURN(embedding_a_, UploadTable(backend, std::ssize(a) / rank, a));
  embedding_b_.rank = rank;
  TREADLE_ASSIGN_OR_RETURN(embedding_b_.b, Upload(backend, DType::kF32, std::ssize(b) / rank, b));
  return absl::OkStatus();
}

void AdapterRows::Sort(std::span<const Adapter* const> adapters) {
  of_rows_ = adapters;
  groups_.clear();
  for (size_t row = 0; row < adapters.size(); ++row) {
    if (adapters[row] == nullptr) continue;
    auto group = std::ranges::find(groups_, adapters[row], &Group::adapter);
    if (group == groups_.end()) group = groups_.insert(group, {adapters[row], {}});
    group->rows.push_back(static_cast<int32_t>(row));
  }
}

void AdapterRows::Add(Backend& backend, Tensor x, std::span<const LinearProduct> products) {
  products_.clear();
  for (const Group& group : groups_) {
    for (const LinearProduct& product : products) {
      const LowRank& factors = group.adapter->Of(*product.linear);
      if (factors.rank == 0) continue;
      const auto first = static_cast<int32_t>(product.first_row);
      const auto end = static_cast<int32_t>(first + product.out.rows);
      const auto begin = std::ranges::lower_bound(group.rows, first);
      const auto last = std::ranges::lower_bound(group.rows, end);
      if (begin == last) continue;
      Tensor out = product.out;  // counted as x's rows are
      out.data = out.Row<float>(-first);
      out.rows = end;
      products_.push_back({.by = factors, .rows = std::span(begin, last), .out = out});
    }
  }
  if (!products_.empty()) backend.AddLowRank(x, products_);
}

void AdapterRows::AddEmbedding(Backend& backend, std::span<const int32_t> ids, Tensor scratch,
                               Tensor out) {
  for (const Group& group : groups_) {
    const Tensor& table = group.adapter->embedding_a();
    if (table.rows == 0) continue;
    const Tensor inner = DenseTensor(scratch.data, DType::kF32, scratch.rows, table.cols);
    backend.Gather(table, ids, inner);
    const LowRankProduct product[] = {
        {.by = group.adapter->embedding_b(), .rows = group.rows, .out = out}};
    backend.AddLowRank(inner, product);
  }
}

void AdapterRows::ReplaceEmbedding(Backend& backend, std::span<const int32_t> positions,
                                   Tensor out) {
  for (const Group& group : groups_) {
    const Tensor& table = group.adapter->soft_prompt();
    const auto replaced = [&](int32_t row) {
      return positions[static_cast<size_t>(row)] < table.rows;
    };
    for (size_t i = 0; i < group.rows.size(); ++i) {
      const int32_t first = group.rows[i];
      if (!replaced(first)) continue;
      int32_t count = 1;  // rows that follow each other
      for (; i + 1 < group.rows.size() && group.rows[i + 1] == first + count; ++i, ++count) {
        if (!replaced(first + count)) break;
      }
      backend.Gather(table,
                     positions.subspan(static_cast<size_t>(first), static_cast<size_t>(count)),
                     out.Rows(first, count));
    }
  }
}

}  // namespace treadle
