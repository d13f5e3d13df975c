#include "engine/remote/worker/worker_epoch.h"

#include <gtest/gtest.h>

#include "engine/remote/control.pb.h"

namespace treadle {
namespace {

// A master that is gone can no longer be told of a failure, so nothing may begin in its name: its
// last message can be on its way while its stream ends.
TEST(WorkerEpoch, BeginsNothingForAMasterThatIsGone) {
  auto tasks = std::make_unique<TaskThread>();
  WorkerEpoch epoch({}, {}, *tasks);
  epoch.SetPlace({});
  control::BeginEpoch begin;
  begin.set_epoch(1);
  epoch.Begin(begin);
  tasks.reset();  // runs what was posted; without ranks, an epoch that had begun would fail
  EXPECT_FALSE(epoch.Stands());
}

}  // namespace
}  // namespace treadle
