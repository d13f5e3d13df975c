#include "kernels/cuda/emulation/machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/emulation/fault_report.h"
#include "kernels/cuda/emulation/fiber.h"
#include "kernels/cuda/emulation/warpgroup_unit.h"
#include "kernels/cuda/simt.h"
#include "kernels/status.h"

namespace treadle::simt {

constinit thread_local Here t_here;

namespace {

constexpr int kMaxThreads = 1024;
constexpr size_t kMaxSharedBytes = 227 << 10;
constexpr size_t kCanaryBytes = 128;
constexpr size_t kSharedAlignment = 1024;
constexpr int kGroupWarps = 4;           // of a warpgroup
constexpr unsigned char kPoison = 0xff;  // a NaN in every float type, -1 in every integer

// Shared memory of one block: it ends where a page that cannot be touched begins, but for the bytes
// that its alignment needs; those, and some in front, must be what they were when the block is
// done.
class SharedMemory {
 public:
  SharedMemory() {
    void* memory = mmap(nullptr, kBytes + kPage, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TREADLE_CHECK(memory != MAP_FAILED);
    memory_ = static_cast<unsigned char*>(memory);
    TREADLE_CHECK(mprotect(memory_ + kBytes, kPage, PROT_NONE) == 0);
  }
  ~SharedMemory() { munmap(memory_, kBytes + kPage); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  unsigned char* Begin(size_t bytes) {
    unsigned char* begin =
        memory_ + kBytes - (bytes + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
    std::memset(begin - kCanaryBytes, kPoison, memory_ + kBytes - begin + kCanaryBytes);
    return begin;
  }
  bool IsWhole(const unsigned char* begin, size_t bytes) const {
    const auto poisoned = [](unsigned char c) { return c == kPoison; };
    return std::all_of(begin - kCanaryBytes, begin, poisoned) &&
           std::all_of(begin + bytes, static_cast<const unsigned char*>(memory_ + kBytes),
                       poisoned);
  }

 private:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kBytes = 256 << 10;
  unsigned char* memory_ = nullptr;
};

struct PendingCopy {
  void* shared = nullptr;
  const void* global = nullptr;
  bool valid = true;
  int group = 0;
};

struct ThreadState {
  std::unique_ptr<Fiber> fiber;
  Meeting meeting = Meeting::kReturn;  // what it stopped at
  void* operands = nullptr;
  std::source_location where;
  std::vector<PendingCopy> copies;
  int group = 0;  // of copies that are issued now
  // What its copies brought is not fenced yet; and passed a barrier so.
  bool unfenced = false;
  bool published = false;
};

class Machine {
 public:
  void Run(const GridShape& shape, uint64_t seed, void (*invoke)(const void*, const void*),
           const void* kernel, const void* params) {
    CatchFaults();
    invoke_ = invoke;
    kernel_ = kernel;
    params_ = params;
    random_ = seed;
    shape_ = shape;
    while (threads_.size() < shape.threads) {
      threads_.emplace_back().fiber =
          std::make_unique<Fiber>(&RunThread, static_cast<int>(threads_.size()));
    }
    t_here = {.thread = 0, .threads = static_cast<int>(shape.threads)};
    for (int i = 0; i < 3; ++i) t_here.grid[i] = static_cast<int>(shape.grid[i]);
    for (uint32_t z = 0; z < shape.grid[2]; ++z) {
      for (uint32_t y = 0; y < shape.grid[1]; ++y) {
        for (uint32_t x = 0; x < shape.grid[0]; ++x) {
          t_here.block[0] = static_cast<int>(x);
          t_here.block[1] = static_cast<int>(y);
          t_here.block[2] = static_cast<int>(z);
          RunBlock();
        }
      }
    }
    t_here = {};
  }

  void Stop(Meeting meeting, void* operands, const std::source_location& where) {
    ThreadState& self = threads_[t_here.thread];
    self.meeting = meeting;
    self.operands = operands;
    if (meeting != Meeting::kReturn) self.where = where;
    Fiber::Switch(*self.fiber, NextLane());
  }

  ThreadState& running() { return threads_[t_here.thread]; }

 private:
  // What a fiber does, again and again: one thread of one block.
  static void RunThread();

  uint64_t Random() {
    random_ += 0x9e3779b97f4a7c15u;
    uint64_t z = random_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  void RunBlock() {
    const int warps = static_cast<int>(shape_.threads / 32);
    t_here.shared_bytes = shape_.shared_bytes;
    t_here.shared = shared_.Begin(shape_.shared_bytes);
    for (uint32_t i = 0; i < shape_.threads; ++i) {
      threads_[i].copies.clear();
      threads_[i].group = 0;
      threads_[i].unfenced = threads_[i].published = false;
    }
    units_.resize(warps);
    for (WarpgroupUnit& unit : units_) unit.Begin(shape_.warpgroups_round_apart);
    for (std::vector<int>& group : group_waiting_) group.clear();
    ready_.resize(warps);
    for (int w = 0; w < warps; ++w) ready_[w] = w;
    std::vector<int>& waiting = waiting_;
    waiting.clear();
    int finished = -1;  // some warp that has
    for (;;) {
      if (ready_.empty()) {
        for (const std::vector<int>& group : group_waiting_) {
          if (!group.empty()) FailParted(group[0]);
        }
        if (waiting.empty()) break;
        if (finished >= 0) FailReturned(waiting[0], finished);
        ready_.swap(waiting);
      }
      // The last one runs; mostly the one that ran before.
      if (waiting.empty() || Random() % 8 == 0) {
        std::swap(ready_[Random() % ready_.size()], ready_.back());
      }
      const int warp = ready_.back();
      switch (RunPhase(warp)) {
        case Meeting::kReturn:
          finished = warp;
          ready_.pop_back();
          break;
        case Meeting::kSyncThreads:
          waiting.push_back(warp);
          ready_.pop_back();
          if (!ready_.empty()) std::swap(ready_[Random() % ready_.size()], ready_.back());
          break;
        case Meeting::kSyncWarpgroup: {
          std::vector<int>& group = group_waiting_[warp / kGroupWarps];
          group.push_back(warp);
          ready_.pop_back();
          if (group.size() < kGroupWarps) break;
          ready_.insert(ready_.end(), group.begin(), group.end());
          group.clear();
          std::swap(ready_[Random() % ready_.size()], ready_.back());
          break;
        }
        default:
          break;
      }
    }
    for (int w = 0; w < warps; ++w) CheckUnit(w);
    if (!shared_.IsWhole(t_here.shared, shape_.shared_bytes)) {
      KernelFailed(threads_[t_here.thread].where,
                   "the block wrote outside of the shared memory that it was launched with");
    }
  }

  // Every lane from where it stopped to where it stops next, then what they met for.
  Meeting RunPhase(int warp) {
    const uint64_t random = Random();
    first_thread_ = warp * 32;
    lane_step_ = static_cast<int>(random >> 8 & 31) | 1;
    lane_offset_ = static_cast<int>(random & 31);
    lanes_run_ = 0;
    Fiber::Switch(scheduler_, NextLane());
    const ThreadState* lanes = &threads_[first_thread_];
    for (int l = 1; l < 32; ++l) {
      if (lanes[l].meeting != lanes[0].meeting) FailDiverged(lanes, l);
    }
    const Meeting meeting = lanes[0].meeting;
    if (meeting == Meeting::kReturn) return meeting;
    if (meeting == Meeting::kSyncThreads || meeting == Meeting::kSyncWarpgroup) {
      for (int l = 0; l < 32; ++l) {
        ThreadState& lane = threads_[first_thread_ + l];
        lane.published = lane.unfenced;
      }
      return meeting;
    }
    void* operands[32];
    for (int l = 0; l < 32; ++l) operands[l] = lanes[l].operands;
    if (meeting >= Meeting::kWarpgroupFence) {
      RunUnit(warp, meeting, operands, random >> 16 & 1);
    } else {
      CarryOut(meeting, operands);
    }
    return meeting;
  }

  void RunUnit(int warp, Meeting meeting, void* const (&operands)[32], bool read_now) {
    WarpgroupUnit& unit = units_[warp];
    const std::span<const unsigned char> shared(t_here.shared, t_here.shared_bytes);
    const char* wrong = nullptr;
    if (meeting == Meeting::kWarpgroupFence) {
      wrong = unit.Fence();
    } else if (meeting == Meeting::kWarpgroupCommit) {
      wrong = unit.Commit();
    } else if (meeting == Meeting::kWarpgroupWait) {
      wrong = unit.Wait(operands, shared);
    } else {
      const auto late = [](const ThreadState& thread) { return thread.published; };
      if (std::any_of(threads_.begin(), threads_.begin() + shape_.threads, late)) {
        wrong = "a product behind a barrier that a thread passed without an AsyncFence";
      } else {
        wrong = unit.Issue(operands, shared, read_now);
      }
    }
    if (wrong != nullptr) FailUnit(warp, wrong);
  }
  // When all have returned.
  void CheckUnit(int warp) {
    const WarpgroupUnit& unit = units_[warp];
    if (const char* wrong = unit.End()) FailUnit(warp, wrong);
    if (unit.issued() == 0) return;
    const size_t first = warp / kGroupWarps * kGroupWarps;
    for (size_t w = first; w < first + kGroupWarps; ++w) {
      if (w >= units_.size() || units_[w].issued() != unit.issued()) {
        FailUnit(warp, "the warps of a warpgroup issued different numbers of products");
      }
    }
  }
  [[noreturn]] void FailUnit(int warp, const char* what) {
    t_here.thread = warp * 32;
    KernelFailed(threads_[t_here.thread].where, what);
  }
  [[noreturn]] void FailParted(int warp) {
    FailUnit(warp, "a warp waits at SyncWarpgroup for others of its warpgroup that do not come");
  }

  // The next lane of the phase in its drawn order (an odd step visits all 32), or the scheduler.
  Fiber& NextLane() {
    if (lanes_run_ == 32) return scheduler_;
    const int lane = (lane_offset_ + lanes_run_ * lane_step_) & 31;
    ++lanes_run_;
    t_here.thread = first_thread_ + lane;
    return *threads_[t_here.thread].fiber;
  }

  [[noreturn]] void FailDiverged(const ThreadState* lanes, int lane) {
    t_here.thread = first_thread_ + lane;
    const ThreadState& other = lanes[lane];
    const std::string what =
        Str("lanes of one warp are at different operations: lane 0 at ", Name(lanes[0].meeting),
            lanes[0].meeting == Meeting::kReturn
                ? std::string()
                : Str(" (", lanes[0].where.file_name(), ":", lanes[0].where.line(), ")"),
            ", lane ", lane, " at ", Name(other.meeting));
    KernelFailed(other.meeting == Meeting::kReturn ? lanes[0].where : other.where, what.c_str());
  }

  [[noreturn]] void FailReturned(int waiting, int finished) {
    t_here.thread = waiting * 32;
    KernelFailed(
        threads_[t_here.thread].where,
        Str("threads wait at SyncThreads, but those of warp ", finished, " have returned").c_str());
  }

  Fiber scheduler_;
  std::vector<ThreadState> threads_;
  SharedMemory shared_;
  // Of the running grid.
  GridShape shape_;
  void (*invoke_)(const void*, const void*) = nullptr;
  const void* kernel_ = nullptr;
  const void* params_ = nullptr;
  uint64_t random_ = 0;
  // Of the running block: warps that can go on, and those at the barrier.
  std::vector<int> ready_;
  std::vector<int> waiting_;
  std::vector<int> group_waiting_[kMaxThreads / (32 * kGroupWarps)];
  std::vector<WarpgroupUnit> units_;  // of its warps
  // Of the running phase.
  int first_thread_ = 0;
  int lane_step_ = 1;
  int lane_offset_ = 0;
  int lanes_run_ = 0;
};

Machine& ThisMachine() {
  static thread_local Machine machine;
  return machine;
}

void Machine::RunThread() {
  Machine& machine = ThisMachine();
  for (;;) {
    machine.invoke_(machine.kernel_, machine.params_);
    machine.Stop(Meeting::kReturn, nullptr, std::source_location::current());
  }
}

}  // namespace

const char* Name(Meeting meeting) {
  static constexpr const char* kNames[] = {"its end",
                                           "SyncThreads",
                                           "SyncWarp",
                                           "Shuffle",
                                           "ShuffleXor",
                                           "ShuffleDown",
                                           "ShuffleUp",
                                           "Ballot",
                                           "MmaBf16",
                                           "MmaF16",
                                           "MmaS8",
                                           "LoadMatrix4",
                                           "LoadMatrix4Transposed",
                                           "SyncWarpgroup",
                                           "WarpgroupFence",
                                           "WarpgroupMma",
                                           "WarpgroupCommit",
                                           "WarpgroupWait"};
  return kNames[static_cast<int>(meeting)];
}

void Meet(Meeting meeting, void* operands, const std::source_location& where) {
  ThisMachine().Stop(meeting, operands, where);
}

void IssueCopy(void* shared, const void* global, bool valid, const std::source_location& where) {
  if (!IsAligned16(shared)) KernelFailed(where, "CopyAsync16: a target that is not aligned");
  if (!IsAligned16(global)) KernelFailed(where, "CopyAsync16: a source that is not aligned");
  if (!IsShared16(shared)) KernelFailed(where, "CopyAsync16: a target outside of shared memory");
  std::memset(shared, kPoison, 16);
  ThreadState& self = ThisMachine().running();
  self.copies.push_back({shared, global, valid, self.group});
}

void CommitCopies() { ++ThisMachine().running().group; }

void WaitForCopies(int pending) {
  ThreadState& self = ThisMachine().running();
  const int landed = self.group - pending;  // groups below this one
  size_t count = 0;
  for (; count < self.copies.size() && self.copies[count].group < landed; ++count) {
    const PendingCopy& copy = self.copies[count];
    if (copy.valid) {
      std::memcpy(copy.shared, copy.global, 16);
    } else {
      std::memset(copy.shared, 0, 16);
    }
  }
  self.copies.erase(self.copies.begin(), self.copies.begin() + static_cast<ptrdiff_t>(count));
  self.unfenced = self.unfenced || count > 0;
}

void FenceCopies() {
  ThreadState& self = ThisMachine().running();
  self.unfenced = self.published = false;
}

void KernelFailed(const std::source_location& where, const char* what) {
  const std::string text =
      Str("emulated kernel, block (", t_here.block[0], ", ", t_here.block[1], ", ", t_here.block[2],
          "), thread ", t_here.thread, " in ", where.function_name(), ": ", what);
  CheckFailed(where.file_name(), static_cast<int>(where.line()), text.c_str());
}

void RunGrid(const GridShape& shape, uint64_t seed, void (*invoke)(const void*, const void*),
             const void* kernel, const void* params) {
  TREADLE_CHECK(shape.threads % 32 == 0 && shape.threads > 0 && shape.threads <= kMaxThreads);
  TREADLE_CHECK(shape.shared_bytes <= kMaxSharedBytes);
  ThisMachine().Run(shape, seed, invoke, kernel, params);
}

}  // namespace treadle::simt
