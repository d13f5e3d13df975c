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

absl::Status RankSums::Multiply(Backend& backend, const Linear& linear, Tensor x,
                                Communicator* ranks, bool accumulate, Tensor out) {
  if (ranks == nullptr) {
    const Projection product[] = {linear.To(out, accumulate)};
    backend.MatMul(x, product);
    return absl::OkStatus();
  }
  const Tensor partial = Next(out.rows);  // [rows, hidden]
  const Projection part[] = {linear.To(partial)};
  backend.MatMul(x, part);
  return AllReduce(*ranks, partial, accumulate, out);
}

absl::Status RankSums::Embed(Backend& backend, const Linear& table, ShardRange part,
                             std::span<const int32_t> ids, Communicator* ranks, Tensor hidden) {
  if (ranks == nullptr) {
    backend.Embed(table.weight(), ids, /*first_id=*/0, /*accumulate=*/false, hidden);
    return absl::OkStatus();
  }
  const Tensor partial = Next(hidden.rows);  // [rows, hidden]
  backend.Embed(table.weight(), ids, static_cast<int32_t>(part.begin), /*accumulate=*/false,
                partial);
  return AllReduce(*ranks, partial, /*accumulate=*/false, hidden);
}

}  // namespace treadle
