// Pages that the K/V slot manager keeps of sequences that are over, and who finds them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "engine/kv/kv_slot_manager.h"
#include "engine/kv/prefix_index.h"
#include "kernels/op_cases/random.h"
#include "tests/support/assert_ok.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kPage = 4;

std::vector<int32_t> Ids(int32_t first, int32_t count) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

// A sequence from its admission to its end, all of whose `ids` were run.
void Live(KvSlotManager& manager, const std::vector<int32_t>& ids, std::string_view salt = "") {
  const auto prompt = std::ssize(ids);
  const KvSlotManager::Prefix before{salt, std::span(ids).first(ids.size() - 1)};
  auto pages = manager.Admit(prompt, prompt, 1, before);
  ASSERT_TRUE(pages.has_value());
  manager.KeepAndRelease({salt, ids}, pages->front(), {0, prompt});
}

int32_t Found(const KvSlotManager& manager, const std::vector<int32_t>& ids,
              std::string_view salt = "") {
  return manager.Find({salt, ids}).tokens;
}

TEST(PrefixPages, WholePagesAreFoundByTheirIdsAndAllBefore) {
  KvSlotManager manager(8, {.page_size = kPage}, 8);
  Live(manager, Ids(0, 11));
  EXPECT_EQ(manager.Capacity().free_pages, 8) << "what nobody holds is free";
  EXPECT_EQ(manager.idle_pages(PageKind::kWhole), 2) << "the last page is not whole";
  EXPECT_EQ(Found(manager, Ids(0, 3)), 0);
  EXPECT_EQ(Found(manager, Ids(0, 4)), 4);
  EXPECT_EQ(Found(manager, Ids(0, 30)), 8);
  EXPECT_EQ(Found(manager, Ids(4, 8)), 0) << "the same ids after others";
  std::vector<int32_t> other = Ids(0, 8);
  other[6] = 0;
  EXPECT_EQ(Found(manager, other), 4);
}

TEST(PrefixPages, SaltsAreApart) {
  KvSlotManager manager(8, {.page_size = kPage}, 8);
  Live(manager, Ids(0, 8), "mine");
  EXPECT_EQ(Found(manager, Ids(0, 8), "mine"), 8);
  EXPECT_EQ(Found(manager, Ids(0, 8), "yours"), 0);
  EXPECT_EQ(Found(manager, Ids(0, 8)), 0);
  Live(manager, Ids(0, 8), "yours");
  EXPECT_EQ(manager.idle_pages(PageKind::kWhole), 4);
}

TEST(PrefixPages, WithoutACacheNothingIsKept) {
  KvSlotManager manager(8, {.page_size = kPage});
  Live(manager, Ids(0, 8));
  EXPECT_EQ(Found(manager, Ids(0, 8)), 0);
  EXPECT_EQ(manager.idle_pages(PageKind::kWhole), 0);
}

// A request that shares pages with one that runs reserves the others only.
TEST(PrefixPages, WhatIsHeldIsNotReservedAgain) {
  KvSlotManager manager(6, {.page_size = kPage}, 6);
  const std::vector<int32_t> ids = Ids(0, 13);
  const auto first = manager.Admit(12, 16, 1);
  manager.Keep({"", std::span(ids).first(12)}, first->front(), {0, 12});
  const KvSlotManager::Prefix before{"", std::span(ids).first(12)};
  EXPECT_EQ(manager.Find(before).held, 3);
  EXPECT_FALSE(manager.Admit(13, 24, 1, before).has_value()) << "three more, of two";
  const auto second = manager.Admit(13, 20, 1, before);
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(manager.Capacity().free_pages, 0);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(second->front()[PageKind::kWhole][i], first->front()[PageKind::kWhole][i]);
    EXPECT_EQ(manager.references(first->front()[PageKind::kWhole][i]), 2);
  }
  manager.Release(first->front());
  EXPECT_EQ(manager.Find(before).held, 3);
  manager.Release(second->front());
  EXPECT_EQ(manager.Find(before).held, 0);
  EXPECT_EQ(manager.Find(before).tokens, 12);
}

// Kept pages of a sequence that is over go to files with the next plan, each page once, unless
// somebody took its page before.
TEST(PrefixPages, WhatIsKeptGoesToFiles) {
  const TestFolder folder;
  ASSERT_OK_AND_ASSIGN(const auto files, PageFiles::Open({.folder = folder.path(),
                                                          .max_bytes = 1 << 20,
                                                          .model = "m",
                                                          .contents = "c",
                                                          .page_size = kPage,
                                                          .page_bytes = 8}));
  KvSlotManager manager(4, {.page_size = kPage}, 4, nullptr, files.get());
  const auto stores = [&] {
    IterationPlan plan;
    std::vector<int32_t> firsts;
    for (PageName& name : manager.AddStores(plan)) {
      firsts.push_back(name.ids[0]);
      files->Store(std::move(name), PageBytes(8));
    }
    EXPECT_THAT(plan.page_stores, SizeIs(firsts.size()));
    return firsts;
  };
  Live(manager, Ids(0, 11));
  EXPECT_THAT(stores(), ElementsAre(0, 4));
  Live(manager, Ids(0, 13));
  EXPECT_THAT(stores(), ElementsAre(8)) << "the others are there";
  Live(manager, Ids(100, 8));
  EXPECT_TRUE(manager.has_stores());
  manager.Release(*manager.Reserve(4));
  EXPECT_THAT(stores(), IsEmpty());
}

// Three sequences of two pages, and room for six: whoever needs one takes the end of the one that
// was used longest ago.
TEST(PrefixPages, LeastRecentlyUsedGoesFirstAndItsEndBeforeItsBeginning) {
  KvSlotManager manager(6, {.page_size = kPage}, 6);
  for (const int32_t first : {0, 100, 200}) Live(manager, Ids(first, 8));
  Live(manager, Ids(0, 8));  // is used again
  ASSERT_TRUE(manager.Reserve(1).has_value());
  EXPECT_EQ(Found(manager, Ids(100, 8)), 4);
  ASSERT_TRUE(manager.Reserve(2).has_value());
  EXPECT_EQ(Found(manager, Ids(100, 8)), 0);
  EXPECT_EQ(Found(manager, Ids(200, 8)), 4);
  EXPECT_EQ(Found(manager, Ids(0, 8)), 8);
}

TEST(PrefixPages, NoMoreThanAllowedAreIdle) {
  KvSlotManager manager(8, {.page_size = kPage}, 3);
  Live(manager, Ids(0, 8));
  Live(manager, Ids(100, 8));
  EXPECT_EQ(manager.idle_pages(PageKind::kWhole), 3);
  EXPECT_EQ(manager.Capacity().free_pages, 8);
  EXPECT_EQ(Found(manager, Ids(0, 8)), 4);
  EXPECT_EQ(Found(manager, Ids(100, 8)), 8);
}

TEST(PrefixPages, ForgottenPagesAreFoundNoMore) {
  KvSlotManager manager(8, {.page_size = kPage}, 8);
  const std::vector<int32_t> ids = Ids(0, 13);
  const auto pages = manager.Admit(13, 16, 1);
  manager.Keep({"", std::span(ids).first(12)}, pages->front(), {0, 12});
  manager.Forget(pages->front(), 6);
  EXPECT_EQ(Found(manager, ids), 4);
  manager.Release(pages->front());
  EXPECT_EQ(manager.idle_pages(PageKind::kWhole), 1);
  manager.ForgetAll();
  EXPECT_EQ(Found(manager, ids), 0);
  EXPECT_EQ(manager.Capacity().free_pages, 8);
}

// A window of 6 in rings of 3 pages: of 16 positions the last three pages are in the ring, and the
// row after the last page sees the last two.
TEST(PrefixPages, AWindowIsFoundWhereAllThatIsSeenIsThere) {
  const KvPaging paging{.page_size = kPage, .ring = 3, .whole = true, .window = 6};
  KvSlotManager manager({12, 9}, paging, {12, 9});
  const std::vector<int32_t> ids = Ids(0, 17);
  const auto pages = manager.Admit(16, 20, 1);
  const std::vector<int32_t>& ring = pages->front()[PageKind::kWindow];
  manager.Keep({"", std::span(ids).first(8)}, pages->front(), {0, 8});
  EXPECT_EQ(Found(manager, ids), 8) << "while the sequence runs";
  manager.NoteWrites(pages->front(), 8, 16);  // page 3 over page 0
  manager.KeepAndRelease({"", std::span(ids).first(16)}, pages->front(), {0, 16});
  EXPECT_EQ(Found(manager, ids), 16);
  EXPECT_EQ(Found(manager, Ids(0, 13)), 12);
  EXPECT_EQ(Found(manager, Ids(0, 9)), 0) << "page 0 is gone, which its row would see";

  const auto next = manager.Admit(17, 20, 1, {"", std::span(ids).first(16)});
  SequencePages table = next->front();
  SequencePages* const tables[] = {&table};
  EXPECT_EQ(manager.ShareKept({"", std::span(ids).first(16)}, tables), 16);
  EXPECT_EQ(table[PageKind::kWhole][3], pages->front()[PageKind::kWhole][3]);
  IterationPlan plan;
  manager.AddPrefixCopies({"", std::span(ids).first(16)}, table, plan);
  ASSERT_THAT(plan.page_copies[PageKind::kWindow], SizeIs(2));
  EXPECT_EQ(plan.page_copies[PageKind::kWindow][0].from, ring[2]);
  EXPECT_EQ(plan.page_copies[PageKind::kWindow][1].from, ring[3]);
  EXPECT_EQ(plan.page_copies[PageKind::kWindow][1].to, table[PageKind::kWindow][3]);
}

// Against a shadow: what every page holds. Whatever is found is what its path says, pages are
// conserved, and nothing that is held is ever given out.
TEST(PrefixPages, RandomUseMatchesAShadow) {
  struct Running {
    std::vector<int32_t> ids;
    SequencePages pages;
  };
  for (uint64_t seed = 0; seed < 30; ++seed) {
    Random random(seed);
    const int64_t total = 12 + random.Below(30);
    KvSlotManager manager(total, {.page_size = kPage}, random.Below(2) == 0 ? total : total / 3);
    std::map<int32_t, std::vector<int32_t>> holds;  // ids up to its last one, by page
    std::map<int32_t, int> references;
    std::vector<Running> running;
    for (int turn = 0; turn < 1500; ++turn) {
      if (random.Below(2) == 0) {
        std::vector<int32_t> ids;  // few, so that many begin alike
        for (int64_t i = 2 + random.Below(24); i > 0; --i) {
          ids.push_back(static_cast<int32_t>(random.Below(2)));
        }
        const KvSlotManager::Prefix before{"", std::span(ids).first(ids.size() - 1)};
        const auto found = manager.Find(before);
        for (int32_t i = 0; i < found.tokens; ++i) ASSERT_LT(i, std::ssize(ids) - 1);
        auto pages = manager.Admit(std::ssize(ids), std::ssize(ids), 1, before);
        if (!pages) continue;
        const std::vector<int32_t>& table = pages->front()[PageKind::kWhole];
        for (int64_t i = 0; i < std::ssize(table); ++i) {
          const auto end = std::min<int64_t>((i + 1) * kPage, std::ssize(ids));
          const std::vector<int32_t> path(ids.begin(), ids.begin() + end);
          if (i * kPage < found.tokens) {
            ASSERT_EQ(holds.at(table[i]), path) << "seed " << seed;
          } else {
            ASSERT_EQ(references[table[i]], 0) << "seed " << seed;
            holds[table[i]] = path;
          }
          ++references[table[i]];
        }
        running.push_back({std::move(ids), std::move(pages->front())});
      } else if (!running.empty()) {
        const auto which = static_cast<size_t>(random.Below(std::ssize(running)));
        const auto known = static_cast<size_t>(random.Below(std::ssize(running[which].ids) + 1));
        const auto& [ids, pages] = running[which];
        for (const int32_t page : pages[PageKind::kWhole]) --references[page];
        manager.KeepAndRelease({"", std::span(ids).first(known)}, pages, {0, std::ssize(ids)});
        running.erase(running.begin() + static_cast<ptrdiff_t>(which));
      }
      int64_t held = 0;
      for (const auto& [page, count] : references) held += count > 0;
      ASSERT_EQ(manager.Capacity().free_pages, total - held) << "seed " << seed;
    }
  }
}

TEST(PrefixIndex, ForgettingAPageForgetsAllBehindIt) {
  std::vector<int32_t> forgotten;
  PrefixIndex index(2, [&](PageKind, int32_t page) { forgotten.push_back(page); });
  const auto name = [&](std::vector<int32_t> ids, int32_t page) {
    const auto path = index.Add("", ids);
    index.SetPage(path.back(), PageKind::kWhole, page);
    return path;
  };
  const auto root = name({1, 1}, 10);
  name({1, 1, 2, 2}, 11);
  name({1, 1, 2, 2, 3, 3}, 12);
  name({1, 1, 4, 4}, 13);
  EXPECT_EQ(index.nodes(), 4);
  const auto branch = index.Find("", std::vector<int32_t>{1, 1, 2, 2, 9, 9});
  ASSERT_THAT(branch, SizeIs(2));
  EXPECT_EQ(index.IndexOf(branch[1]), 1);
  index.Forget(branch[1], PageKind::kWhole);
  EXPECT_THAT(forgotten, ElementsAre(11, 12));
  EXPECT_EQ(index.nodes(), 2);
  index.Forget(root[0], PageKind::kWhole);
  EXPECT_EQ(index.nodes(), 0);
  EXPECT_THAT(index.Find("", std::vector<int32_t>{1, 1}), IsEmpty());
}

}  // namespace
}  // namespace treadle
