// How long iterations take on a machine, by the ledger of a server that ran there (--ledger-file).
//
// IterationCost is fitted to all of them. What an iteration took differs from that, because few
// rows are cheaper together than a line says, and because the machine is faster in one second than
// in another, which makes the tails of latencies. So an iteration takes the fit's time, times what
// those of like many rows took against it, times the machine's speed: that of each recorded second
// of work lasts for a second of simulated work, in the recorded order, from a drawn second on.
//
// Thread safety: none.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/cost/iteration_cost.h"

namespace treadle {

class RecordedCost {
 public:
  static constexpr size_t kFewest = 32;  // iterations of a ledger

  // Errors: MappedFile::Open's, and InvalidArgument for a line that is no record, too few
  // iterations, several stages, or guesses, whose rows a ledger does not have.
  static absl::StatusOr<RecordedCost> Read(const std::string& path, uint64_t seed);

  // Seconds of the next iteration.
  double Next(const IterationWork& work);
  const IterationCost& fit() const { return fit_; }
  size_t iterations() const { return iterations_; }

 private:
  IterationCost fit_;
  size_t iterations_ = 0;
  std::array<double, 32> share_ = {};  // of the fit's time, by the power of two of rows
  std::vector<double> slowness_;       // by second
  size_t second_ = 0;                  // of slowness_, and the part of it that is over
  double over_ = 0;
};

}  // namespace treadle
