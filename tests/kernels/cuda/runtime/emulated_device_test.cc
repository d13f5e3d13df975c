// The contract of kernels/cuda/runtime/device.h in the emulation, and what only the emulation can
// show: late work, failures, and host code that a GPU would not catch.
#include "tests/emulation/emulated_device.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstdlib>
#include <string>

#include "kernels/cuda/runtime/launch_settings.h"
#include "tests/kernels/cuda/runtime/device_contract.h"

namespace treadle::cuda {
namespace {

std::unique_ptr<Device> OpenWith(const EmulationSettings& settings, int ordinal = 0) {
  ScopedEmulation emulation(settings);
  return Device::Open(ordinal).value();
}

struct Counter {  // one number on the device and a page-locked one on the host
  explicit Counter(Device& on)
      : device(on),
        buffer(on.Allocate(sizeof(int32_t)).value()),
        pinned(on.AllocateHost(sizeof(int32_t)).value()) {}
  int32_t* on_device() { return reinterpret_cast<int32_t*>(buffer.data()); }
  int32_t* on_host() { return reinterpret_cast<int32_t*>(pinned.data()); }
  void Add(int32_t amount) {
    device.Launch(AddKernel, {.threads = 32}, AddParams{on_device(), 1, amount});
  }
  void Fetch() { device.CopyToHostAsync(on_host(), on_device(), sizeof(int32_t)); }
  Device& device;
  Buffer buffer;
  Buffer pinned;
};

TEST(EmulatedDevice, DeferredWorkRunsAsFarAsSomebodyWaits) {
  const auto device = OpenWith({.deferred = true});
  Counter counter(*device);
  counter.Add(1);
  counter.Fetch();
  device->SetMark(2);
  counter.Add(1);
  counter.Fetch();
  EXPECT_EQ(*counter.on_host(), 0);
  EXPECT_TRUE(device->WaitForMark(2).ok());
  EXPECT_EQ(*counter.on_host(), 1);
  EXPECT_TRUE(device->Synchronize().ok());
  EXPECT_EQ(*counter.on_host(), 2);
}

TEST(EmulatedDevice, ABufferThatIsOverwrittenTooEarlyShows) {
  const auto device = OpenWith({.deferred = true});
  Counter counter(*device);
  *counter.on_host() = 5;
  device->CopyToDeviceAsync(counter.on_device(), counter.on_host(), sizeof(int32_t));
  *counter.on_host() = 6;
  int32_t got = 0;
  device->CopyToHost(&got, counter.on_device(), sizeof(got));
  EXPECT_EQ(got, 6);
}

TEST(EmulatedDevice, TheFirstFailureStays) {
  for (const bool deferred : {false, true}) {
    const auto device = OpenWith({.fail_after_launches = 2, .deferred = deferred}, 1);
    Counter counter(*device);
    for (int i = 0; i < 5; ++i) counter.Add(1);
    counter.Fetch();
    const absl::Status status = device->Synchronize();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_NE(status.message().find("emulated device 1: launch 2"), std::string::npos) << status;
    EXPECT_EQ(device->status(), status);
    EXPECT_EQ(device->WaitForMark(0), status);
    EXPECT_EQ(*counter.on_host(), 0);  // nothing runs after it
    device->BeginCapture();
    counter.Add(1);
    EXPECT_EQ(device->EndCapture().status(), status);
  }
}

TEST(EmulatedDevice, MemoryIsCountedAndGivenBack) {
  const auto device = OpenWith({.memory_bytes = 4096});
  {
    const Buffer half = device->Allocate(2000).value();
    EXPECT_EQ(device->FreeBytes(), 2048u);
    const auto more = device->Allocate(2049);
    EXPECT_EQ(more.status().message(),
              "emulated device 0: 2049 bytes asked for, 2048 of 4096 bytes are free");
    EXPECT_TRUE(device->Allocate(2048).ok());
  }
  EXPECT_EQ(device->FreeBytes(), 4096u);
}

TEST(EmulatedDevice, HostFunctionsRunInOrderAndInGraphs) {
  const auto device = OpenWith({});
  Counter counter(*device);
  const auto doubled = [&counter] { *counter.on_device() *= 2; };
  device->BeginCapture();
  counter.Add(1);
  device->RunOnHost(doubled);
  const auto graph = device->EndCapture().value();
  EXPECT_EQ(*counter.on_device(), 0);
  device->Replay(*graph);
  device->Replay(*graph);
  EXPECT_EQ(*counter.on_device(), 6);
}

TEST(EmulatedDevice, AWatchEndsWaitsAndTheOthersAreTold) {
  const auto device = OpenWith({});
  bool lost = false;
  double told = -1;
  const int owners[2] = {};
  device->WatchWaits(&owners[0], [&](double) {
    return lost ? absl::UnavailableError("the peer is gone") : absl::OkStatus();
  });
  device->WatchWaits(&owners[1], [&](double seconds) {
    told = seconds;
    return absl::OkStatus();
  });
  EXPECT_TRUE(device->Synchronize().ok());
  EXPECT_EQ(told, 0);
  lost = true;
  EXPECT_EQ(device->Synchronize().message(), "the peer is gone");
  EXPECT_TRUE(std::isinf(told));
  device->WatchWaits(&owners[0], nullptr);
  EXPECT_EQ(device->WaitForMark(0).message(), "the peer is gone");  // it stays
  EXPECT_EQ(device->Recover().message(), "the peer is gone");       // somebody still watches
  device->WatchWaits(&owners[1], nullptr);
  EXPECT_EQ(device->Synchronize().message(), "the peer is gone");
  EXPECT_EQ(device->Recover(), absl::OkStatus());
  Counter counter(*device);
  counter.Add(3);
  EXPECT_EQ(device->Synchronize(), absl::OkStatus());
  EXPECT_EQ(*counter.on_device(), 3);
}

TEST(EmulatedDevice, DoesNotRecoverFromAFailureOfItsOwn) {
  const auto device = OpenWith({.fail_after_launches = 0});
  Counter(*device).Add(1);
  const absl::Status status = device->Synchronize();
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(device->Recover(), status);
}

TEST(EmulatedDeviceDeathTest, WhatAGpuWouldRefuse) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto device = OpenWith({});
  Counter counter(*device);
  const AddParams params{counter.on_device(), 1, 1};
  EXPECT_DEATH(device->Launch(AddKernel, {.threads = 33}, params), "threads % 32");
  EXPECT_DEATH(device->Launch(AddKernel, {.threads = 1056}, params), "threads <= 1024");
  EXPECT_DEATH(device->Launch(AddKernel, {.grid_x = 0}, params), "grid_x");
  EXPECT_DEATH(device->Launch(AddKernel, {.grid_y = 65536}, params), "grid_y");
  EXPECT_DEATH(device->Launch(AddKernel, {.shared_bytes = (227 << 10) + 1}, params),
               "shared_bytes");
  EXPECT_DEATH(device->CopyToDevice(counter.on_device(), &params, 8), "Holds");
  EXPECT_DEATH(device->CopyToDeviceAsync(counter.on_device(), &params, 4), "Holds");
  device->BeginCapture();
  EXPECT_DEATH(device->Allocate(1).IgnoreError(), "capturing");
  EXPECT_DEATH(device->Synchronize().IgnoreError(), "capturing");
  EXPECT_DEATH(device->SetMark(0), "capturing");
  int32_t got = 0;
  EXPECT_DEATH(device->CopyToHost(&got, counter.on_device(), 4), "capturing");
  EXPECT_TRUE(device->EndCapture().ok());
}

// Variables of the environment that a real device reads when it is opened.
TEST(LaunchSettings, SayWhatAVariableMayBe) {
  const auto read = [](const char* early, const char* share) {
    early == nullptr ? unsetenv("TREADLE_CUDA_EARLY_LAUNCHES")
                     : setenv("TREADLE_CUDA_EARLY_LAUNCHES", early, 1);
    share == nullptr ? unsetenv("TREADLE_CUDA_CARVE_OUT")
                     : setenv("TREADLE_CUDA_CARVE_OUT", share, 1);
    return ReadLaunchSettings();
  };
  EXPECT_FALSE(read("off", nullptr).value().early);
  EXPECT_EQ(read("on", "100").value().carve_out, 100);
  EXPECT_THAT(std::string(read("no", nullptr).status().message()),
              testing::HasSubstr("TREADLE_CUDA_EARLY_LAUNCHES is 'no', expected on or off"));
  for (const char* share : {"", "all", "101", "-1", "5x"}) {
    EXPECT_THAT(std::string(read(nullptr, share).status().message()),
                testing::HasSubstr("expected 0 to 100 percent"));
  }
  const auto defaults = read(nullptr, nullptr);
  EXPECT_TRUE(defaults.value().early);
  EXPECT_EQ(defaults.value().carve_out, -1);
}

TEST(EmulatedDeviceDeathTest, AKernelThatLeavesItsMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers report by themselves";
#endif
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto device = OpenWith({});
  Counter counter(*device);
  EXPECT_DEATH(
      {
        device->Launch(AddKernel, {.grid_x = 3, .threads = 32},
                       AddParams{counter.on_device(), 65, 1});
        device->Synchronize().IgnoreError();
      },
      "block \\(2, 0, 0\\), thread 0 of 32: touched");
  EXPECT_DEATH(
      {
        Counter other(*device);
        other.device.Launch(AddKernel, {.threads = 32}, AddParams{other.on_device(), 2, 1});
        device->Synchronize().IgnoreError();
      },
      "nobody_wrote_behind_it");
}

}  // namespace
}  // namespace treadle::cuda
