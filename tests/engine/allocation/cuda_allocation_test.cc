// Calls of the host for an iteration of decoding on a GPU: one copy to the device, one replay, one
// copy back, and no allocation but the result's. On a device that does nothing, in a binary of its
// own, because it counts every allocation of the process.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "engine/stage.h"
#include "kernels/cuda/runtime/backend_on_device.h"
#include "kernels/cuda/runtime/device.h"
#include "tests/engine/allocation/allocation_counter.h"
#include "tests/engine/plan_builder.h"
#include "tests/support/random_model.h"

namespace treadle {
namespace {

struct Calls {
  int copies_to_device = 0;
  int copies_to_host = 0;
  int launches = 0;  // outside of captures
  int replays = 0;
};

// Its memory is the host's and stays as it is. Counts what is asked of it.
class NullDevice final : public cuda::Device {
 public:
  explicit NullDevice(Calls& calls) : calls_(calls) {}

  absl::StatusOr<std::unique_ptr<cuda::Device>> OpenBeside() const override {
    return std::make_unique<NullDevice>(calls_);
  }
  const cuda::DeviceProperties& properties() const override { return properties_; }
  absl::Status status() const override { return absl::OkStatus(); }
  void BindThread() override {}
  absl::StatusOr<Buffer> Allocate(size_t bytes) override {
    const size_t rounded = (bytes + 255) / 256 * 256 + 256;
    void* const data = std::aligned_alloc(256, rounded);
    std::memset(data, 0, rounded);
    return Buffer(data, bytes, [](void* memory) { std::free(memory); });
  }
  absl::StatusOr<Buffer> AllocateHost(size_t bytes) override { return Allocate(bytes); }
  size_t FreeBytes() override { return properties_.memory_bytes; }
  void CopyToDevice(void*, const void*, size_t) override { ++calls_.copies_to_device; }
  void CopyToHost(void*, const void*, size_t) override { ++calls_.copies_to_host; }
  void CopyToDeviceAsync(void*, const void*, size_t) override { ++calls_.copies_to_device; }
  void CopyToHostAsync(void*, const void*, size_t) override { ++calls_.copies_to_host; }
  void CopyOnDevice(void*, const void*, size_t) override { Work(); }
  void Zero(void*, size_t) override { Work(); }
  absl::Status Synchronize() override { return absl::OkStatus(); }
  void SetMark(int) override {}
  absl::Status WaitForMark(int) override { return absl::OkStatus(); }
  void WatchWaits(const void*, WaitCheck) override {}
  absl::Status Recover() override { return absl::OkStatus(); }
  double Seconds(int, int) override { return 0; }
  void BeginCapture() override { capturing_ = true; }
  absl::StatusOr<std::unique_ptr<cuda::Graph>> EndCapture() override {
    capturing_ = false;
    return std::make_unique<cuda::Graph>();
  }
  void Replay(const cuda::Graph&) override { ++calls_.replays; }
  bool capturing() const override { return capturing_; }
  void* stream() override { return nullptr; }
  void RunOnHost(std::function<void()>) override { Work(); }

 protected:
  void LaunchRaw(const void*, const cuda::LaunchShape&, void*, size_t, Invoker) override { Work(); }
  int ResidentRaw(const void*, const cuda::LaunchShape&) override { return 1; }

 private:
  void Work() { calls_.launches += capturing_ ? 0 : 1; }

  Calls& calls_;
  const cuda::DeviceProperties properties_ = {.name = "null",
                                              .bus_id = "null:0",
                                              .multiprocessors = 132,
                                              .capability = 90,
                                              .warpgroup_matrices = true,
                                              .memory_bytes = size_t{1} << 30,
                                              .shared_bytes_per_block = size_t{227} << 10};
  bool capturing_ = false;
};

TEST(CudaIteration, TheHostCopiesOnceAndAllocatesTheResult) {
  constexpr int kSequences = 13;
  constexpr int kMarks = 2;
  Calls calls;
  const auto backend =
      cuda::MakeCudaBackend(std::make_unique<NullDevice>(calls), {.dtype = DType::kBF16}).value();
  RandomModel model(*backend, *FindWeightFormat("bf16"), 64, 1);
  const auto stage =
      Stage::Create(*backend, model, 64,
                    {.page_size = 16, .num_pages = 8 * kSequences, .dtype = DType::kBF16})
          .value();
  stage->BeginEpoch(nullptr, nullptr);

  IterationPlan prompts;
  IterationPlan plans[kMarks];
  for (int32_t id = 1; id <= kSequences; ++id) {
    SequenceStart start = StartOf(id, 3, {});
    for (int32_t page = 0; page < 8; ++page)
      start.pages[PageKind::kWhole].push_back(8 * (id - 1) + page);
    if (id % 2 == 0) start.sampling.temperature = 0.7f;
    prompts.starts.push_back(start);
    prompts.steps.push_back(SampleOf(StepOf(id, 0, {1, 2, 3})));
    for (IterationPlan& plan : plans) plan.steps.push_back(SampleOf(PreviousSample(id, 3)));
  }
  ASSERT_TRUE(stage->Begin(prompts).ok());
  ASSERT_TRUE(stage->Finish().ok());

  // One iteration ahead, as ranks run them.
  int64_t begin_allocations = 0;
  int64_t finish_allocations = 0;
  Calls before;
  constexpr int kWarmUp = 8;  // every buffer has been used; both plans' graphs are there
  constexpr int kIterations = 40;
  bool begun = false;
  for (int i = 0; i < kIterations; ++i) {
    IterationPlan& plan = plans[i % kMarks];
    for (Step& step : plan.steps) step.first_position = 3 + i;
    if (i == kWarmUp) {
      before = calls;
      begin_allocations = finish_allocations = 0;
    }
    const int64_t at = Allocations();
    ASSERT_TRUE(stage->Begin(plan).ok());
    begin_allocations += Allocations() - at;
    if (std::exchange(begun, true)) {
      const int64_t finishing = Allocations();
      ASSERT_TRUE(stage->Finish().ok());
      finish_allocations += Allocations() - finishing;
    }
  }
  ASSERT_TRUE(stage->Finish().ok());
  constexpr int kCounted = kIterations - kWarmUp;
  EXPECT_EQ(calls.replays - before.replays, kCounted);
  EXPECT_EQ(calls.copies_to_device - before.copies_to_device, kCounted);
  EXPECT_EQ(calls.copies_to_host - before.copies_to_host, kCounted);
  EXPECT_EQ(calls.launches - before.launches, 0);
  EXPECT_EQ(begin_allocations, 0);
  // IterationResult::steps, and the outputs of each.
  EXPECT_EQ(finish_allocations, kCounted * (1 + kSequences));
}

}  // namespace
}  // namespace treadle
