// Contract of every Device, real or emulated: included by one test of each, which brings its
// kernels' compiler with it. Without a device the tests say why they are skipped.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/cuda/runtime/simt.h"

namespace treadle::cuda {
namespace {

struct AddParams {
  int32_t* data = nullptr;  // [count]
  int32_t count = 0;
  int32_t amount = 0;
};
TREADLE_KERNEL(128) void AddKernel(AddParams p) {
  simt::AwaitEarlierLaunches();
  const int i = simt::BlockX() * simt::Threads() + simt::Thread();
  if (i < p.count) p.data[i] += p.amount;
}

// Sums its block's numbers through more than 48 KB of shared memory.
struct ScatterParams {
  const int32_t* in = nullptr;  // [128]
  int32_t* out = nullptr;       // [128] reversed
};
TREADLE_KERNEL(128) void ScatterKernel(ScatterParams p) {
  simt::AwaitEarlierLaunches();
  auto* words = simt::DynamicShared<int32_t>();
  const int t = simt::Thread();
  words[t * 128] = p.in[t];
  simt::SyncThreads();
  p.out[t] = words[(127 - t) * 128];
}

// A number of which every launch makes another, slowly, so that one which begins before the launch
// before it has ended, and does not wait, meets what was there before.
TREADLE_HOST_DEVICE uint32_t Scramble(uint32_t x, uint32_t salt) {
  for (int i = 0; i < 100; ++i) x = (x ^ salt) * 1664525u + 1013904223u;
  return x;
}
struct ScrambleParams {
  const uint32_t* in = nullptr;  // [count]
  uint32_t* out = nullptr;       // [count] in reverse, so that other blocks' numbers are needed
  int32_t count = 0;
  uint32_t salt = 0;
};
TREADLE_KERNEL(128) void ScrambleKernel(ScrambleParams p) {
  simt::AwaitEarlierLaunches();
  const int i = simt::BlockX() * simt::Threads() + simt::Thread();
  if (i < p.count) p.out[p.count - 1 - i] = Scramble(p.in[i], p.salt);
}

class DeviceContract : public testing::Test {
 protected:
  static constexpr int kCount = 1000;

  void SetUp() override {
    std::string why;
    if (Device::Count(&why) == 0) {
      // Opening one says the same.
      EXPECT_EQ(Device::Open(0).status().message(), why);
      GTEST_SKIP() << "no GPU: " << why;
    }
    device_ = Device::Open(0).value();
    device_->BindThread();
    array_ = device_->Allocate(kCount * sizeof(int32_t)).value();
    host_ = device_->AllocateHost(kCount * sizeof(int32_t)).value();
  }

  int32_t* array() { return reinterpret_cast<int32_t*>(array_.data()); }
  int32_t* host() { return reinterpret_cast<int32_t*>(host_.data()); }
  void Add(int32_t amount) {
    device_->Launch(AddKernel, {.grid_x = (kCount + 127) / 128, .threads = 128},
                    AddParams{array(), kCount, amount});
  }
  std::vector<int32_t> Read() {
    std::vector<int32_t> values(kCount);
    device_->CopyToHost(values.data(), array(), kCount * sizeof(int32_t));
    return values;
  }
  static std::vector<int32_t> All(int32_t value) { return std::vector<int32_t>(kCount, value); }

  std::unique_ptr<Device> device_;
  Buffer array_;
  Buffer host_;
};

TEST_F(DeviceContract, MemoryIsAlignedAndZero) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{255}, size_t{4096}, size_t{100'001}}) {
    const Buffer buffer = device_->Allocate(bytes).value();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 256, 0u);
    EXPECT_EQ(buffer.bytes(), bytes);
    std::vector<char> values(bytes, 'x');
    device_->CopyToHost(values.data(), buffer.data(), bytes);
    EXPECT_EQ(values, std::vector<char>(bytes, 0));
  }
}

TEST_F(DeviceContract, MoreMemoryThanThereIsIsAnErrorThatSaysSo) {
  const auto buffer = device_->Allocate(device_->properties().memory_bytes * 2);
  EXPECT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(buffer.status().message().find("bytes asked for"), std::string::npos);
  EXPECT_TRUE(device_->status().ok());
  Add(1);
  EXPECT_EQ(Read(), All(1));
}

TEST_F(DeviceContract, RunsInOrder) {
  for (int32_t i = 0; i < kCount; ++i) host()[i] = i;
  device_->CopyToDeviceAsync(array(), host(), kCount * sizeof(int32_t));
  Add(5);
  device_->CopyToHostAsync(host(), array(), kCount * sizeof(int32_t));
  device_->SetMark(0);
  device_->Zero(array(), kCount * sizeof(int32_t));
  Add(7);
  device_->SetMark(1);
  EXPECT_TRUE(device_->WaitForMark(0).ok());
  for (int32_t i = 0; i < kCount; ++i) EXPECT_EQ(host()[i], i + 5);
  EXPECT_TRUE(device_->WaitForMark(1).ok());
  EXPECT_GE(device_->Seconds(0, 1), 0);
  EXPECT_EQ(Read(), All(7));
}

TEST_F(DeviceContract, AGraphRunsWhenItIsReplayed) {
  Add(1);
  device_->BeginCapture();
  EXPECT_TRUE(device_->capturing());
  Add(10);
  Add(100);
  device_->CopyToHostAsync(host(), array(), kCount * sizeof(int32_t));
  const auto graph = device_->EndCapture();
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_FALSE(device_->capturing());
  EXPECT_EQ(Read(), All(1));
  device_->Replay(**graph);
  device_->Replay(**graph);
  EXPECT_TRUE(device_->Synchronize().ok());
  EXPECT_EQ(Read(), All(221));
  EXPECT_EQ(host()[kCount - 1], 221);
}

// As issued, from a graph, and one behind the other.
TEST_F(DeviceContract, EveryLaunchSeesAllThatIsBeforeIt) {
  for (const int32_t count : {100, 10'000}) {
    const size_t bytes = sizeof(uint32_t) * static_cast<size_t>(count);
    const Buffer buffers[] = {device_->Allocate(bytes).value(), device_->Allocate(bytes).value()};
    auto* const a = reinterpret_cast<uint32_t*>(buffers[0].data());
    auto* const b = reinterpret_cast<uint32_t*>(buffers[1].data());
    uint32_t salt = 0;
    std::vector<uint32_t> expected(count);
    const auto scramble = [&](const uint32_t* in, uint32_t* out) {
      device_->Launch(ScrambleKernel,
                      {.grid_x = static_cast<uint32_t>(count + 127) / 128, .threads = 128},
                      ScrambleParams{in, out, count, ++salt});
    };
    const auto scramble_expected = [&] {
      for (uint32_t& x : expected) x = Scramble(x, salt);
      std::reverse(expected.begin(), expected.end());
    };
    const auto issue = [&] {
      for (salt = 0; salt < 12;) {
        scramble(a, b);
        scramble(b, a);
        device_->Zero(b, bytes);
        scramble(a, b);
        device_->CopyOnDevice(a, b, bytes);
      }
    };
    issue();
    device_->BeginCapture();
    issue();
    const auto graph = device_->EndCapture();
    ASSERT_TRUE(graph.ok()) << graph.status();
    device_->Replay(**graph);
    device_->Replay(**graph);
    issue();
    for (int round = 0; round < 4; ++round) {
      for (salt = 1; salt <= 12; ++salt) scramble_expected();
    }
    std::vector<uint32_t> got(count);
    device_->CopyToHost(got.data(), a, bytes);
    EXPECT_EQ(got, expected);
  }
}

TEST_F(DeviceContract, SharedMemoryBeyond48Kilobytes) {
  ASSERT_GE(device_->properties().shared_bytes_per_block, 128 * 128 * sizeof(int32_t));
  std::vector<int32_t> in(128);
  for (int32_t i = 0; i < 128; ++i) in[i] = i;
  device_->CopyToDevice(array(), in.data(), 512);
  for (int repeat = 0; repeat < 2; ++repeat) {
    device_->Launch(ScatterKernel, {.threads = 128, .shared_bytes = 128 * 128 * sizeof(int32_t)},
                    ScatterParams{array(), array() + 128});
  }
  EXPECT_TRUE(device_->Synchronize().ok());
  const auto got = Read();
  for (int32_t i = 0; i < 128; ++i) EXPECT_EQ(got[128 + i], 127 - i);
}

TEST_F(DeviceContract, ADeviceThatIsNotThere) {
  std::string why;
  const int count = Device::Count(&why);
  EXPECT_EQ(why, "");
  for (const int ordinal : {-1, count}) {
    const auto device = Device::Open(ordinal);
    EXPECT_EQ(device.status().code(), absl::StatusCode::kNotFound);
    EXPECT_NE(device.status().message().find(std::to_string(ordinal)), std::string::npos);
  }
}

}  // namespace
}  // namespace treadle::cuda
