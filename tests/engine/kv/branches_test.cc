// Branches: pages that the K/V slot manager keeps for prompts that part from each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <set>

#include "base/status.h"
#include "engine/kv/kv_slot_manager.h"
#include "kernels/op_cases/random.h"

namespace treadle {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kPage = 4;

// Pages of states: two, in turn, and a row sees the page before its own.
KvPaging States(bool whole = true) {
  return {.page_size = kPage, .ring = 2, .whole = whole, .window = kPage + 1};
}

// `count` ids that begin as all do, and are their own from `branch` on.
std::vector<int32_t> Ids(int32_t branch, int32_t count, int32_t own) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), 0);
  for (size_t i = static_cast<size_t>(branch); i < ids.size(); ++i) ids[i] += own;
  return ids;
}

// A sequence as the planner runs it.
class Sequence {
 public:
  Sequence(KvSlotManager& manager, std::vector<int32_t> ids)
      : manager_(manager), ids_(std::move(ids)) {
    const auto tokens = std::ssize(ids_);
    auto pages = manager.Admit(tokens, tokens, 1, Reusable());
    if (pages) pages_ = std::move(pages->front());
  }

  bool admitted() const { return pages_ != SequencePages(); }
  const SequencePages& pages() const { return pages_; }
  const std::vector<int32_t>& ids() const { return ids_; }
  int64_t next() const { return next_; }
  KvSlotManager::Prefix First(int64_t count) const {
    return {"", std::span(ids_).first(static_cast<size_t>(count))};
  }
  KvSlotManager::Prefix Reusable() const { return First(std::ssize(ids_) - 1); }

  // Gives the copies before its first position.
  IterationPlan Begin() {
    IterationPlan plan;
    SequencePages* const tables[] = {&pages_};
    begun_ = next_ = manager_.ShareKept(Reusable(), tables);
    manager_.AddPrefixCopies(First(next_), pages_, plan);
    return plan;
  }
  void Run(int64_t end) {
    manager_.NoteWrites(pages_, next_, end);
    next_ = end;
    manager_.Keep(First(std::min(next_, std::ssize(ids_) - 1)), pages_, {begun_, next_});
  }
  std::vector<int32_t> KeepCopies(IterationPlan& plan) {
    return manager_.KeepCopies(First(next_), pages_, plan);
  }
  void End() { manager_.KeepAndRelease(First(next_), pages_, {begun_, next_}); }

 private:
  KvSlotManager& manager_;
  const std::vector<int32_t> ids_;
  SequencePages pages_;
  int64_t begun_ = 0, next_ = 0;
};

TEST(Branches, CopiesAreFoundOnceTheRingIsOverwritten) {
  for (const bool whole : {true, false}) {
    SCOPED_TRACE(whole);
    KvSlotManager manager({whole ? 30 : 0, 5}, States(whole), {30, 5});
    Sequence first(manager, Ids(14, 40, 100));
    first.Begin();
    first.Run(40);
    first.End();

    Sequence second(manager, Ids(14, 40, 200));
    EXPECT_THAT(second.Begin().page_copies[PageKind::kWindow], IsEmpty());
    EXPECT_EQ(manager.BranchOf(second.Reusable()), 12);
    second.Run(12);
    IterationPlan plan;
    const std::vector<int32_t> copies = second.KeepCopies(plan);
    ASSERT_THAT(copies, SizeIs(1));
    ASSERT_THAT(plan.page_copies[PageKind::kWindow], SizeIs(1));
    EXPECT_EQ(plan.page_copies[PageKind::kWindow][0].from, second.pages()[PageKind::kWindow][2]);
    EXPECT_EQ(plan.page_copies[PageKind::kWindow][0].to, copies[0]);
    EXPECT_EQ(manager.Capacity().free_pages[PageKind::kWindow], 3) << "copies are free pages";
    second.Run(40);
    EXPECT_EQ(manager.BranchOf(second.First(12)), 0) << "that is there";

    Sequence third(manager, Ids(14, 40, 300));
    plan = third.Begin();
    EXPECT_EQ(third.next(), 12);
    ASSERT_THAT(plan.page_copies[PageKind::kWindow], SizeIs(1));
    EXPECT_EQ(plan.page_copies[PageKind::kWindow][0].from, copies[0]);
    manager.ForgetCopies(copies);
    EXPECT_EQ(manager.Find(third.Reusable()).tokens, 0) << "the plan with the copies was lost";
  }
}

TEST(Branches, CopiesTakeWhatIsFree) {
  for (const int64_t total : {2, 3}) {
    for (const int64_t most_idle : {0, 1, 3}) {
      SCOPED_TRACE(testing::Message() << total << " pages, " << most_idle << " idle");
      KvSlotManager manager({30, total}, States(), {30, most_idle});
      for (const int32_t own : {100, 200}) {
        Sequence sequence(manager, Ids(14, 40, own));
        ASSERT_TRUE(sequence.admitted());
        sequence.Begin();
        EXPECT_EQ(manager.HasRoomForCopies(12), total > 2 && most_idle > 0);
        sequence.Run(12);
        IterationPlan plan;
        if (own == 200) {
          EXPECT_THAT(sequence.KeepCopies(plan), SizeIs(total > 2 ? 1 : 0));
        }
        sequence.Run(40);
        sequence.End();
      }
      EXPECT_EQ(manager.Capacity().free_pages, PageCounts(30, total));
    }
  }
}

// The ids up to each slot of the window pages.
class Shadow {
 public:
  explicit Shadow(int64_t pages) : slots_(static_cast<size_t>(pages * kPage)) {}

  void Copy(const IterationPlan& plan) {
    for (const PageCopy& copy : plan.page_copies[PageKind::kWindow]) {
      for (int64_t i = 0; i < kPage; ++i)
        slots_[copy.to * kPage + i] = slots_[copy.from * kPage + i];
    }
  }
  void Write(const Sequence& sequence, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) At(sequence, i) = Path(sequence, i);
  }
  // The sequence's pages have what its next row sees.
  bool Holds(const Sequence& sequence, int64_t window) {
    const int64_t next = sequence.next();
    for (int64_t i = std::max<int64_t>(0, next - window + 1); i < next; ++i) {
      if (At(sequence, i) != Path(sequence, i)) return false;
    }
    return true;
  }

 private:
  std::vector<int32_t>& At(const Sequence& sequence, int64_t position) {
    const int32_t page = sequence.pages()[PageKind::kWindow][position / kPage];
    return slots_[page * kPage + position % kPage];
  }
  static std::vector<int32_t> Path(const Sequence& sequence, int64_t position) {
    return {sequence.ids().begin(), sequence.ids().begin() + position + 1};
  }

  std::vector<std::vector<int32_t>> slots_;
};

// Sequences that begin alike, with copies wherever a page ends: each has what it sees, and pages
// are conserved.
TEST(Branches, RandomUseMatchesAShadow) {
  int64_t reused = 0, copied = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const int64_t most_rows = 1 + random.Below(9), window = 2 + random.Below(12);
    KvPaging paging = States(random.Below(2) == 0);
    if (random.Below(2) == 0) {
      paging.window = window;
      paging.ring = (window + most_rows - 1 + kPage - 1) / kPage;
    }
    const int64_t total = paging.ring * (1 + random.Below(4)) + random.Below(6);
    const PageCounts pages = {paging.whole ? 30 + random.Below(30) : 0, total};
    KvSlotManager manager(pages, paging, random.Below(3) == 0 ? PageCounts(8, total / 3) : pages);
    Shadow shadow(total);
    std::vector<std::unique_ptr<Sequence>> running;
    for (int turn = 0; turn < 1500; ++turn) {
      if (random.Below(4) == 0) {
        std::vector<int32_t> ids;  // few, so that many begin alike
        for (int64_t i = 2 + random.Below(40); i > 0; --i) {
          ids.push_back(random.Below(8) == 0 ? 1 : 0);
        }
        auto sequence = std::make_unique<Sequence>(manager, std::move(ids));
        if (sequence->admitted()) running.push_back(std::move(sequence));
      } else if (!running.empty()) {
        const auto which = static_cast<size_t>(random.Below(std::ssize(running)));
        Sequence& sequence = *running[which];
        IterationPlan plan;
        const bool begins = sequence.next() == 0;
        if (begins) {
          plan = sequence.Begin();
          reused += sequence.next();
        }
        const int64_t next = sequence.next(), left = std::ssize(sequence.ids()) - next;
        if (!begins && next % kPage == 0) {
          copied += std::ssize(sequence.KeepCopies(plan));
        }
        shadow.Copy(plan);
        ASSERT_TRUE(shadow.Holds(sequence, paging.window));
        const int64_t rows = std::min({left, most_rows, 1 + random.Below(most_rows)});
        shadow.Write(sequence, next, next + rows);
        sequence.Run(next + rows);
        if (rows == left || random.Below(20) == 0) {
          sequence.End();
          running.erase(running.begin() + static_cast<ptrdiff_t>(which));
        }
      }
      std::set<int32_t> held;
      for (const auto& sequence : running) {
        const std::vector<int32_t>& table = sequence->pages()[PageKind::kWindow];
        held.insert(table.begin(), table.end());
      }
      ASSERT_EQ(manager.Capacity().free_pages[PageKind::kWindow], total - std::ssize(held));
    }
  }
  EXPECT_GT(reused, 10000);
  EXPECT_GT(copied, 1000);
}

}  // namespace
}  // namespace treadle
