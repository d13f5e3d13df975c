#include "base/memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace treadle {
namespace {

namespace fs = std::filesystem;

// A machine's files, as the kernel writes them (Documentation/admin-guide/cgroup-v2.rst and
// cgroup-v1/memory.rst).
class AvailableMemoryTest : public testing::Test {
 protected:
  AvailableMemoryTest() {
    fs::remove_all(root_);
    Write("proc/meminfo",
          "MemTotal:       8192 kB\nMemFree:        100 kB\nMemAvailable:   4096 kB\n");
  }
  ~AvailableMemoryTest() override { fs::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  void Group2(const std::string& path, const std::string& limit, int usage, int cached) {
    const std::string folder = "sys/fs/cgroup" + path + "/";
    Write(folder + "memory.max", limit + "\n");
    Write(folder + "memory.current", std::to_string(usage) + "\n");
    Write(folder + "memory.stat", "anon 5\ninactive_file " + std::to_string(cached) + "\nslab 9\n");
  }
  void Expect(uint64_t bytes, bool limited) {
    const MemoryAvailable available = AvailableMemory(root_.string() + "/");
    EXPECT_EQ(available.bytes, bytes);
    EXPECT_EQ(available.limited, limited);
  }

  const fs::path root_ = fs::path(testing::TempDir()) / ("machine-" + std::to_string(getpid()));
};

TEST_F(AvailableMemoryTest, IsTheMachinesWithoutALimit) {
  Expect(4096 * 1024, false);
  Write("proc/self/cgroup", "0::/a/b\n");
  Expect(4096 * 1024, false);  // as where /sys is not there
  Group2("/a/b", "max", 1000, 0);
  Group2("/a", "999999999", 1000, 0);
  Expect(4096 * 1024, false);
}

TEST_F(AvailableMemoryTest, OfVersion2IsTheLeastOfAllGroupsAbove) {
  Write("proc/self/cgroup", "0::/a/b\n");
  Group2("/a/b", "2000000", 500'000, 0);
  Expect(1'500'000, true);
  Group2("/a", "1000000", 900'000, 100'000);  // inactive pages of files can be had back
  Expect(200'000, true);
  Group2("/a", "1000000", 2'000'000, 0);  // as after a limit was lowered
  Expect(0, true);
}

// A container sees its own group as the root.
TEST_F(AvailableMemoryTest, OfAContainerIsTheRootsLimit) {
  Write("proc/self/cgroup", "0::/\n");
  Group2("", "3000000", 1'000'000, 0);
  Expect(2'000'000, true);
  Write("proc/self/cgroup", "0::/../../elsewhere\n");
  Expect(2'000'000, true);
}

TEST_F(AvailableMemoryTest, OfVersion1IsThatOfTheMemoryController) {
  Write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/1234\n0::/\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000\n");
  Write("sys/fs/cgroup/memory/memory.usage_in_bytes", "700000\n");
  Write("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 50000\n");
  Expect(350'000, true);
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");  // none
  Expect(4096 * 1024, false);
}

TEST_F(AvailableMemoryTest, WhatCannotBeReadLimitsNothing) {
  for (const char* const lines : {"", "nonsense", "0::relative\n", "4:memory:\n", "::::\n"}) {
    Write("proc/self/cgroup", lines);
    Expect(4096 * 1024, false);
  }
  Write("proc/self/cgroup", "0::/a\n");
  Write("sys/fs/cgroup/a/memory.max", "1000\n");  // and no usage beside it
  Expect(4096 * 1024, false);
}

}  // namespace
}  // namespace treadle
