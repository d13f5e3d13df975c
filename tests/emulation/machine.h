// Runs the threads of a kernel on one OS thread: the machine under tests/emulation/simt.h.
//
// Blocks run one after the other. Within a block a warp runs in phases: each of its 32 lanes runs,
// in an order that is drawn anew for every phase, until it meets the others (a warp function, a
// barrier) or returns; then what they met for is carried out for all at once. Which warp runs next
// is drawn as well, and sometimes one runs far ahead of the others, so that a missing barrier shows
// as a wrong result under some seed. A warp whose lanes stop at different things, or a barrier that
// some threads never reach, ends the process with the places in the kernel; so does a thread that
// waits for earlier launches twice or never.
//
// A grid can begin early: one of its blocks, drawn, runs until its threads wait for earlier
// launches, and goes on when the rest runs. Asynchronous copies that it has issued by then take
// what memory holds at once. So a kernel that reads too early what an earlier launch writes gets
// what was there before, if that launch runs in between.
//
// Limits: no thread may spin on what another thread or block will write.
//
// Thread safety: a grid runs on one OS thread, which has machines of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <source_location>

namespace treadle::simt {

// Reasons for the lanes of a warp to meet.
enum class Meeting : uint8_t {
  kReturn,
  kAwaitEarlierLaunches,
  kSyncThreads,
  kSyncWarpgroup,
  kSyncWarp,
  kShuffle,
  kShuffleXor,
  kShuffleUp,
  kBallot,
  kMmaBf16,
  kMmaF16,
  kMmaS8,
  kLoadMatrix4,
  kLoadMatrix4Transposed,
  kWarpgroupFence,
  kWarpgroupMma,
  kWarpgroupCommit,
  kWarpgroupWait,
};

// Operands of each lane; results are written into it.
struct Exchange {
  uint64_t value = 0;
  int from = 0;  // lane whose value is wanted
};
struct MmaOperands {
  void* d = nullptr;  // float[4] or int32_t[4]
  const uint32_t* a = nullptr;
  const uint32_t* b = nullptr;
};
struct LoadMatrixOperands {
  uint32_t* r = nullptr;
  const void* row = nullptr;
};

// Where the running thread is.
struct Here {
  int thread = 0;
  int threads = 0;
  int block[3] = {};
  int grid[3] = {};
  unsigned char* shared = nullptr;
  size_t shared_bytes = 0;
};
extern constinit thread_local Here t_here;

// Called by kernels, on the fiber of a thread. operands: of the type that `meeting` needs; the
// results are there on return.
void Meet(Meeting meeting, void* operands, const std::source_location& where);
void AwaitEarlierGrids(const std::source_location& where);
void IssueCopy(void* shared, const void* global, bool valid, const std::source_location& where);
void CommitCopies();
void WaitForCopies(int pending);
// Warpgroups may read what this thread's copies brought, behind the next barrier.
void FenceCopies();

// failures.cc: ends the process. `what` is wrong with the kernel at `where`, in the running thread;
// or lane `lane`, which that thread is, and lane 0 of its warp stopped at different things.
[[noreturn]] void KernelFailed(const std::source_location& where, const char* what);
struct Stopped {
  Meeting meeting = Meeting::kReturn;
  std::source_location where;  // of one that has returned: where it stopped last
};
[[noreturn]] void LanesDiverged(const Stopped& first, int lane, const Stopped& other);

struct GridShape {
  uint32_t grid[3] = {1, 1, 1};
  uint32_t threads = 32;
  size_t shared_bytes = 0;
  bool warpgroups_round_apart = false;  // see WarpgroupUnit::Begin
};
// Description of a launch: kernel and params are handed to `invoke` once for each thread. seed: of
// all orders.
struct GridWork {
  GridShape shape;
  uint64_t seed = 1;
  void (*invoke)(const void* kernel, const void* params) = nullptr;
  const void* kernel = nullptr;
  const void* params = nullptr;
};

class Machine;

// One launch. May be destroyed at any time.
class Grid {
 public:
  explicit Grid(const GridWork& work);
  ~Grid();
  // Once, or not at all: before earlier launches are done.
  void Begin();
  // When they are: all that is left.
  void Finish();

 private:
  const GridWork work_;
  std::unique_ptr<Machine> machine_;  // from Begin to Finish
};

// warp_ops.cc: carries out what 32 lanes met for; operands[l] is what lane l brought.
void CarryOut(Meeting meeting, void* const (&operands)[32]);

}  // namespace treadle::simt
