// Sums over the ranks that share a model's layers: where tensor parallelism communicates
// (Megatron-LM, Shoeybi et al., section 3; ORCA section 4.1), twice per layer and once per
// embedding; and once more in layers whose norm is of more than a rank has.
//
// With one rank (`ranks` null) each function is the plain op on the backend. Other ranks read the
// partial sums of a model's last forward pass after it has returned: all ranks end before any of
// their models goes.
//
// Thread safety: confined to the rank's thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/backend.h"
#include "kernels/collectives/communicator.h"
#include "models/activations.h"
#include "models/linear.h"
#include "models/model.h"

namespace treadle {

class RankSums {
 public:
  // Room for partial sums [max rows, hidden], if there are ranks to add them up with.
  absl::Status Allocate(Activations& activations, int64_t hidden, Shard shard);

  // out = the sum over all ranks of what their `part` makes, or out + that sum. part(rows, add)
  // leaves this rank's part in `rows`, added to what is there if `add`.
  using Part = absl::FunctionRef<void(Tensor rows, bool add)>;
  absl::Status Sum(Communicator* ranks, bool accumulate, Tensor out, Part part);

  // hidden[i] = row ids[i] of the table, of which this rank holds rows `part`. Exact: all terms of
  // the sum but one are zeros.
  absl::Status Embed(Backend& backend, const Linear& table, ShardRange part,
                     std::span<const int32_t> ids, Communicator* ranks, Tensor hidden);

  // Room for Gather's rows of `cols`.
  absl::Status AllocateGather(Activations& activations, int64_t cols);
  // out [rows, ranks * cols] = `part` [rows, cols] of all ranks, side by side. Two or more ranks.
  absl::Status Gather(Backend& backend, Communicator& ranks, Tensor part, Tensor out);

 private:
  Tensor Next(int64_t rows);

  // In turn: a partial sum is read by other ranks until the next collective is done.
  Tensor partial_[2];
  int turn_ = 0;
  Tensor gathered_;             // rows of one rank behind those of another
  std::vector<int32_t> order_;  // of these, by row
};

}  // namespace treadle
