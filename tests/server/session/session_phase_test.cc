// The table of a session's phases: what it promises by itself, and that sessions follow it, row by
// row.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <future>
#include <map>
#include <set>

#include "base/status.h"
#include "tests/server/session/session_harness.h"
#include "tests/support/assert_ok.h"
#include "tests/support/in_time.h"

namespace treadle {
namespace {

using Phase = SessionPhase;
using Step = SessionStep;

// The steps to each phase that a new session can come to.
std::map<Phase, std::vector<Step>> Paths() {
  std::map<Phase, std::vector<Step>> paths = {{Phase::kUnread, {}}};
  for (size_t known = 0; known < paths.size();) {
    known = paths.size();
    for (const auto& [from, step, to] : kSessionTransitions) {
      if (!paths.contains(from) || paths.contains(to)) continue;
      paths[to] = paths[from];
      paths[to].push_back(step);
    }
  }
  return paths;
}

std::set<Phase> Next(Phase phase) {
  std::set<Phase> next;
  for (const auto& [from, step, to] : kSessionTransitions) {
    if (from == phase) next.insert(to);
  }
  return next;
}

bool Left(Phase phase) {
  return phase == Phase::kUnreadLeft || phase == Phase::kWaitingLeft ||
         phase == Phase::kStoringLeft || phase == Phase::kWritingLeft;
}

TEST(SessionPhases, EveryPhaseIsReachedAndEveryStepHasOneOutcome) {
  EXPECT_EQ(Paths().size(), static_cast<size_t>(Phase::kOver) + 1);
  std::set<std::pair<Phase, Step>> seen;
  for (const auto& [from, step, to] : kSessionTransitions) {
    EXPECT_TRUE(seen.emplace(from, step).second);
  }
}

TEST(SessionPhases, AClientMayLeaveAtAnyTimeAndDoesNotComeBack) {
  for (const auto& [phase, path] : Paths()) {
    int leaves = 0;
    for (const auto& [from, step, to] : kSessionTransitions) {
      if (from != phase) continue;
      leaves += step == Step::kLeave ? 1 : 0;
      EXPECT_EQ(step == Step::kLeave, Left(to) && !Left(from));
      EXPECT_FALSE(Left(from) && step == Step::kWrite);
      if (Left(from)) EXPECT_TRUE(Left(to) || to == Phase::kOver);
    }
    EXPECT_EQ(leaves, Left(phase) || phase == Phase::kOver ? 0 : 1);
  }
}

TEST(SessionPhases, EveryPhaseComesToTheEndAndStaysThere) {
  EXPECT_EQ(Next(Phase::kOver), std::set<Phase>{Phase::kOver});
  for (const auto& [phase, path] : Paths()) {
    std::set<Phase> reached = {phase};
    for (size_t known = 0; known < reached.size();) {
      known = reached.size();
      for (const Phase one : std::set<Phase>(reached)) reached.merge(Next(one));
    }
    EXPECT_TRUE(reached.contains(Phase::kOver));
  }
}

// Makes one session take the steps of a path.
class SessionWalk : public SessionTest {
 protected:
  void Begin(bool durable) {
    if (durable) {
      folder_ = testing::TempDir() + Str("/session-walk-", getpid());
      std::filesystem::remove_all(folder_);
      ASSERT_OK_AND_ASSIGN(auto journal, RequestJournal::Open(folder_, {}));
      store_ = *RequestStore::Open(std::move(journal), {.fingerprint = "fp_1"});
    }
    Open({.manual = true});
    read_ = {};
    disk_ = {};
    session_ = std::make_shared<FakeFrontEnd>(*environment_, /*slow=*/true);
    sessions_.push_back(session_);
    // A session that is left before its turn to be read ends by itself: it has its turn first.
    std::promise<void> begun;
    session_->Start({}, 100, [&, read = read_.get_future().share()] {
      begun.set_value();
      return read.get();
    });
    begun.get_future().wait();
  }

  void Take(Step step) {
    switch (step) {
      case Step::kSubmit:
        read_.set_value(Asked());
        EXPECT_TRUE(WaitLoad(1, 0));
        break;
      case Step::kStore:
        if (session_->phase() == Phase::kWaiting) {
          CompleteOne();
        } else {
          Complete({Phase::kStoring, Phase::kStoringLeft});
        }
        break;
      case Step::kStored:
        disk_.set_value();
        break;
      case Step::kWrite:
        if (session_->phase() != Phase::kWriting) CompleteOne();
        break;
      case Step::kWritten:
        session_->Written(true);
        break;
      case Step::kLeave:
        session_->Cancel();
        break;
      case Step::kEnd:
        if (session_->phase() == Phase::kUnread) read_.set_value(InvalidArgument("of the test"));
        if (session_->phase() == Phase::kUnreadLeft) read_.set_value(Asked());
        Complete({Phase::kOver});
    }
  }
  // Waits until the session is in one of the phases; the one it is in.
  Phase Await(const std::set<Phase>& phases) {
    ComesTrue([&] { return phases.contains(session_->phase()); });
    return session_->phase();
  }
  void Finish(const std::vector<Step>& path) {
    const auto taken = [&](Step step) { return std::ranges::count(path, step) > 0; };
    if (taken(Step::kStore) && !taken(Step::kStored)) disk_.set_value();
    if (!taken(Step::kSubmit) && !taken(Step::kEnd)) read_.set_value(InvalidArgument("at the end"));
    Complete({Phase::kOver});
    session_.reset();
    held_.reset();
    Close();
    store_.reset();
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  // Stops the store's threads from telling anything until `disk_` is set.
  void HoldDisk() {
    held_ = *store_->Reserve({"held", "", [] {}});
    held_->Accept({.kind = "test"}, [](const absl::Status&) {});
    std::promise<void> holds;
    held_->Append({.tokens = {{.token = 1}}},
                  [&, disk = disk_.get_future().share()](const absl::Status&) {
                    holds.set_value();
                    disk.wait();
                  });
    holds.get_future().wait();
  }

 private:
  GenerateRequest Asked() const {
    GenerateRequest request = Request(4);
    if (store_) request.kind = "test";
    return request;
  }
  // One token comes, and not the last: the end is told together with what came before it.
  void CompleteOne() {
    EXPECT_TRUE(ComesTrue([&] { return engine_->Complete(); }));
  }
  // Lets plans complete, and the client read where it must, until then.
  void Complete(const std::set<Phase>& phases) {
    const auto deadline = Clock::now() + kPatience;
    for (Phase phase = session_->phase(); !phases.contains(phase) && Clock::now() < deadline;
         phase = session_->phase()) {
      if (phase == Phase::kWriting || phase == Phase::kWritingLeft) session_->Written(true);
      if (!engine_->Complete()) std::this_thread::sleep_for(milliseconds(1));
    }
  }

  std::string folder_;
  std::promise<absl::StatusOr<GenerateRequest>> read_;
  std::promise<void> disk_;
  std::unique_ptr<RequestStore::Stream> held_;
  std::shared_ptr<FakeFrontEnd> session_;
};

TEST_F(SessionWalk, SessionsFollowTheTable) {
  const auto paths = Paths();
  for (const auto& [from, step, to] : kSessionTransitions) {
    SCOPED_TRACE(Str("from ", static_cast<int>(from), " by ", static_cast<int>(step)));
    std::vector<Step> path = paths.at(from);
    path.push_back(step);
    const bool durable = std::ranges::count(path, Step::kStore) > 0;
    Begin(durable);
    if (durable) HoldDisk();
    Phase phase = Phase::kUnread;
    for (const Step one : path) {
      Take(one);
      phase = std::ranges::find_if(kSessionTransitions, [&](const auto& row) {
                return row.from == phase && row.step == one;
              })->to;
      std::set<Phase> expected = {phase};
      // Without anybody's doing, what was stored is told, what came during a write is written, and
      // the loop ends what nobody waits for.
      if (one == Step::kStored || one == Step::kWritten || phase == Phase::kWaitingLeft) {
        expected.merge(Next(phase));
      }
      EXPECT_TRUE(expected.contains(Await(expected)));
    }
    EXPECT_TRUE(phase == to);
    Finish(path);
  }
}

}  // namespace
}  // namespace treadle
