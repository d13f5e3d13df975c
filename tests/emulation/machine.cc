#include "tests/emulation/machine.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kernels/cuda/runtime/simt.h"
#include "tests/emulation/fault_report.h"
#include "tests/emulation/fiber.h"
#include "tests/emulation/shared_memory.h"
#include "tests/emulation/warpgroup_unit.h"

namespace treadle::simt {

constinit thread_local Here t_here;

namespace {

constinit thread_local Machine* t_machine = nullptr;  // the one that runs

constexpr int kMaxThreads = 1024;
constexpr size_t kMaxSharedBytes = 227 << 10;

struct PendingCopy {
  void* shared = nullptr;
  const void* global = nullptr;  // null: `words` has been read already
  Words4 words = {};             // zeros if the copy is not valid
  int group = 0;
};

struct ThreadState {
  std::unique_ptr<Fiber> fiber;
  Meeting meeting = Meeting::kReturn;  // what it stopped at
  void* operands = nullptr;
  std::source_location where;
  std::vector<PendingCopy> copies;
  int group = 0;         // of copies that are issued now
  bool awaited = false;  // earlier launches
  // Bytes of its copies are not fenced yet, and passed a barrier so.
  bool unfenced = false;
  bool published = false;
};

constexpr int64_t kNoBlock = -1;

}  // namespace

// Runs one grid at a time.
class Machine {
 public:
  // One block of the grid, as far as it may run before earlier launches are done.
  void Begin(const GridWork& work) {
    Enter(work);
    begun_ = static_cast<int64_t>(Random() % static_cast<uint64_t>(NumBlocks()));
    StartBlock(begun_);
    RunBlock(/*earlier_done=*/false);
    Leave();
  }

  // All that is left of the grid. What has begun goes on first: there is one set of stacks.
  void Finish(const GridWork& work) {
    Enter(work);
    if (begun_ != kNoBlock) RunBlock(/*earlier_done=*/true);
    for (int64_t block = 0; block < NumBlocks(); ++block) {
      if (block == begun_) continue;
      StartBlock(block);
      RunBlock(/*earlier_done=*/true);
    }
    begun_ = kNoBlock;
    Leave();
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
  void Enter(const GridWork& work) {
    TREADLE_CHECK(t_machine == nullptr && std::this_thread::get_id() == owner_);
    t_machine = this;
    if (begun_ != kNoBlock) {
      t_here = here_;
      return;
    }
    CatchFaults();
    work_ = work;
    random_ = work.seed;
    while (threads_.size() < work.shape.threads) {
      threads_.emplace_back().fiber =
          std::make_unique<Fiber>(&RunThread, static_cast<int>(threads_.size()));
    }
    t_here = {.threads = static_cast<int>(work.shape.threads),
              .shared_bytes = work.shape.shared_bytes};
    for (int i = 0; i < 3; ++i) t_here.grid[i] = static_cast<int>(work.shape.grid[i]);
  }
  void Leave() {
    here_ = t_here;
    t_here = {};
    t_machine = nullptr;
  }

  int64_t NumBlocks() const {
    const auto& grid = work_.shape.grid;
    return int64_t{grid[0]} * grid[1] * grid[2];
  }

  // Work of a fiber, again and again: one thread of one block.
  static void RunThread();

  uint64_t Random() {
    random_ += 0x9e3779b97f4a7c15u;
    uint64_t z = random_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  void StartBlock(int64_t block) {
    const GridShape& shape = work_.shape;
    for (int i = 0; i < 3; ++i) {
      t_here.block[i] = static_cast<int>(block % shape.grid[i]);
      block /= shape.grid[i];
    }
    t_here.shared = shared_.Begin(shape.shared_bytes);
    for (uint32_t i = 0; i < shape.threads; ++i) {
      threads_[i].copies.clear();
      threads_[i].group = 0;
      threads_[i].awaited = threads_[i].unfenced = threads_[i].published = false;
      threads_[i].where = {};
    }
    units_.Begin(shape.threads / 32, shape.warpgroups_round_apart);
    for (std::vector<int>& group : group_waiting_) group.clear();
    ready_.resize(shape.threads / 32);
    for (size_t w = 0; w < ready_.size(); ++w) ready_[w] = static_cast<int>(w);
    waiting_.clear();
    finished_ = kNoWarp;
  }

  // Until all warps have returned, or none can go on before earlier launches are done.
  void RunBlock(bool earlier_done) {
    if (earlier_done) {
      ready_.insert(ready_.end(), awaiting_.begin(), awaiting_.end());
      awaiting_.clear();
    }
    for (;;) {
      if (ready_.empty()) {
        if (!awaiting_.empty()) return;
        for (const std::vector<int>& group : group_waiting_) {
          if (group.empty()) continue;
          FailWarp(group[0],
                   "a warp waits at SyncWarpgroup for others of its warpgroup that do not come");
        }
        if (waiting_.empty()) break;
        if (finished_ != kNoWarp) {
          FailWarp(waiting_[0], Str("threads wait at SyncThreads, but those of warp ", finished_,
                                    " have returned")
                                    .c_str());
        }
        ready_.swap(waiting_);
      }
      // The last one runs; mostly the one that ran before.
      if (waiting_.empty() || Random() % 8 == 0) {
        std::swap(ready_[Random() % ready_.size()], ready_.back());
      }
      const int warp = ready_.back();
      switch (RunPhase(warp)) {
        case Meeting::kReturn:
          finished_ = warp;
          ready_.pop_back();
          break;
        case Meeting::kAwaitEarlierLaunches:
          if (earlier_done) break;
          awaiting_.push_back(warp);
          ready_.pop_back();
          break;
        case Meeting::kSyncThreads:
          waiting_.push_back(warp);
          ready_.pop_back();
          if (!ready_.empty()) std::swap(ready_[Random() % ready_.size()], ready_.back());
          break;
        case Meeting::kSyncWarpgroup: {
          if (warp >= 2 * WarpgroupUnits::kWarps) {
            FailWarp(warp, "SyncWarpgroup by a third warpgroup: it has a barrier for two");
          }
          std::vector<int>& group = group_waiting_[warp / WarpgroupUnits::kWarps];
          group.push_back(warp);
          ready_.pop_back();
          if (group.size() < WarpgroupUnits::kWarps) break;
          ready_.insert(ready_.end(), group.begin(), group.end());
          group.clear();
          std::swap(ready_[Random() % ready_.size()], ready_.back());
          break;
        }
        default:
          break;
      }
    }
    int at = 0;
    if (const char* wrong = units_.End(at)) FailWarp(at, wrong);
    if (!shared_.IsWhole(t_here.shared, work_.shape.shared_bytes)) {
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
      if (lanes[l].meeting == lanes[0].meeting) continue;
      t_here.thread = first_thread_ + l;
      LanesDiverged({lanes[0].meeting, lanes[0].where}, l, {lanes[l].meeting, lanes[l].where});
    }
    const Meeting meeting = lanes[0].meeting;
    if (meeting == Meeting::kReturn && !lanes[0].awaited) {
      KernelFailed(lanes[0].where, "the warp has returned without AwaitEarlierLaunches");
    }
    if (meeting == Meeting::kSyncThreads || meeting == Meeting::kSyncWarpgroup) {
      for (int l = 0; l < 32; ++l) {
        ThreadState& lane = threads_[first_thread_ + l];
        lane.published = lane.unfenced;
      }
    }
    if (meeting <= Meeting::kSyncWarpgroup) return meeting;  // RunBlock's affair
    void* operands[32];
    for (int l = 0; l < 32; ++l) operands[l] = lanes[l].operands;
    if (meeting < Meeting::kWarpgroupFence) {
      CarryOut(meeting, operands);
      return meeting;
    }
    const auto fenced = [](const ThreadState& thread) { return !thread.published; };
    const bool all_fenced =
        std::all_of(threads_.begin(), threads_.begin() + work_.shape.threads, fenced);
    const std::span<const unsigned char> shared(t_here.shared, t_here.shared_bytes);
    const char* wrong = units_.Run(warp, meeting, operands, shared, random >> 16 & 1, all_fenced);
    if (wrong != nullptr) FailWarp(warp, wrong);
    return meeting;
  }

  [[noreturn]] void FailWarp(int warp, const char* what) {
    t_here.thread = warp * 32;
    KernelFailed(threads_[t_here.thread].where, what);
  }

  // The next lane of the phase in its drawn order (an odd step visits all 32), or the scheduler.
  Fiber& NextLane() {
    if (lanes_run_ == 32) return scheduler_;
    const int lane = (lane_offset_ + lanes_run_ * lane_step_) & 31;
    ++lanes_run_;
    t_here.thread = first_thread_ + lane;
    return *threads_[t_here.thread].fiber;
  }

  static constexpr int kNoWarp = -1;

  const std::thread::id owner_ = std::this_thread::get_id();  // of the stacks
  Fiber scheduler_;
  std::vector<ThreadState> threads_;
  SharedMemory shared_;
  // For the whole grid:
  GridWork work_;
  uint64_t random_ = 0;
  int64_t begun_ = kNoBlock;  // the block that has run before earlier launches were done
  Here here_;                 // between Begin and Finish
  // The running block's warps: those that can go on, those at the barrier, those that wait for
  // earlier launches, and one that has returned.
  std::vector<int> ready_;
  std::vector<int> waiting_;
  std::vector<int> awaiting_;
  int finished_ = kNoWarp;
  std::vector<int> group_waiting_[kMaxThreads / (32 * WarpgroupUnits::kWarps)];
  WarpgroupUnits units_;
  // The running phase's threads:
  int first_thread_ = 0;
  int lane_step_ = 1;
  int lane_offset_ = 0;
  int lanes_run_ = 0;
};

void Machine::RunThread() {
  Machine& machine = *t_machine;
  for (;;) {
    machine.work_.invoke(machine.work_.kernel, machine.work_.params);
    machine.Stop(Meeting::kReturn, nullptr, std::source_location::current());
  }
}

namespace {

std::vector<std::unique_ptr<Machine>>& IdleMachines() {
  static thread_local std::vector<std::unique_ptr<Machine>> idle;
  return idle;
}

std::unique_ptr<Machine> TakeMachine() {
  auto& idle = IdleMachines();
  if (idle.empty()) return std::make_unique<Machine>();
  std::unique_ptr<Machine> machine = std::move(idle.back());
  idle.pop_back();
  return machine;
}

}  // namespace

void Meet(Meeting meeting, void* operands, const std::source_location& where) {
  t_machine->Stop(meeting, operands, where);
}

void AwaitEarlierGrids(const std::source_location& where) {
  ThreadState& self = t_machine->running();
  if (self.awaited) KernelFailed(where, "AwaitEarlierLaunches for a second time");
  t_machine->Stop(Meeting::kAwaitEarlierLaunches, nullptr, where);
  self.awaited = true;
}

void IssueCopy(void* shared, const void* global, bool valid, const std::source_location& where) {
  if (!IsAligned16(shared)) KernelFailed(where, "CopyAsync16: a target that is not aligned");
  if (!IsAligned16(global)) KernelFailed(where, "CopyAsync16: a source that is not aligned");
  if (!IsShared16(shared)) KernelFailed(where, "CopyAsync16: a target outside of shared memory");
  std::memset(shared, kPoison, 16);
  ThreadState& self = t_machine->running();
  PendingCopy& copy = self.copies.emplace_back();
  copy.shared = shared;
  copy.group = self.group;
  if (valid && self.awaited) copy.global = global;
  if (valid && !self.awaited) std::memcpy(&copy.words, global, sizeof(copy.words));
}

void CommitCopies() { ++t_machine->running().group; }

void WaitForCopies(int pending) {
  ThreadState& self = t_machine->running();
  const int landed = self.group - pending;  // groups below this one
  size_t count = 0;
  for (; count < self.copies.size() && self.copies[count].group < landed; ++count) {
    const PendingCopy& copy = self.copies[count];
    const void* from = copy.global != nullptr ? copy.global : &copy.words;
    std::memcpy(copy.shared, from, sizeof(copy.words));
  }
  self.copies.erase(self.copies.begin(), self.copies.begin() + static_cast<ptrdiff_t>(count));
  self.unfenced = self.unfenced || count > 0;
}

void FenceCopies() {
  ThreadState& self = t_machine->running();
  self.unfenced = self.published = false;
}

Grid::Grid(const GridWork& work) : work_(work) {
  const GridShape& shape = work.shape;
  TREADLE_CHECK(shape.threads % 32 == 0 && shape.threads > 0 && shape.threads <= kMaxThreads);
  TREADLE_CHECK(shape.shared_bytes <= kMaxSharedBytes);
}

Grid::~Grid() = default;

void Grid::Begin() {
  TREADLE_CHECK(machine_ == nullptr);
  machine_ = TakeMachine();
  machine_->Begin(work_);
}

void Grid::Finish() {
  if (machine_ == nullptr) machine_ = TakeMachine();
  machine_->Finish(work_);
  IdleMachines().push_back(std::move(machine_));
}

}  // namespace treadle::simt
