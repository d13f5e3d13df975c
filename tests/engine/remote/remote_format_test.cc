// Every weight format through a pipeline of two workers: the bits of one process, from the workers'
// own files and from tensors that the master sends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tests/engine/company/company.h"
#include "tests/engine/remote/driven_requests.h"
#include "tests/engine/remote/format_checkpoints.h"
#include "tests/support/ranks/remote_cluster.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

class RemoteFormat : public testing::TestWithParam<FormatCheckpoint> {};

TEST_P(RemoteFormat, TwoStagesGiveTheBitsOfOneProcess) {
  const TestFolder folder;
  const absl::StatusOr<std::string> path = GetParam().write(folder.path());
  ASSERT_TRUE(path.ok()) << path.status();
  ClusterOptions options;
  options.model = *path;
  options.stages = 2;
  const auto opened = Checkpoint::Open(options.model);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const auto requests = RandomRequests(/*seed=*/5, /*count=*/6, (*opened)->config().vocab,
                                       /*max_prompt=*/14, /*max_new_tokens=*/6);
  const KvPaging paging =
      KvPaging::Of((*opened)->config(), options.engine.page_size, options.engine.max_batch_tokens);
  options.engine.kv_pages = PagesOf(paging, 64);
  const struct {
    ComputeMode compute;
    bool from_master;
  } ways[] = {{ComputeMode::kExact, false}, {ComputeMode::kAuto, true}};
  for (const auto& [compute, from_master] : ways) {
    SCOPED_TRACE(Str(Name(compute), from_master ? ", weights from the master" : ""));
    PlanDriver expected(DriverOptions(1, 1, paging), requests);
    auto local = MakeLocalEngine(options.model, 1, compute);
    ASSERT_TRUE(local.ok()) << local.status();
    ASSERT_EQ(EngineClient(*std::move(local)).Run(expected), absl::OkStatus());
    options.engine.compute = compute;
    options.engine.weights_from_master = from_master;
    auto cluster = StartThreadCluster(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    PlanDriver driver(DriverOptions(2, 2, paging), requests);
    ASSERT_EQ(EngineClient(std::move(cluster->engine)).Run(driver), absl::OkStatus());
    EXPECT_EQ(DifferentAnswers(expected, driver, requests), "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, RemoteFormat, testing::ValuesIn(FormatCheckpoints()),
                         [](const auto& info) { return info.param.name; });

// A new format needs a checkpoint here.
TEST(RemoteFormatTable, HasEveryFormat) {
  std::set<std::string_view> seen;
  for (const FormatCheckpoint& format : FormatCheckpoints()) {
    const TestFolder folder;
    const absl::StatusOr<std::string> path = format.write(folder.path());
    ASSERT_TRUE(path.ok()) << path.status();
    const auto opened = Checkpoint::Open(*path);
    ASSERT_TRUE(opened.ok()) << opened.status();
    for (const StoredTensor& tensor : (*opened)->tensors()) {
      if (tensor.shape.size() == 2) seen.insert(tensor.format->name);
    }
  }
  for (const WeightFormat& format : WeightFormats()) {
    EXPECT_TRUE(seen.contains(format.name)) << format.name;
  }
}

}  // namespace
}  // namespace treadle
