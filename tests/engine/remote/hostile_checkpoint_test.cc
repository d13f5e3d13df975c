// Words of a master about a checkpoint that it sends: sizes that contradict each other, or no
// machine's, are errors before anything is written or read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <set>
#include <span>
#include <thread>

#include "base/sha256.h"
#include "base/status.h"
#include "engine/remote/checkpoint_messages.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/received_checkpoint.h"
#include "models/architectures/config_fields.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// A llama of one layer, without tensors.
ModelConfig OneLayer() {
  ModelConfig config;
  config.architecture = "llama";
  config.layers = 1;
  config.hidden = 64;
  config.heads = config.kv_heads = 4;
  config.head_dim = config.rope_dim = 16;
  config.ffn_hidden = 128;
  config.vocab = config.context = 256;
  return config;
}

control::CheckpointDirectory Directory(const ModelConfig& config = OneLayer()) {
  control::CheckpointDirectory directory;
  directory.set_path("master.gguf");
  EncodeConfig(config, *directory.mutable_config());
  return directory;
}

void Add(control::CheckpointDirectory& directory, const std::string& name,
         const std::string& format, const std::vector<int64_t>& shape, uint64_t bytes) {
  control::TensorEntry& entry = *directory.add_tensors();
  entry.set_name(name);
  entry.set_format(format);
  entry.mutable_shape()->Add(shape.begin(), shape.end());
  entry.set_bytes(bytes);
}

absl::Status Opened(const control::CheckpointDirectory& directory) {
  return ReceivedCheckpoint::Create(directory, std::chrono::seconds(1), [](const auto&) {})
      .status();
}

TEST(HostileCheckpoint, AnHonestDirectoryOpens) {
  control::CheckpointDirectory directory = Directory();
  Add(directory, "a", "f32", {2, 32}, 256);
  EXPECT_EQ(Opened(directory), absl::OkStatus());
}

// Answer of Opened on a llama that was changed.
std::string Refusal(const std::function<void(ModelConfig&)>& change) {
  ModelConfig config = OneLayer();
  change(config);
  return std::string(Opened(Directory(config)).message());
}

TEST(HostileCheckpoint, LayersThatCannotBeLocalAreRefused) {
  EXPECT_THAT(Refusal([](ModelConfig& c) { c.window = -1; }),
              HasSubstr("sliding window is -1, expected 0"));
  EXPECT_THAT(Refusal([](ModelConfig& c) { c.global_every = -1; }),
              HasSubstr("layers per global one is -1, expected 0"));
  EXPECT_THAT(Refusal([](ModelConfig& c) { c.global_layers = -1; }),
              HasSubstr("global layers before others is -1"));
}

// A table of no experts, or more than there are.
TEST(HostileCheckpoint, ExpertsThatNoLayerHasAreRefused) {
  const auto refusal = [](const char* architecture, int64_t experts, int64_t each) {
    return Refusal([=](ModelConfig& c) {
      c.architecture = architecture;
      c.experts = experts;
      c.experts_per_token = each;
    });
  };
  EXPECT_THAT(refusal("llama", 4, 0), HasSubstr("experts is 4, expected none of llama"));
  EXPECT_THAT(refusal("mixtral", 4, 5), HasSubstr("experts per token is 5, expected 1 to 4"));
  EXPECT_THAT(refusal("mixtral", 0, 5), HasSubstr("experts is 0, expected 1 to 4096"));
}

TEST(HostileCheckpoint, LatentsThatNoLayerHasAreRefused) {
  EXPECT_THAT(Refusal([](ModelConfig& c) { c.latent_dim = 7; }),
              HasSubstr("4 K/V heads of 16 and latents of 7, not those of llama"));
  EXPECT_THAT(Refusal([](ModelConfig& c) { c.expert_groups = c.used_expert_groups = 2; }),
              HasSubstr("2 of 2 groups of 0 experts for 0 per token"));
}

TEST(HostileCheckpoint, YarnThatCannotBeIsRefused) {
  const auto refusal = [](const std::function<void(Yarn&)>& change) {
    return Refusal([&](ModelConfig& c) {
      c.yarn = {.factor = 4, .original_context = 64};
      change(*c.yarn);
    });
  };
  EXPECT_EQ(refusal([](Yarn&) {}), "");
  EXPECT_THAT(refusal([](Yarn& y) { y.attention_factor = NAN; }),
              HasSubstr("attention_factor is nan, expected"));
  EXPECT_THAT(refusal([](Yarn& y) { y.original_context = 0; }),
              HasSubstr("original context is 0, expected"));
  EXPECT_THAT(refusal([](Yarn& y) { y.factor = 0.5; }), HasSubstr("factor is 0.5, expected 1 to"));
  EXPECT_THAT(refusal([](Yarn& y) { y.beta_slow = 32; }),
              HasSubstr("beta_fast is 32, expected more than beta_slow, 32"));
}

// Every member of a configuration arrives, whatever it is.
TEST(HostileCheckpoint, ConfigurationsArriveAsTheyWere) {
  std::mt19937_64 random(32);
  std::set<std::string> names;
  for (int i = 0; i < 100; ++i) {
    ModelConfig config;
    if (random() % 2 == 0) config.rope_scaling.emplace();
    if (random() % 2 == 0) config.long_rope.emplace();
    if (random() % 2 == 0) config.yarn.emplace();
    VisitFields(config, [&]<typename Value>(const std::string& name, Value& value) {
      if constexpr (std::is_same_v<Value, std::string>) {
        value = Str(random());
      } else if constexpr (std::is_arithmetic_v<Value>) {
        value = static_cast<Value>(std::is_same_v<Value, bool> ? random() % 2 : random());
      } else {
        for (uint64_t count = random() % 5; count > 0; --count) value.push_back(random() * 1e-9);
      }
      names.insert(name);
    });
    control::ModelConfiguration sent, parsed;
    EncodeConfig(config, sent);
    ASSERT_TRUE(parsed.ParseFromString(sent.SerializeAsString()));
    ModelConfig arrived;
    ASSERT_EQ(DecodeConfig(parsed, arrived), absl::OkStatus());
    ASSERT_EQ(arrived, config);
  }
  EXPECT_EQ(names.size(), 65u + 4 + 4 + 8);
}

TEST(HostileCheckpoint, ConfigurationsThatAreNotOursAreRefused) {
  control::ModelConfiguration good;
  ModelConfig config = OneLayer();
  config.yarn.emplace();
  EncodeConfig(config, good);
  const auto refusal = [&](const control::ModelConfiguration& bad) {
    const std::string message(DecodeConfig(bad, config).message());
    EXPECT_THAT(message, StartsWith("the master's model configuration "));
    return message.substr(33);
  };
  for (int i = 0; i < good.fields_size(); ++i) {
    const std::string& name = good.fields(i).name();
    control::ModelConfiguration bad = good;
    bad.mutable_fields()->DeleteSubrange(i, 1);
    EXPECT_EQ(refusal(bad), "lacks " + name);
    bad.add_fields()->set_name(name);
    EXPECT_EQ(refusal(bad), Str("has ", name, " of another type"));
    bad.add_fields()->set_name(name);
    EXPECT_EQ(refusal(bad), Str("has '", name, "' twice"));
  }
  good.add_fields()->set_name("width");
  EXPECT_EQ(refusal(good), "has 'width', which this worker does not know");
}

// Tensors that lie in the file in another order than they are sent in.
TEST(HostileCheckpoint, ArrangedTensorsAreSentAsTheyAreRead) {
  const auto checkpoint = Checkpoint::Open(TREADLE_TESTDATA "/models/gptoss");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  CheckpointSender sender(**checkpoint, /*ranks=*/1);
  int arranged = 0;
  for (size_t i = 0; i < (*checkpoint)->tensors().size(); ++i) {
    const StoredTensor& tensor = (*checkpoint)->tensors()[i];
    if (!tensor.arranged) continue;
    control::TensorRequest request;
    request.set_tensor(static_cast<uint32_t>(i));
    control::TensorChunk chunk;
    sender.Answer(request, chunk);
    EXPECT_EQ(chunk.problem(), "");
    const std::vector<std::byte> bytes = tensor.arranged();
    EXPECT_EQ(bytes.size(), tensor.bytes);
    EXPECT_TRUE(std::ranges::equal(std::as_bytes(std::span(chunk.data())), bytes)) << tensor.name;
    ++arranged;
  }
  EXPECT_EQ(arranged, 2 * 5 * 3 * 2);
  control::CheckpointDirectory directory;
  sender.Describe(directory);
  const auto received =
      ReceivedCheckpoint::Create(directory, std::chrono::seconds(1), [](const auto&) {});
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_EQ((*received)->config(), (*checkpoint)->config());
}

// Their sum is 2^64, so that what comes after them would lie beyond a small mapping.
TEST(HostileCheckpoint, SizesThatWrapAroundAreRefused) {
  control::CheckpointDirectory directory = Directory();
  for (int i = 0; i < 1 << 20; ++i) Add(directory, "t", "int8", {1}, uint64_t{1} << 44);
  EXPECT_THAT(Opened(directory).message(), HasSubstr("expected at most"));
}

TEST(HostileCheckpoint, MoreThanAnyModelIsRefused) {
  control::CheckpointDirectory large = Directory();
  for (int i = 0; i < 4; ++i) {
    Add(large, Str("t", i), "f32", {int64_t{1} << 42}, uint64_t{1} << 44);
  }
  EXPECT_THAT(Opened(large).message(), HasSubstr("tensor 't"));
  control::CheckpointDirectory many = Directory();
  for (int i = 0; i < 200'000; ++i) Add(many, "t", "f32", {1}, 4);
  EXPECT_THAT(Opened(many).message(), HasSubstr("200000 tensors, expected at most"));
  control::CheckpointDirectory constants = Directory();
  Add(constants, "c", "nf4", {32, 32}, 512);
  constants.mutable_tensors(0)->set_constant_bytes(UINT64_MAX);
  EXPECT_THAT(Opened(constants).message(), HasSubstr("tensor 'c'"));
  control::CheckpointDirectory named = Directory();
  Add(named, std::string(1 << 20, 'x'), "f32", {1}, 4);
  EXPECT_THAT(Opened(named).message(), HasSubstr("name"));
  EXPECT_LT(Opened(named).message().size(), 1000u);
}

// A master that answers what is asked with these constants, and with zeros for tensors.
class Answers {
 public:
  explicit Answers(std::string constants) : constants_(std::move(constants)) {}

  absl::StatusOr<MatrixConstants> ConstantsOf(const control::CheckpointDirectory& directory,
                                              uint64_t announced = 0) {
    std::thread answer;
    auto created = ReceivedCheckpoint::Create(
        directory, std::chrono::seconds(5), [&](const control::TensorRequest& request) {
          if (answer.joinable()) return;  // what was asked ahead
          answer = std::thread([this, request, announced] { Deliver(request, announced); });
        });
    if (!created.ok()) return created.status();
    checkpoint_ = created->get();
    auto constants = checkpoint_->tensors()[0].constants();
    answer.join();
    return constants;
  }

 private:
  void Deliver(const control::TensorRequest& request, uint64_t announced) {
    control::TensorChunk chunk;
    chunk.set_tensor(request.tensor());
    chunk.set_constants(request.constants());
    chunk.set_total(announced == 0 ? constants_.size() : announced);
    chunk.set_data(constants_);
    Sha256 sum;
    sum.Add(std::as_bytes(std::span(constants_)));
    chunk.set_sha256(sum.Finish());
    checkpoint_->Deliver(chunk);
  }

  const std::string constants_;
  ReceivedCheckpoint* checkpoint_ = nullptr;
};

control::CheckpointDirectory OneMatrix() {
  control::CheckpointDirectory directory = Directory();
  Add(directory, "m", "nf4", {32, 32}, 512);
  return directory;
}

control::Constants HonestConstants() {
  control::Constants constants;
  for (int i = 0; i < 16; ++i) constants.add_scales(1);
  constants.set_scale_block(64);
  return constants;
}

TEST(HostileCheckpoint, ConstantsFitTheirMatrix) {
  EXPECT_EQ(Answers(HonestConstants().SerializeAsString()).ConstantsOf(OneMatrix()).status(),
            absl::OkStatus());
  const auto refused = [](const std::function<void(control::Constants&)>& change) {
    control::Constants constants = HonestConstants();
    change(constants);
    return std::string(
        Answers(constants.SerializeAsString()).ConstantsOf(OneMatrix()).status().message());
  };
  EXPECT_THAT(refused([](auto& c) { c.set_codes("x"); }),
              HasSubstr("tensor 'm' has 1 bytes of codes, expected 512"));
  EXPECT_THAT(refused([](auto& c) { c.add_scales(1); }), HasSubstr("17 scales"));
  EXPECT_THAT(refused([](auto& c) { c.set_scale_block(INT64_MAX); }), HasSubstr("blocks of"));
  EXPECT_THAT(refused([](auto& c) { c.set_scale_block(0); }), HasSubstr("blocks of 0"));
  EXPECT_THAT(refused([](auto& c) { c.add_zeros(0); }), HasSubstr("1 zero points"));
  EXPECT_THAT(refused([](auto& c) { c.add_codebook(0); }), HasSubstr("a codebook of 1 values"));
  EXPECT_THAT(refused([](auto& c) { c.add_input_order(0); }), HasSubstr("input order of 1"));
}

TEST(HostileCheckpoint, CodesAreThereInFull) {
  control::CheckpointDirectory directory = OneMatrix();
  directory.mutable_tensors(0)->set_bytes(100);
  EXPECT_THAT(
      Answers(HonestConstants().SerializeAsString()).ConstantsOf(directory).status().message(),
      HasSubstr("tensor 'm' has 100 bytes of codes, expected 512"));
}

TEST(HostileCheckpoint, ConstantsOfATebibyteAreRefused) {
  EXPECT_THAT(Answers(HonestConstants().SerializeAsString())
                  .ConstantsOf(OneMatrix(), uint64_t{1} << 40)
                  .status()
                  .message(),
              HasSubstr("1099511627776 bytes of constants, expected at most"));
}

// Each beginning costs its sum.
TEST(HostileCheckpoint, ATensorIsSentAFewTimes) {
  control::CheckpointDirectory directory = OneMatrix();
  Add(directory, "v", "f32", {1 << 19}, 2 << 20);
  const auto checkpoint =
      ReceivedCheckpoint::Create(directory, std::chrono::seconds(1), [](const auto&) {});
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  CheckpointSender sender(**checkpoint, /*ranks=*/2);
  const auto ask = [&](uint64_t offset, bool constants = false) {
    control::TensorRequest request;
    request.set_tensor(constants ? 0 : 1);
    request.set_constants(constants);
    request.set_offset(offset);
    control::TensorChunk chunk;
    sender.Answer(request, chunk);
    return chunk.problem();
  };
  for (int i = 0; i < 8; ++i) EXPECT_EQ(ask(0), "");
  for (int i = 0; i < 100; ++i) {
    EXPECT_THAT(ask(0), HasSubstr("tensor 'v' was asked for 8 times, and is not sent again"));
  }
  EXPECT_EQ(ask(1 << 20), "");
  EXPECT_THAT(ask(1, /*constants=*/true), HasSubstr("expected to be asked for from the first"));
}

}  // namespace
}  // namespace treadle
