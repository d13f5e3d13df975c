// What the emulation is for: kernels that a GPU would get wrong silently, or now and then, show.
#include <gtest/gtest.h>

#include <cstdint>
#include <iterator>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/cuda/simt.h"
#include "tests/kernels/cuda/emulated_array.h"

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

// -- what ends the process ------------------------------------------------------------------------

struct BadParams {
  int kind;
  const void* global;
};
TREADLE_KERNEL(64) void BadKernel(BadParams p) {
  auto* tile = simt::DynamicShared<unsigned char>();
  switch (p.kind) {
    case 0:  // lanes of one warp part ways
      if (simt::Lane() < 16) {
        simt::SyncWarp();
      } else {
        simt::Ballot(true);
      }
      break;
    case 1:  // a lane returns
      if (simt::Lane() == 3) return;
      simt::SyncWarp();
      break;
    case 2:  // a warp returns
      if (simt::Warp() == 1) return;
      simt::SyncThreads();
      break;
    case 3:
      simt::CopyAsync16(tile + 8, p.global);
      break;
    case 4:
      simt::CopyAsync16(tile + 256, p.global);
      break;
    case 5:
      simt::LoadOnce16(static_cast<const std::byte*>(p.global) + 4);
      break;
    case 6:
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
        },
        kWhat[kind]);
  }
}

}  // namespace
}  // namespace treadle::cuda
