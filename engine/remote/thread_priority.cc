#include "engine/remote/thread_priority.h"

#include <linux/sched.h>
#include <linux/sched/types.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace treadle {
namespace {

constexpr int kComputeNice = 10;
constexpr uint64_t kShortSlice = 100'000;    // ns: the shortest that there is
constexpr uint64_t kLongSlice = 10'000'000;  // ns

// At least as nice as now: less would need a privilege.
void SetOwn(int nice, uint64_t slice) {
  sched_attr attributes = {};
  attributes.size = sizeof attributes;
  attributes.sched_policy = SCHED_NORMAL;
  attributes.sched_nice = std::max(nice, getpriority(PRIO_PROCESS, 0));
  attributes.sched_runtime = slice;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace

void MakeMessageThread() { SetOwn(0, kShortSlice); }

void MakeComputeThread() { SetOwn(kComputeNice, kLongSlice); }

}  // namespace treadle
