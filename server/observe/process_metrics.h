// What Prometheus' clients tell of the process that they run in, under their names: process_*.
//
// Reads /proc/self at each call; any thread.
#pragma once

#include <vector>

namespace prometheus {
struct MetricFamily;
}

namespace treadle {

// Appends them; a family is missing where /proc does not have it.
void AddProcessMetrics(std::vector<prometheus::MetricFamily>& families);

}  // namespace treadle
