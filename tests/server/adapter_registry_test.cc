// Names of adapters, and which of them are in memory.
#include "server/adapters/adapter_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <future>
#include <set>
#include <tuple>

#include "base/status.h"
#include "models/checkpoints/checkpoint.h"
#include "server/serving_stack.h"
#include "tests/support/assert_ok.h"
#include "tests/support/fake_engine.h"
#include "tests/support/faults/changing_files.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Clock = AdapterRegistry::Clock;

const std::string kAdapters = TREADLE_TESTDATA "/adapters/";

ModelConfig BaseConfig() {
  const auto checkpoint = Checkpoint::Open(TREADLE_TESTDATA "/models/llama-grouped").value();
  return checkpoint->config();
}

// Three adapters of one base in a folder of their own.
class AdapterRegistryTest : public ::testing::Test {
 protected:
  AdapterRegistryTest() {
    for (const char* const name : {"llama", "llama-second", "llama-bf16"}) {
      std::filesystem::copy(kAdapters + name, folder_ / name);
    }
  }
  ~AdapterRegistryTest() override {
    if (registry_) registry_->Stop();
  }
  void Open(AdapterRegistry::Options options) {
    options.taken = {"base"};
    registry_ = std::make_shared<AdapterRegistry>(BaseConfig(), std::move(options));
    ASSERT_EQ(registry_->Start(engine_), absl::OkStatus());
  }
  std::future<absl::StatusOr<AdapterHold>> Ask(
      const std::string& name, Clock::time_point deadline = Clock::time_point::max()) {
    auto promise = std::make_shared<std::promise<absl::StatusOr<AdapterHold>>>();
    if (auto hold = registry_->TryHold(name)) {
      promise->set_value(*std::move(hold));
    } else {
      registry_->Hold(name, deadline, [promise](absl::StatusOr<AdapterHold> given) {
        promise->set_value(std::move(given));
      });
    }
    return promise->get_future();
  }
  AdapterHold Hold(const std::string& name) {
    auto given = Ask(name).get();
    EXPECT_TRUE(given.ok()) << given.status();
    return given.ok() ? *std::move(given) : AdapterHold();
  }
  static bool Waits(std::future<absl::StatusOr<AdapterHold>>& asked) {
    return asked.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout;
  }
  std::set<uint64_t> loaded() { return engine_.adapters(); }

  TestFolder folder_;
  FakeEngine engine_{{}};
  std::shared_ptr<AdapterRegistry> registry_;
};

TEST_F(AdapterRegistryTest, LoadsWhatIsAskedAndKeepsIt) {
  Open({});
  ASSERT_EQ(registry_->Add("mine", folder_ / "llama"), absl::OkStatus());
  EXPECT_TRUE(loaded().empty());
  const AdapterHold first = Hold("mine"), second = Hold("mine");
  EXPECT_EQ(first.id, second.id);
  EXPECT_EQ(first.hash.size(), 64u);
  EXPECT_THAT(loaded(), ElementsAre(first.id));
  EXPECT_EQ(registry_->counts().loads, 1);
  const auto list = registry_->List();
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0].name, "mine");
  EXPECT_EQ(list[0].holders, 2);
  EXPECT_EQ(list[0].requests, 2);
}

TEST_F(AdapterRegistryTest, TheOneAskedLeastRecentlyMakesRoom) {
  Open({.folder = folder_.path(), .max_loaded = 2});
  const uint64_t a = Hold("llama").id, b = Hold("llama-second").id;
  EXPECT_EQ(Hold("llama").id, a);
  const uint64_t c = Hold("llama-bf16").id;
  EXPECT_EQ(loaded(), (std::set<uint64_t>{a, c}));
  EXPECT_EQ(Hold("llama-second").id, b);
  EXPECT_EQ(loaded(), (std::set<uint64_t>{b, c}));
  EXPECT_EQ(registry_->counts().evictions, 2);
}

TEST_F(AdapterRegistryTest, BytesAreBounded) {
  ASSERT_OK_AND_ASSIGN(const auto file, AdapterFile::Open(folder_ / "llama", BaseConfig()));
  Open({.folder = folder_.path(), .memory = static_cast<int64_t>(file->memory(DType::kF32))});
  EXPECT_THAT(std::string(Ask("llama-second").get().status().message()), HasSubstr("at most"));
  Hold("llama");
  Hold("llama-bf16");
  EXPECT_EQ(loaded().size(), 1u);
}

// One in use stays; who wants its room gets it next, though others go on asking for it.
TEST_F(AdapterRegistryTest, WhoWaitsForRoomGetsIt) {
  Open({.folder = folder_.path(), .max_loaded = 1});
  auto held = std::make_optional(Hold("llama"));
  auto waits = Ask("llama-second");
  EXPECT_TRUE(Waits(waits));
  auto behind = Ask("llama");  // though it is loaded
  EXPECT_TRUE(Waits(behind));
  EXPECT_THAT(loaded(), ElementsAre(held->id));
  const uint64_t first = held->id;
  held.reset();
  auto given = std::make_optional(waits.get());
  ASSERT_TRUE((*given).ok()) << (*given).status();
  EXPECT_THAT(loaded(), ElementsAre((**given).id));
  EXPECT_TRUE(Waits(behind));
  given.reset();
  EXPECT_EQ(behind.get()->id, first);
}

TEST_F(AdapterRegistryTest, WaitsEnd) {
  Open({.folder = folder_.path(), .max_loaded = 1, .max_waiting = 1});
  const AdapterHold held = Hold("llama");
  auto late = Ask("llama-second", Clock::now() + std::chrono::milliseconds(100));
  EXPECT_TRUE(absl::IsResourceExhausted(Ask("llama-bf16").get().status()));
  EXPECT_TRUE(absl::IsDeadlineExceeded(late.get().status()));
  auto left = Ask("llama-second");
  EXPECT_TRUE(Waits(left));
  registry_->Stop();
  EXPECT_TRUE(absl::IsUnavailable(left.get().status()));
}

// Whoever stops a server ends these waits, before what they would go on with is gone.
TEST(AdaptersOfAStack, WaitsEndWithIt) {
  ServedModel model;
  model.name = "base";
  model.kv_pages = 64;
  model.paging = FakeEngineOptions().paging();
  model.adapters = std::make_shared<AdapterRegistry>(
      BaseConfig(), AdapterRegistry::Options{.folder = kAdapters.substr(0, kAdapters.size() - 1),
                                             .max_loaded = 1});
  const auto adapters = model.adapters;
  ASSERT_OK_AND_ASSIGN(
      auto stack,
      ServingStack::Create(std::move(model), std::make_unique<FakeEngine>(FakeEngineOptions()),
                           {.max_batch_size = 4, .max_batch_tokens = 32}));
  ASSERT_EQ(stack->Start(), absl::OkStatus());
  std::promise<absl::StatusOr<AdapterHold>> first, second;
  adapters->Hold("llama", Clock::time_point::max(),
                 [&](absl::StatusOr<AdapterHold> given) { first.set_value(std::move(given)); });
  const auto held = first.get_future().get();
  ASSERT_TRUE(held.ok()) << held.status();
  adapters->Hold("llama-second", Clock::time_point::max(),
                 [&](absl::StatusOr<AdapterHold> given) { second.set_value(std::move(given)); });
  auto waits = second.get_future();
  stack->Stop(absl::UnavailableError("over"));
  ASSERT_EQ(waits.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  EXPECT_TRUE(absl::IsUnavailable(waits.get().status()));
}

// Requests that run keep the old contents.
TEST_F(AdapterRegistryTest, ANameMayGetOtherContents) {
  Open({});
  ASSERT_EQ(registry_->Add("mine", folder_ / "llama"), absl::OkStatus());
  const AdapterHold old = Hold("mine");
  ASSERT_EQ(registry_->Add("mine", folder_ / "llama-second"), absl::OkStatus());
  const AdapterHold other = Hold("mine");
  EXPECT_NE(other.id, old.id);
  EXPECT_EQ(loaded(), (std::set<uint64_t>{old.id, other.id}));
  EXPECT_EQ(registry_->Remove("mine"), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(registry_->Remove("mine")));
  EXPECT_TRUE(absl::IsNotFound(Ask("mine").get().status()));
}

// A session that is refused goes with its callback, and lets go of its adapter then.
TEST_F(AdapterRegistryTest, ACallbackMayHoldTheLastOfAnAdapter) {
  Open({.folder = folder_.path(), .max_loaded = 1});
  for (int turn = 0; turn < 4; ++turn) {
    for (const char* const name : {"llama", "llama-second"}) {
      auto held = std::make_shared<std::optional<AdapterHold>>();
      std::promise<void> called;
      registry_->Hold(name, Clock::time_point::max(),
                      [held = std::move(held), &called](absl::StatusOr<AdapterHold> given) {
                        EXPECT_TRUE(given.ok()) << given.status();
                        if (given.ok()) *held = *std::move(given);
                        called.set_value();
                      });
      called.get_future().wait();
    }
  }
  EXPECT_EQ(registry_->counts().evictions, 7);
}

// Whatever was done to the files of an adapter that had to make room, it comes back as what lies
// there now, under that one's hash.
TEST_F(AdapterRegistryTest, OneThatWasEvictedIsWhatLiesThereWhenItComesBack) {
  Open({.folder = folder_.path(), .max_loaded = 1});
  const std::string weights = folder_ / "llama/adapter_model.safetensors";
  const std::string config = folder_ / "llama/adapter_config.json", text = ReadWhole(config);
  const std::string bytes = ReadWhole(weights);
  std::string other = bytes, alpha = text;
  other.back() = static_cast<char>(other.back() ^ 1);
  alpha.replace(alpha.find("\"lora_alpha\": 6"), 15, "\"lora_alpha\": 7");
  const auto hash_here = [&] {
    return AdapterFile::Open(folder_ / "llama", BaseConfig()).value()->hash();
  };
  std::set<std::string> hashes = {Hold("llama").hash};
  for (const FileEvent event : kFileEvents) {
    for (const auto& [file, before, after] :
         {std::tuple(weights, bytes, other), std::tuple(config, text, alpha)}) {
      Hold("llama-second");
      ChangeFile(file, event, after);
      const std::string changed = Hold("llama").hash;
      EXPECT_EQ(changed, hash_here());
      hashes.insert(changed);
      Hold("llama-second");
      ChangeFile(file, event, before);
      EXPECT_EQ(Hold("llama").hash, hash_here());
    }
  }
  EXPECT_EQ(hashes.size(), 3u);
}

TEST_F(AdapterRegistryTest, BadNamesAndFilesAreRefused) {
  Open({.folder = folder_.path()});
  EXPECT_TRUE(absl::IsAlreadyExists(registry_->Add("base", folder_ / "llama")));
  EXPECT_TRUE(absl::IsInvalidArgument(registry_->Add("a b", folder_ / "llama")));
  EXPECT_TRUE(absl::IsNotFound(registry_->Add("mine", folder_ / "none")));
  EXPECT_FALSE(registry_->Has("../adapters/llama"));
  EXPECT_FALSE(registry_->Has("none"));
  EXPECT_TRUE(registry_->Has("llama-bf16"));
  EXPECT_EQ(registry_->List().size(), 3u);
  folder_.Write("llama/adapter_config.json", "{}");
  EXPECT_THAT(std::string(Ask("llama").get().status().message()), HasSubstr("peft_type"));
  engine_.RefuseAdapters(ResourceExhausted("no memory"));
  EXPECT_TRUE(absl::IsResourceExhausted(Ask("llama-second").get().status()));
}

}  // namespace
}  // namespace treadle
