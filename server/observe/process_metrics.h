// Metrics of this process, under the names that Prometheus' clients give them: process_*.
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
