#include "tests/emulation/emulated_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/cuda/runtime/simt.h"
#include "kernels/cuda/runtime/wait_watch.h"
#include "tests/emulation/machine.h"

namespace treadle::cuda {
namespace {

constexpr int kDevices = 2;
constexpr size_t kAlignment = 256;
constexpr size_t kPage = 4096;
constexpr std::byte kSlack{0xff};

Mutex g_settings_mutex;
EmulationSettings g_settings ABSL_GUARDED_BY(g_settings_mutex);
std::array<int, kDevices> g_opened ABSL_GUARDED_BY(g_settings_mutex) = {};

size_t RoundUp(size_t x, size_t unit) { return (x + unit - 1) / unit * unit; }

// Memory of a device (or is page-locked on the host for it). Every allocation ends where a page
// that cannot be touched begins, but for its alignment's slack, which is looked at when it is
// freed.
class MemoryTable {
 public:
  MemoryTable(std::string name, size_t limit) : name_(std::move(name)), limit_(limit) {}
  ~MemoryTable() { TREADLE_CHECK(allocations_.empty()); }

  absl::StatusOr<void*> Allocate(size_t bytes) {
    MutexLock lock(mutex_);
    const size_t taken = RoundUp(std::max<size_t>(bytes, 1), kAlignment);
    if (taken > limit_ - used_) {
      return ResourceExhausted(name_, ": ", bytes, " bytes asked for, ", limit_ - used_, " of ",
                               limit_, " bytes are free");
    }
    const size_t mapped = RoundUp(taken, kPage);
    void* memory = mmap(nullptr, mapped + kPage, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      return ResourceExhausted(name_, ": the host has no ", bytes, " bytes for it");
    }
    auto* base = static_cast<std::byte*>(memory);
    TREADLE_CHECK(mprotect(base + mapped, kPage, PROT_NONE) == 0);
    std::byte* data = base + mapped - taken;
    std::fill(data + bytes, data + taken, kSlack);
    used_ += taken;
    allocations_[data] = {.bytes = bytes, .taken = taken, .base = base, .mapped = mapped + kPage};
    return data;
  }

  void Free(void* data) {
    MutexLock lock(mutex_);
    const auto it = allocations_.find(static_cast<std::byte*>(data));
    TREADLE_CHECK(it != allocations_.end());
    const Allocation& allocation = it->second;
    const bool nobody_wrote_behind_it =
        std::all_of(it->first + allocation.bytes, it->first + allocation.taken,
                    [](std::byte b) { return b == kSlack; });
    TREADLE_CHECK(nobody_wrote_behind_it);
    used_ -= allocation.taken;
    munmap(allocation.base, allocation.mapped);
    allocations_.erase(it);
  }

  // Whether [data, data + bytes) lies in one allocation.
  bool Holds(const void* data, size_t bytes) {
    MutexLock lock(mutex_);
    auto* begin = const_cast<std::byte*>(static_cast<const std::byte*>(data));
    auto it = allocations_.upper_bound(begin);
    if (it == allocations_.begin()) return false;
    --it;
    return begin + bytes <= it->first + it->second.bytes;
  }

  size_t FreeBytes() {
    MutexLock lock(mutex_);
    return limit_ - used_;
  }

 private:
  struct Allocation {
    size_t bytes = 0;
    size_t taken = 0;
    std::byte* base = nullptr;
    size_t mapped = 0;
  };
  const std::string name_;
  const size_t limit_;
  Mutex mutex_;
  size_t used_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::byte*, Allocation> allocations_ ABSL_GUARDED_BY(mutex_);
};

// Arguments of a kernel's launch, for every replay.
struct LaunchWork {
  simt::GridWork grid;                                // but for the seed
  std::shared_ptr<std::vector<simt::Words4>> params;  // 16-byte aligned, as on a GPU
};
using HostWork = std::function<void()>;
using Work = std::variant<HostWork, LaunchWork>;

struct Queued {
  Work work;
  std::unique_ptr<simt::Grid> begun;  // a launch's, if it has
};

// So many launches begin before work that is still in front of them in the stream.
constexpr int64_t kEarlyLaunches = 2;

DeviceProperties PropertiesOf(int ordinal, const EmulationSettings& settings) {
  return {.ordinal = ordinal,
          .name = "emulated",
          .bus_id = Str("emulated:", ordinal),
          .multiprocessors = settings.multiprocessors,
          .capability = 90,
          .warpgroup_matrices = settings.warpgroup_matrices,
          .memory_bytes = settings.memory_bytes,
          .shared_bytes_per_block = settings.shared_bytes_per_block};
}

struct EmulatedGraph : Graph {
  std::vector<Work> work;
};

class EmulatedDevice final : public Device {
 public:
  EmulatedDevice(int ordinal, const EmulationSettings& settings)
      : settings_(settings),
        name_(Str("emulated device ", ordinal)),
        memory_(std::make_shared<MemoryTable>(name_, settings.memory_bytes)),
        pinned_(std::make_shared<MemoryTable>(Str(name_, ", page-locked host memory"),
                                              size_t{64} << 30)) {
    properties_ = PropertiesOf(ordinal, settings);
    std::fill(std::begin(mark_at_), std::end(mark_at_), 0);
  }
  absl::StatusOr<std::unique_ptr<Device>> OpenBeside() const override {
    auto beside = std::make_unique<EmulatedDevice>(properties_.ordinal, settings_);
    beside->memory_ = memory_;
    beside->pinned_ = pinned_;
    return beside;
  }

  const DeviceProperties& properties() const override { return properties_; }
  absl::Status status() const override { return status_; }
  void BindThread() override {}

  absl::StatusOr<Buffer> Allocate(size_t bytes) override {
    TREADLE_CHECK(!capturing_);
    return MakeBuffer(memory_, bytes);
  }
  absl::StatusOr<Buffer> AllocateHost(size_t bytes) override {
    TREADLE_CHECK(!capturing_);
    return MakeBuffer(pinned_, bytes);
  }
  size_t FreeBytes() override { return memory_->FreeBytes(); }

  void CopyToDevice(void* device, const void* host, size_t bytes) override {
    TREADLE_CHECK(!capturing_);
    TREADLE_CHECK(memory_->Holds(device, bytes));
    if (settings_.late_uploads) {
      const auto* begin = static_cast<const std::byte*>(host);
      Issue([device, copy = std::vector<std::byte>(begin, begin + bytes)] {
        std::copy(copy.begin(), copy.end(), static_cast<std::byte*>(device));
      });
      return;
    }
    RunUpTo(issued_);
    if (status_.ok() && bytes > 0) std::memcpy(device, host, bytes);
  }
  void CopyToHost(void* host, const void* device, size_t bytes) override {
    TREADLE_CHECK(!capturing_);
    TREADLE_CHECK(memory_->Holds(device, bytes));
    RunUpTo(issued_);
    if (status_.ok() && bytes > 0) std::memcpy(host, device, bytes);
  }
  void CopyToDeviceAsync(void* device, const void* pinned, size_t bytes) override {
    TREADLE_CHECK(memory_->Holds(device, bytes) && pinned_->Holds(pinned, bytes));
    Issue([=] { std::memcpy(device, pinned, bytes); });
  }
  void CopyToHostAsync(void* pinned, const void* device, size_t bytes) override {
    TREADLE_CHECK(memory_->Holds(device, bytes) && pinned_->Holds(pinned, bytes));
    Issue([=] { std::memcpy(pinned, device, bytes); });
  }
  void CopyOnDevice(void* to, const void* from, size_t bytes) override {
    TREADLE_CHECK(memory_->Holds(to, bytes) && memory_->Holds(from, bytes));
    Issue([=] { std::memcpy(to, from, bytes); });
  }
  void Zero(void* device, size_t bytes) override {
    TREADLE_CHECK(memory_->Holds(device, bytes));
    Issue([=] { std::memset(device, 0, bytes); });
  }

  absl::Status Synchronize() override {
    TREADLE_CHECK(!capturing_);
    RunUpTo(issued_);
    Look();
    return status_;
  }
  void WatchWaits(const void* owner, WaitCheck look) override {
    watch_.Set(owner, std::move(look));
  }
  absl::Status Recover() override {
    if (!broken_off_ || !watch_.empty()) return status_;
    TREADLE_CHECK(queue_.empty());  // or work would run that was given up
    broken_off_ = false;
    return status_ = absl::OkStatus();
  }
  void SetMark(int mark) override {
    TREADLE_CHECK(!capturing_ && mark >= 0 && mark < kMarks);
    mark_at_[mark] = issued_;
  }
  absl::Status WaitForMark(int mark) override {
    TREADLE_CHECK(!capturing_ && mark >= 0 && mark < kMarks);
    RunUpTo(mark_at_[mark]);
    Look();
    return status_;
  }
  double Seconds(int from, int to) override {
    TREADLE_CHECK(from >= 0 && from < kMarks && to >= 0 && to < kMarks);
    return 0;
  }

  void BeginCapture() override {
    TREADLE_CHECK(!capturing_);
    capturing_ = true;
    captured_ = std::make_unique<EmulatedGraph>();
  }
  absl::StatusOr<std::unique_ptr<Graph>> EndCapture() override {
    TREADLE_CHECK(capturing_);
    capturing_ = false;
    if (!status_.ok()) return status_;
    return std::move(captured_);
  }
  void Replay(const Graph& graph) override {
    TREADLE_CHECK(!capturing_);
    // A copy of the list: with deferred work the graph may be gone before its turn.
    for (const Work& work : static_cast<const EmulatedGraph&>(graph).work) Issue(work);
  }
  bool capturing() const override { return capturing_; }

  void* stream() override { return static_cast<Device*>(this); }
  void RunOnHost(std::function<void()> work) override {
    if (!settings_.dry) Issue(std::move(work));
  }

 protected:
  void LaunchRaw(const void* kernel, const LaunchShape& shape, void* params, size_t bytes,
                 Invoker invoke) override {
    CheckShape(shape);
    if (settings_.launches != nullptr) settings_.launches->push_back({kernel, shape});
    if (settings_.dry) return;
    LaunchWork launch;
    launch.params = std::make_shared<std::vector<simt::Words4>>((bytes + 15) / 16);
    std::memcpy(launch.params->data(), params, bytes);
    launch.grid.shape = {.grid = {shape.grid_x, shape.grid_y, shape.grid_z},
                         .threads = shape.threads,
                         .shared_bytes = shape.shared_bytes,
                         .warpgroups_round_apart = settings_.warpgroups_round_apart};
    launch.grid.invoke = invoke;
    launch.grid.kernel = kernel;
    launch.grid.params = launch.params->data();
    Issue(std::move(launch));
  }
  int ResidentRaw(const void*, const LaunchShape&) override { return settings_.resident_blocks; }

 private:
  static absl::StatusOr<Buffer> MakeBuffer(const std::shared_ptr<MemoryTable>& table,
                                           size_t bytes) {
    TREADLE_ASSIGN_OR_RETURN(void* data, table->Allocate(bytes));
    return Buffer(data, bytes, [table](void* p) { table->Free(p); });
  }

  // Launches that a GPU refuses.
  void CheckShape(const LaunchShape& shape) const {
    TREADLE_CHECK(shape.threads > 0 && shape.threads <= 1024 && shape.threads % 32 == 0);
    TREADLE_CHECK(shape.grid_x > 0 && shape.grid_x <= 0x7fffffffu);
    TREADLE_CHECK(shape.grid_y > 0 && shape.grid_y <= 65535);
    TREADLE_CHECK(shape.grid_z > 0 && shape.grid_z <= 65535);
    TREADLE_CHECK(shape.shared_bytes <= properties_.shared_bytes_per_block);
  }

  void Issue(Work work) {
    if (!status_.ok()) return;
    if (capturing_) {
      captured_->work.push_back(std::move(work));
      return;
    }
    queue_.push_back({std::move(work), nullptr});
    ++issued_;
    if (settings_.deferred) return;
    // The last launches stay, so that those which follow can begin before them.
    int64_t last = 0;
    while (last < kEarlyLaunches && last < issued_ - done_ &&
           std::holds_alternative<LaunchWork>(queue_[queue_.size() - 1 - last].work)) {
      ++last;
    }
    RunUpTo(issued_ - last);
  }

  // Runs what was issued before the point `end` of the stream.
  void RunUpTo(int64_t end) {
    while (done_ < end) {
      for (int64_t i = 1; i <= kEarlyLaunches && i < issued_ - done_; ++i) Begin(queue_[i]);
      Queued next = std::move(queue_.front());
      queue_.pop_front();
      ++done_;
      if (status_.ok()) Run(next);
    }
  }

  // Launches begin in the order of the stream.
  void Begin(Queued& next) {
    const auto* launch = std::get_if<LaunchWork>(&next.work);
    if (launch == nullptr || next.begun != nullptr || !status_.ok()) return;
    next.begun = MakeGrid(*launch);
    next.begun->Begin();
  }
  void Run(Queued& next) {
    if (const auto* work = std::get_if<HostWork>(&next.work)) return (*work)();
    if (settings_.fail_after_launches >= 0 && launches_ >= settings_.fail_after_launches) {
      status_ = Internal(name_, ": launch ", launches_, " failed, as the test asked for");
      return;
    }
    ++launches_;
    if (next.begun == nullptr) next.begun = MakeGrid(std::get<LaunchWork>(next.work));
    next.begun->Finish();
  }
  std::unique_ptr<simt::Grid> MakeGrid(const LaunchWork& launch) {
    simt::GridWork grid = launch.grid;
    grid.seed = settings_.seed + static_cast<uint64_t>(begun_++) * 0x632be59bd9b4e019u;
    return std::make_unique<simt::Grid>(grid);
  }

  // No wait is long here, but each is looked at.
  void Look() {
    if (!status_.ok()) return;
    status_ = watch_.Look(0);
    broken_off_ = !status_.ok();
  }

  const EmulationSettings settings_;
  const std::string name_;
  DeviceProperties properties_;
  std::shared_ptr<MemoryTable> memory_;
  std::shared_ptr<MemoryTable> pinned_;
  // The stream: how much was issued and how much of it has run; the rest waits in the queue.
  std::deque<Queued> queue_;
  int64_t issued_ = 0;
  int64_t done_ = 0;
  int64_t mark_at_[kMarks];
  int64_t begun_ = 0;     // launches
  int64_t launches_ = 0;  // that have run
  WaitWatch watch_;
  absl::Status status_;
  bool broken_off_ = false;  // status_ is a watch's
  bool capturing_ = false;
  std::unique_ptr<EmulatedGraph> captured_;
};

}  // namespace

ScopedEmulation::ScopedEmulation(const EmulationSettings& settings) {
  MutexLock lock(g_settings_mutex);
  before_ = g_settings;
  g_settings = settings;
}
ScopedEmulation::~ScopedEmulation() {
  MutexLock lock(g_settings_mutex);
  g_settings = before_;
}

EmulationSettings CurrentEmulation() {
  MutexLock lock(g_settings_mutex);
  return g_settings;
}

absl::StatusOr<DeviceProperties> Device::Describe(int ordinal) {
  if (ordinal < 0 || ordinal >= kDevices) {
    return NotFound("no device ", ordinal, ": there are ", kDevices, " emulated ones");
  }
  MutexLock lock(g_settings_mutex);
  return PropertiesOf(ordinal, g_settings);
}

absl::StatusOr<std::unique_ptr<Device>> Device::Open(int ordinal) {
  TREADLE_RETURN_IF_ERROR(Describe(ordinal).status());
  MutexLock lock(g_settings_mutex);
  ++g_opened[ordinal];
  return std::make_unique<EmulatedDevice>(ordinal, g_settings);
}

int Device::Count(std::string* why) {
  why->clear();
  return kDevices;
}

int TimesOpened(int ordinal) {
  MutexLock lock(g_settings_mutex);
  return g_opened.at(static_cast<size_t>(ordinal));
}

}  // namespace treadle::cuda
