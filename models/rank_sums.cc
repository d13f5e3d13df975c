#include "models/rank_sums.h"

#include "base/status.h"

namespace treadle {
namespace {

absl::Status AllReduce(Communicator& ranks, Tensor partial, bool accumulate, Tensor out) {
  TREADLE_CHECK(out.stride == out.cols && partial.stride == out.cols && partial.rows == out.rows);
  return ranks.AllReduce(partial.Row<float>(0), out.rows * out.cols, accumulate, out.Row<float>(0));
}

}  // namespace

absl::Status RankSums::Allocate(Activations& activations, int64_t hidden, Shard shard) {
  if (shard.size == 1) return absl::OkStatus();
  for (Tensor& partial : partial_) {
    TREADLE_ASSIGN_OR_RETURN(partial, activations.Add(hidden));
  }
  return absl::OkStatus();
}

Tensor RankSums::Next(int64_t rows) {
  turn_ = 1 - turn_;
  return partial_[turn_].Rows(0, rows);
}

absl::Status RankSums::Sum(Communicator* ranks, bool accumulate, Tensor out, Part part) {
  if (ranks == nullptr) {
    part(out, accumulate);
    return absl::OkStatus();
  }
  const Tensor partial = Next(out.rows);  // [rows, hidden]
  part(partial, /*add=*/false);
  return AllReduce(*ranks, partial, accumulate, out);
}

absl::Status RankSums::AllocateGather(Activations& activations, int64_t cols) {
  TREADLE_ASSIGN_OR_RETURN(gathered_, activations.Add(cols));
  return absl::OkStatus();
}

absl::Status RankSums::Gather(Backend& backend, Communicator& ranks, Tensor part, Tensor out) {
  TREADLE_CHECK(part.stride == part.cols && out.stride == out.cols);
  const int64_t size = ranks.size(), rows = part.rows;
  const auto bytes = static_cast<size_t>(rows * part.cols) * sizeof(float);
  TREADLE_RETURN_IF_ERROR(ranks.AllGather(part.data, bytes, gathered_.data));
  order_.clear();
  for (int64_t i = 0; i < rows * size; ++i) {
    order_.push_back(static_cast<int32_t>(i % size * rows + i / size));
  }
  backend.Gather(DenseTensor(gathered_.data, DType::kF32, rows * size, part.cols), order_,
                 DenseTensor(out.data, DType::kF32, rows * size, part.cols));
  return absl::OkStatus();
}

absl::Status RankSums::Embed(Backend& backend, const Linear& table, ShardRange part,
                             std::span<const int32_t> ids, Communicator* ranks, Tensor hidden) {
  const int32_t first = ranks == nullptr ? 0 : static_cast<int32_t>(part.begin);
  return Sum(ranks, /*accumulate=*/false, hidden,
             [&](Tensor rows, bool add) { backend.Embed(table.weight(), ids, first, add, rows); });
}

}  // namespace treadle
