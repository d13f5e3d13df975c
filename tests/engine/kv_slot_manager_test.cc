#include "engine/kv_slot_manager.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace treadle {
namespace {

TEST(KvSlotManager, PagesForRoundsUp) {
  const KvSlotManager manager(8, 16);
  EXPECT_EQ(manager.PagesFor(0), 0);
  EXPECT_EQ(manager.PagesFor(1), 1);
  EXPECT_EQ(manager.PagesFor(16), 1);
  EXPECT_EQ(manager.PagesFor(17), 2);
}

TEST(KvSlotManager, ReserveIsAllOrNothing) {
  KvSlotManager manager(4, 16);
  const auto three = manager.Reserve(3);
  ASSERT_TRUE(three.has_value());
  EXPECT_FALSE(manager.Reserve(2).has_value());
  EXPECT_EQ(manager.Capacity().free_pages, 1);
  EXPECT_TRUE(manager.Reserve(1).has_value());
  EXPECT_FALSE(manager.Reserve(1).has_value());
  const auto nothing = manager.Reserve(0);
  ASSERT_TRUE(nothing.has_value());
  EXPECT_TRUE(nothing->empty());
}

TEST(KvSlotManager, TheSamePagesAreUsedAgain) {
  KvSlotManager manager(1000, 16);
  const auto first = manager.Reserve(5);
  EXPECT_EQ(*first, (std::vector<int32_t>{0, 1, 2, 3, 4}));
  manager.Release(*first);
  EXPECT_EQ(*manager.Reserve(5), *first);
}

TEST(KvSlotManager, ASharedPageIsFreeAfterItsLastRelease) {
  KvSlotManager manager(4, 16);
  const auto pages = manager.Reserve(2);
  manager.Share(*pages);
  manager.Release(*pages);
  EXPECT_EQ(manager.Capacity().free_pages, 2);
  manager.Release(*pages);
  EXPECT_EQ(manager.Capacity().free_pages, 4);
}

TEST(KvSlotManagerDeathTest, MisuseIsABug) {
  KvSlotManager manager(4, 16);
  const auto pages = manager.Reserve(1);
  const std::vector<int32_t> not_held = {3};
  const std::vector<int32_t> no_page = {4};
  EXPECT_DEATH(manager.Release(not_held), "references_");
  EXPECT_DEATH(manager.Share(not_held), "references_");
  EXPECT_DEATH(manager.Release(no_page), "references_");
}

// Against a shadow model: a multiset of holdings.
TEST(KvSlotManager, RandomUseMatchesAShadowAndConservesPages) {
  constexpr int64_t kPages = 37;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    KvSlotManager manager(kPages, 16);
    std::vector<std::vector<int32_t>> holdings;
    std::vector<int32_t> references(kPages, 0);
    for (int turn = 0; turn < 2000; ++turn) {
      const int64_t free = std::count(references.begin(), references.end(), 0);
      ASSERT_EQ(manager.Capacity().free_pages, free);
      ASSERT_EQ(manager.Capacity().total_pages, kPages);
      const uint32_t action = random() % 100;
      if (action < 45) {
        const int64_t count = random() % 12;
        const auto pages = manager.Reserve(count);
        ASSERT_EQ(pages.has_value(), count <= free);
        if (!pages) continue;
        ASSERT_EQ(std::set<int32_t>(pages->begin(), pages->end()).size(), pages->size());
        for (const int32_t page : *pages) ASSERT_EQ(references.at(page)++, 0);
        holdings.push_back(*pages);
      } else if (action < 99 && !holdings.empty()) {
        const size_t chosen = random() % holdings.size();
        if (action < 65) {  // share a prefix of it
          const size_t count = random() % (holdings[chosen].size() + 1);
          const std::vector<int32_t> prefix(holdings[chosen].begin(),
                                            holdings[chosen].begin() + count);
          manager.Share(prefix);
          for (const int32_t page : prefix) ++references[page];
          holdings.push_back(prefix);
        } else {
          manager.Release(holdings[chosen]);
          for (const int32_t page : holdings[chosen]) --references[page];
          holdings.erase(holdings.begin() + chosen);
        }
      } else if (action == 99) {
        manager.Reset();
        holdings.clear();
        references.assign(kPages, 0);
      }
    }
  }
}

}  // namespace
}  // namespace treadle
