#include "models/adapter.h"

#include <algorithm>

#include "base/status.h"

namespace treadle {

namespace {

// A matrix of `cols` columns, as LowRank has them.
std::vector<std::byte> Panels(DType type, int64_t cols, std::span<const float> values) {
  const int64_t rows = std::ssize(values) / cols;
  std::vector<std::byte> panels(static_cast<size_t>(LowRankElements(rows, cols)) * SizeOf(type));
  for (int64_t i = 0; i < std::ssize(values); ++i) {
    StoreElement(type, values[static_cast<size_t>(i)], panels.data(),
                 LowRankAt(rows, i / cols, i % cols));
  }
  return panels;
}

}  // namespace

absl::StatusOr<std::byte*> Adapter::Place(Backend& backend, std::span<const std::byte> bytes) {
  constexpr size_t kAlignment = 64;
  if (chunks_.empty() || used_ + bytes.size() > chunks_.back().bytes()) {
    TREADLE_ASSIGN_OR_RETURN(Buffer chunk,
                             backend.Allocate(std::max(bytes.size(), size_t{chunk_bytes_})));
    chunks_.push_back(std::move(chunk));
    used_ = 0;
  }
  std::byte* const placed = chunks_.back().data() + used_;
  backend.CopyToDevice(placed, bytes.data(), bytes.size());
  used_ += (bytes.size() + kAlignment - 1) / kAlignment * kAlignment;
  return placed;
}

void Adapter::Add(const Linear& linear, DType type, int64_t rank, std::span<const float> a,
                  std::span<const float> b) {
  LowRank& factors = factors_[static_cast<size_t>(linear.index())];
  factors = {.type = type, .rank = rank};
  added_.push_back({&factors, Panels(type, rank, a), Panels(type, std::ssize(b) / rank, b)});
}

absl::Status Adapter::EndLayer(Backend& backend) {
  for (const Added& added : added_) {
    TREADLE_ASSIGN_OR_RETURN(added.factors->a, Place(backend, added.a));
  }
  for (const Added& added : added_) {
    TREADLE_ASSIGN_OR_RETURN(added.factors->b, Place(backend, added.b));
  }
  added_.clear();
  return absl::OkStatus();
}

absl::StatusOr<Tensor> Adapter::PlaceTable(Backend& backend, int64_t rows,
                                           std::span<const float> values) {
  TREADLE_ASSIGN_OR_RETURN(std::byte* const table, Place(backend, std::as_bytes(values)));
  return DenseTensor(table, DType::kF32, rows, std::ssize(values) / rows);
}

absl::Status Adapter::AddSoftPrompt(Backend& backend, std::span<const float> rows) {
  TREADLE_ASSIGN_OR_RETURN(soft_prompt_, PlaceTable(backend, virtual_tokens_, rows));
  return absl::OkStatus();
}

absl::Status Adapter::AddEmbedding(Backend& backend, int64_t rank, std::span<const float> a,
                                   std::span<const float> b) {
  TREADLE_ASSIGN_OR_RETURN(embedding_a_, PlaceTable(backend, std::ssize(a) / rank, a));
  embedding_b_.rank = rank;
  TREADLE_ASSIGN_OR_RETURN(embedding_b_.b,
                           Place(backend, Panels(DType::kF32, std::ssize(b) / rank, b)));
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

void AdapterRows::MatMul(Backend& backend, Tensor x, std::span<const LinearProduct> products) {
  plain_.assign(products.begin(), products.end());
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
  backend.MatMul(x, plain_);
  if (!products_.empty()) backend.AddLowRank(x, products_);
}

void AdapterRows::GatedMatMul(Backend& backend, Tensor x, std::span<const LinearProduct> pairs,
                              Backend::Gate by, Tensor gate, Tensor up, Tensor out) {
  if (groups_.empty()) {
    plain_.assign(pairs.begin(), pairs.end());
    return backend.GatedMatMul(x, plain_, by, gate, up, out);
  }
  MatMul(backend, x, pairs);  // what adapters add comes before the gate
  backend.Apply(by, gate, up, out);
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
