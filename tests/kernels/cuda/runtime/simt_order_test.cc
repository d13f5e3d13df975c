// Purpose of the emulation: kernels that a GPU would get wrong silently, or now and then, show.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <set>
#include <vector>

#include "kernels/cuda/runtime/device.h"
#include "kernels/cuda/runtime/simt.h"
#include "tests/kernels/cuda/runtime/emulated_array.h"

namespace treadle::cuda {
namespace {

// -- barriers -------------------------------------------------------------------------------------

struct NeighborParams {
  uint32_t* out;  // [threads]
  int distance;   // 1, -1: within the warp; 32, -32: of the warp before or behind
  bool barrier;
};
TREADLE_HOST_DEVICE int NeighborOf(int thread, int distance) {
  const int neighbor = thread + distance;
  const bool exists =
      distance * distance == 1 ? neighbor >> 5 == thread >> 5 : neighbor >= 0 && neighbor < 1024;
  return exists ? neighbor : thread;
}
// Writes shared memory, and reads what another thread wrote.
TREADLE_KERNEL(1024) void NeighborKernel(NeighborParams p) {
  simt::AwaitEarlierLaunches();
  auto* tile = simt::DynamicShared<uint32_t>();
  const int t = simt::Thread();
  tile[t] = static_cast<uint32_t>(t);
  if (p.barrier) {
    if (p.distance * p.distance == 1) {
      simt::SyncWarp();
    } else {
      simt::SyncThreads();
    }
  }
  p.out[t] = tile[NeighborOf(t, p.distance)];
}

bool NeighborsAreRight(bool barrier, int distance, uint64_t seed) {
  const auto device = OpenDevice(seed);
  Array<uint32_t> out(*device, 1024);
  device->Launch(NeighborKernel, {.threads = 1024, .shared_bytes = 4096},
                 NeighborParams{out.data(), distance, barrier});
  const auto got = out.Read();
  for (int t = 0; t < 1024; ++t) {
    if (got[t] != static_cast<uint32_t>(NeighborOf(t, distance))) return false;
  }
  return true;
}

// In both directions: no order of threads has one that always runs before its neighbor.
TEST(Simt, AMissingBarrierShowsUnderEverySeed) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    for (const int distance : {1, -1, 32, -32}) {
      EXPECT_TRUE(NeighborsAreRight(true, distance, seed)) << distance << " " << seed;
      EXPECT_FALSE(NeighborsAreRight(false, distance, seed)) << distance << " " << seed;
    }
  }
}

struct RingParams {
  uint32_t* out;  // [rounds]
  int rounds;
  bool second_barrier;
};
// One warp writes, the others read, in a buffer that is used again in each round: without the
// second barrier the writer may be a round ahead.
TREADLE_KERNEL(128) void RingKernel(RingParams p) {
  simt::AwaitEarlierLaunches();
  auto* slot = simt::DynamicShared<uint32_t>();
  for (int round = 0; round < p.rounds; ++round) {
    if (simt::Thread() == 0) *slot = static_cast<uint32_t>(round);
    simt::SyncThreads();
    if (simt::Lane() == 0) simt::AtomicAdd(p.out + round, *slot);
    if (p.second_barrier) simt::SyncThreads();
  }
}

TEST(Simt, AWriterThatOvertakesReadersShowsUnderSomeSeed) {
  int wrong = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    for (const bool second_barrier : {false, true}) {
      const auto device = OpenDevice(seed);
      Array<uint32_t> out(*device, 4);
      device->Launch(RingKernel, {.threads = 128, .shared_bytes = 4},
                     RingParams{out.data(), 4, second_barrier});
      const bool right = out.Read() == std::vector<uint32_t>{0, 4, 8, 12};
      if (second_barrier) {
        EXPECT_TRUE(right);
      } else if (!right) {
        ++wrong;
      }
    }
  }
  EXPECT_GT(wrong, 0);
}

// -- the launches before --------------------------------------------------------------------------

enum class Early { kNothing, kRead, kLoadOnce, kCopy, kWrite };
struct HandOnParams {
  const uint32_t* in;  // [blocks][32][4]
  uint32_t* out;       // the same
  Early early;         // what does not wait for earlier launches
};
// Hands on the first of every four numbers, 1 more.
TREADLE_KERNEL(32) void HandOnKernel(HandOnParams p) {
  auto* tile = simt::DynamicShared<uint32_t>() + 4 * simt::Lane();
  const int at = 4 * (simt::BlockX() * 32 + simt::Lane());
  uint32_t got = 0;
  if (p.early == Early::kRead) got = p.in[at];
  if (p.early == Early::kLoadOnce) got = simt::LoadOnce16(p.in + at).x;
  if (p.early == Early::kCopy) simt::CopyAsync16(tile, p.in + at);
  if (p.early == Early::kWrite) p.out[at] = 7;
  simt::AwaitEarlierLaunches();
  if (p.early == Early::kNothing || p.early == Early::kWrite) got = p.in[at];
  if (p.early == Early::kCopy) {
    simt::CopyAsyncCommit();
    simt::CopyAsyncWait<0>();
    got = *tile;
  }
  p.out[at] = got + 1;
}

constexpr uint32_t kBlocks = 5;
using Numbers = Array<uint32_t>;

void HandOn(Device& device, const Numbers& in, const Numbers& out, Early early = Early::kNothing) {
  device.Launch(HandOnKernel, {.grid_x = kBlocks, .threads = 32, .shared_bytes = 512},
                HandOnParams{in.data(), out.data(), early});
}
// Which blocks handed on something else.
std::set<uint32_t> BlocksWithout(uint32_t number, const Numbers& numbers) {
  const std::vector<uint32_t> got = numbers.Read();
  std::set<uint32_t> blocks;
  for (uint32_t i = 0; i < got.size(); i += 4) {
    if (got[i] != number) blocks.insert(i / 128);
  }
  return blocks;
}
std::unique_ptr<Device> OpenDeferred(bool deferred, uint64_t seed = 1) {
  ScopedEmulation emulation({.deferred = deferred, .seed = seed});
  return Device::Open(0).value();
}

constexpr Early kEarlyReads[] = {Early::kRead, Early::kLoadOnce, Early::kCopy};

// In the one block that begins early, another with other seeds.
TEST(Simt, AReadThatDoesNotWaitForTheLaunchBeforeShows) {
  for (const bool deferred : {false, true}) {
    std::set<uint32_t> wrong;
    for (uint64_t seed = 1; seed <= 5; ++seed) {
      const auto device = OpenDeferred(deferred, seed);
      for (const Early early : kEarlyReads) {
        const Numbers first(*device, kBlocks * 128), second(*device, kBlocks * 128),
            third(*device, kBlocks * 128);
        HandOn(*device, first, second);
        HandOn(*device, second, third, early);
        const std::set<uint32_t> blocks = BlocksWithout(2, third);
        EXPECT_EQ(blocks.size(), 1u) << static_cast<int>(early);
        wrong.insert(blocks.begin(), blocks.end());
        HandOn(*device, second, third);
        EXPECT_EQ(BlocksWithout(2, third), std::set<uint32_t>());
      }
    }
    EXPECT_GT(wrong.size(), 1u);
  }
}

// Also of what was written before something else: a launch may begin that early, too.
TEST(Simt, AReadThatDoesNotWaitForTheWorkBeforeShows) {
  const auto device = OpenDeferred(true);
  const Numbers other(*device, kBlocks * 128), another(*device, kBlocks * 128);
  const std::function<void()> between[] = {
      [&] { HandOn(*device, other, another); }, [&] { device->Zero(other.data(), 16); },
      [&] { device->RunOnHost([] {}); }, [&] { device->SetMark(0); }};
  for (const auto& put : between) {
    const Numbers first(*device, kBlocks * 128), second(*device, kBlocks * 128),
        third(*device, kBlocks * 128);
    HandOn(*device, first, second);
    put();
    HandOn(*device, second, third, Early::kRead);
    EXPECT_EQ(BlocksWithout(2, third).size(), 1u);
  }
  // A copy is earlier work as well.
  const Numbers ones(*device, std::vector<uint32_t>(kBlocks * 128, 1));
  device->CopyOnDevice(other.data(), ones.data(), kBlocks * 512);
  HandOn(*device, other, another, Early::kRead);
  EXPECT_EQ(BlocksWithout(2, another).size(), 1u);
}

TEST(Simt, AWriteThatDoesNotWaitForEarlierLaunchesShows) {
  for (const bool deferred : {false, true}) {
    const auto device = OpenDeferred(deferred);
    const Numbers first(*device, kBlocks * 128), second(*device, kBlocks * 128);
    HandOn(*device, first, second);
    HandOn(*device, second, first, Early::kWrite);
    EXPECT_EQ(BlocksWithout(1, second).size(), 1u);
  }
}

struct GroupsParams {
  const uint32_t* in;  // [1]
  uint32_t* out;       // [128]
};
// Warps wait for earlier launches at different places, one of them behind a barrier.
TREADLE_KERNEL(128) void GroupsKernel(GroupsParams p) {
  auto* tile = simt::DynamicShared<uint32_t>();
  tile[simt::Thread()] = static_cast<uint32_t>(simt::Thread());
  if (simt::Warp() == 1) simt::AwaitEarlierLaunches();
  if (simt::Warp() == 2) {
    simt::AwaitEarlierLaunches();
    tile[simt::Thread()] += *p.in;
  }
  simt::SyncThreads();
  const uint32_t sum = tile[simt::Thread()] + tile[127 - simt::Thread()];
  if (simt::Warp() == 0 || simt::Warp() == 3) simt::AwaitEarlierLaunches();
  p.out[simt::Thread()] = sum + *p.in;
}

TEST(Simt, WarpsMayWaitForEarlierLaunchesAtDifferentPlaces) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    const auto device = OpenDevice(seed);
    const Numbers zeros(*device, kBlocks * 128), in(*device, kBlocks * 128), out(*device, 128);
    HandOn(*device, zeros, in);
    device->Launch(GroupsKernel, {.threads = 128, .shared_bytes = 512},
                   GroupsParams{in.data(), out.data()});
    const std::vector<uint32_t> got = out.Read();
    for (uint32_t t = 0; t < 128; ++t) {
      const bool second = t / 32 == 1 || t / 32 == 2;  // their partner is of the other one
      EXPECT_EQ(got[t], second ? 129u : 128u) << t;
    }
  }
}

TEST(Simt, ALaunchThatHasBegunMayBeGivenUp) {
  for (int repeat = 0; repeat < 3; ++repeat) {
    const auto device = OpenDeferred(repeat == 1);
    const Numbers first(*device, kBlocks * 128), second(*device, kBlocks * 128);
    for (int i = 0; i < 4; ++i) HandOn(*device, first, second);
  }
}

// -- what ends the process ------------------------------------------------------------------------

struct BadParams {
  int kind;
  const void* global;
};
TREADLE_KERNEL(64) void BadKernel(BadParams p) {
  if (p.kind == 0 && simt::Warp() == 1) return;
  simt::AwaitEarlierLaunches();
  auto* tile = simt::DynamicShared<unsigned char>();
  switch (p.kind) {
    case 0:  // ended with some threads that have not waited
      break;
    case 1:
      simt::AwaitEarlierLaunches();
      break;
    case 2:  // lanes of one warp part ways
      if (simt::Lane() < 16) {
        simt::SyncWarp();
      } else {
        simt::Ballot(true);
      }
      break;
    case 3:  // a lane returns
      if (simt::Lane() == 3) return;
      simt::SyncWarp();
      break;
    case 4:  // a warp returns
      if (simt::Warp() == 1) return;
      simt::SyncThreads();
      break;
    case 5:
      simt::CopyAsync16(tile + 8, p.global);
      break;
    case 6:
      simt::CopyAsync16(tile + 256, p.global);
      break;
    case 7:
      simt::LoadOnce16(static_cast<const std::byte*>(p.global) + 4);
      break;
    case 8:
      tile[255] = 1;
      break;
    default: {
      uint32_t r[4];
      simt::LoadMatrix4(r, p.global);
    }
  }
}

TEST(SimtDeathTest, NamesWhatIsWrongWithAKernel) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const char* const kWhat[] = {
      "thread .*: the warp has returned without AwaitEarlierLaunches",
      "BadKernel.*: AwaitEarlierLaunches for a second time",
      "lanes of one warp are at different operations: lane 0 at SyncWarp .*, lane 16 at Ballot",
      "lane 3 at its end",
      "threads wait at SyncThreads, but those of warp 1 have returned",
      "CopyAsync16: a target that is not aligned",
      "CopyAsync16: a target outside of shared memory",
      "LoadOnce16: an address that is not aligned",
      "the block wrote outside of the shared memory",
      "ldmatrix: a row that is not in shared memory"};
  for (int kind = 0; kind < static_cast<int>(std::size(kWhat)); ++kind) {
    EXPECT_DEATH(
        {
          const auto device = OpenDevice();
          Array<uint32_t> global(*device, 64);
          device->Launch(BadKernel, {.threads = 64, .shared_bytes = 255},
                         BadParams{kind, global.data()});
          device->Synchronize().IgnoreError();
        },
        kWhat[kind]);
  }
}

}  // namespace
}  // namespace treadle::cuda
