#include "engine/kv/kv_slot_manager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace treadle {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(KvSlotManager, PagesForRoundsUp) {
  const KvPaging paging{.page_size = 16};
  EXPECT_EQ(paging.PagesFor(0), 0);
  EXPECT_EQ(paging.PagesFor(1), 1);
  EXPECT_EQ(paging.PagesFor(16), 1);
  EXPECT_EQ(paging.PagesFor(17), 2);
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

// A ring has a slot for each position that the rows of a step write or look back at, and no page
// more than that takes.
TEST(KvPaging, ARingHoldsAWindowAndAStep) {
  ModelConfig config;
  config.layers = 2;
  config.global_every = 2;
  for (const int64_t page : {4, 16}) {
    for (config.window = 1; config.window < 40; ++config.window) {
      for (int64_t rows = 1; rows < 40; ++rows) {
        const int64_t ring = KvPaging::Of(config, page, rows).ring;
        const int64_t first_seen = 1000 - config.window + 1, last_written = 1000 + rows - 1;
        const int64_t positions = last_written - first_seen + 1;
        EXPECT_GE(ring * page, positions) << config.window << ", " << rows;
        EXPECT_LT((ring - 1) * page, positions) << config.window << ", " << rows;
      }
    }
  }
}

// Steps of 5 rows, a window of 6: 10 positions together, in pages of 4.
TEST(KvSlotManager, WindowPagesAreARing) {
  ModelConfig config;
  config.layers = 2;
  config.window = 6;
  config.global_every = 2;
  const KvPaging both = KvPaging::Of(config, 4, 5);
  EXPECT_EQ(both.ring, 3);
  config.global_every = 0;
  EXPECT_FALSE(KvPaging::Of(config, 4, 5).whole);
  config.window = 0;
  EXPECT_EQ(KvPaging::Of(config, 4, 5).ring, 0);

  KvSlotManager manager({20, 9}, both);
  const auto admitted = manager.Admit(3, 26, 1);
  ASSERT_TRUE(admitted.has_value());
  EXPECT_THAT(admitted->front()[PageKind::kWhole], ElementsAre(0, 1, 2, 3, 4, 5, 6));
  EXPECT_THAT(admitted->front()[PageKind::kWindow], ElementsAre(2, 0, 1, 2, 0, 1, 2));
  EXPECT_EQ(manager.Capacity().free_pages, PageCounts(13, 6));
  EXPECT_FALSE(manager.Admit(3, 26, 2).has_value());  // 14 whole pages
  EXPECT_EQ(manager.Capacity().free_pages, PageCounts(13, 6));
  manager.Release(admitted->front());
  EXPECT_EQ(manager.Capacity().free_pages, PageCounts(20, 9));
}

// Candidates share what no one overwrites, and copy what they still see.
TEST(KvSlotManager, CandidatesShareWhatTheRingKeeps) {
  const KvPaging paging{.page_size = 4, .ring = 4, .whole = false, .window = 15};
  KvSlotManager manager({0, 12}, paging);
  const auto copies = [&](int64_t prompt, int64_t tokens) {
    auto pages = *manager.Admit(prompt, tokens, 2);
    IterationPlan plan;
    manager.AddCopies(pages[0], pages[1], prompt, plan);
    EXPECT_TRUE(plan.page_copies[PageKind::kWhole].empty());
    std::vector<std::pair<int32_t, int32_t>> found;
    for (const PageCopy& copy : plan.page_copies[PageKind::kWindow])
      found.push_back({copy.from, copy.to});
    manager.Release(pages[0]);
    manager.Release(pages[1]);
    EXPECT_EQ(manager.Capacity().free_pages, PageCounts(0, 12));
    return found;
  };
  // Within the ring: as pages that are kept.
  EXPECT_EQ(paging.Needed(11, 14, 2), PageCounts(0, 2 + 2 * 2));
  EXPECT_THAT(copies(11, 14), ElementsAre(std::pair(2, 4)));
  EXPECT_THAT(copies(9, 14), IsEmpty());
  // Pages 0 to 4, of which 4 overwrites 0: that and the partly filled 2 are copied, 1 is shared.
  EXPECT_EQ(paging.Needed(11, 20, 2), PageCounts(0, 1 + 2 * 3));
  EXPECT_THAT(copies(11, 20), ElementsAre(std::pair(3, 6), std::pair(1, 4)));
  // Pages 0 to 8: all of the prompt's will be overwritten.
  EXPECT_EQ(paging.Needed(11, 36, 2), PageCounts(0, 2 * 4));
  EXPECT_EQ(copies(11, 36).size(), 3u);
  // A page that lay where the last one does may hold what is seen.
  EXPECT_EQ(copies(9, 36).size(), 2u);
  EXPECT_EQ(copies(17, 36).size(), 4u);
}

TEST(KvSlotManagerDeathTest, MisuseIsABug) {
  KvSlotManager manager(4, 16);
  const auto pages = manager.Reserve(1);
  const std::vector<int32_t> not_held = {3};
  const std::vector<int32_t> no_page = {4};
  EXPECT_DEATH(manager.Release(not_held), "references");
  EXPECT_DEATH(manager.Share(not_held), "references");
  EXPECT_DEATH(manager.Release(no_page), "references");
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
