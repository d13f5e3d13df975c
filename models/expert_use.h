// How the rows of an iteration were spread over experts.
#pragma once

#include <cstdint>

namespace treadle {

// The use of experts in a range of layers; all zeros where they have none.
struct ExpertUse {
  int64_t layers = 0;
  int64_t rows = 0;       // a row counts for each of its experts in each layer
  int64_t used = 0;       // experts that had rows, summed over layers
  int64_t most_rows = 0;  // of one expert
  friend bool operator==(const ExpertUse&, const ExpertUse&) = default;
};

}  // namespace treadle
