// The targets on their seeds, and on what is left of them when their ends are cut off: a target
// that breaks here finds nothing elsewhere.
#include <gtest/gtest.h>

#include <set>

#include "tests/fuzz/fuzz_target.h"

namespace treadle {
namespace {

TEST(FuzzTargets, RunTheirSeeds) {
  std::set<std::string_view> names;
  for (const FuzzTarget* target : FuzzTargets()) {
    SCOPED_TRACE(target->name);
    EXPECT_TRUE(names.insert(target->name).second);
    const std::vector<std::string> seeds = target->seeds();
    EXPECT_FALSE(seeds.empty());
    target->run("");
    for (const std::string& seed : seeds) {
      EXPECT_LE(seed.size(), target->max_bytes);
      target->run(seed);
      target->run(std::string_view(seed).substr(0, seed.size() / 2));
    }
  }
}

}  // namespace
}  // namespace treadle
