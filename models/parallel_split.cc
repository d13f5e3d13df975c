#include "models/parallel_split.h"

#include <sched.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace treadle {
namespace {

int CpusOfThisProcess() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

}  // namespace

ParallelFor SplitOverThreads(int threads) {
  if (threads <= 0) threads = CpusOfThisProcess();
  return [threads](int64_t count, const std::function<void(int64_t, int64_t)>& body) {
    const int64_t pieces = std::min<int64_t>(threads, count);
    if (pieces <= 1) {
      if (count > 0) body(0, count);
      return;
    }
    std::vector<std::jthread> others;  // joined when it goes
    for (int64_t i = 1; i < pieces; ++i) {
      others.emplace_back(
          [&body, i, count, pieces] { body(i * count / pieces, (i + 1) * count / pieces); });
    }
    body(0, count / pieces);
  };
}

}  // namespace treadle
