// Models cut over ranks against the same models whole.
//
// The tolerance. Cutting a row-parallel product changes nothing but the order of a float sum. E,
// how far the whole model's float32 result is from the same model with sums in double (the
// reference backend), is fp32 rounding as this very model propagates it; the cut model's sums are
// shorter chains, so they are no further from the truth. Both are maxima over a few thousand
// values of different samples; 8 E, as in model_test.cc.
#include "models/tensor_parallel.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <thread>

#include "base/status.h"
#include "kernels/collectives/thread_communicator.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/op_cases/random.h"
#include "kernels/reference/reference_backend.h"
#include "models/architectures/architecture.h"
#include "models/rank_sums.h"
#include "tests/support/assert_ok.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

constexpr int64_t kPageSize = 16;
constexpr std::chrono::milliseconds kPatient{60'000};

struct Setting {
  bool reference = false;  // else the CPU backend
  ComputeMode compute = ComputeMode::kExact;
  int64_t chunk = 64;
  std::string weights = {};
  std::optional<float> outlier_threshold = {};
};

struct Output {
  absl::Status status;
  std::vector<float> hidden;  // [tokens, hidden]
  std::vector<float> logits;  // [tokens, vocab of the rank]
  ShardRange vocab;
};

std::unique_ptr<Backend> MakeBackend(const Setting& setting) {
  if (setting.reference) return CreateReferenceBackend(setting.compute);
  CpuBackendOptions options;
  options.threads = 1;
  options.compute = setting.compute;
  return CreateCpuBackend(options).value();
}

absl::StatusOr<std::vector<std::unique_ptr<Model>>> Load(
    const Checkpoint& checkpoint, const Setting& setting,
    const std::vector<std::unique_ptr<Backend>>& backends) {
  LoadOptions options;
  options.max_batch_tokens = setting.chunk;
  options.threads = 1;
  options.outlier_threshold = setting.outlier_threshold;
  if (!setting.weights.empty()) {
    TREADLE_ASSIGN_OR_RETURN(options.weights, WeightPlan::Parse(setting.weights));
  }
  std::vector<Backend*> devices;
  for (const auto& backend : backends) devices.push_back(backend.get());
  return LoadModelRanks(checkpoint, devices, options);
}

absl::Status RunRank(Model* model, const Setting& setting, Communicator* ranks,
                     std::span<const int32_t> ids, Output& output) {
  const auto tokens = static_cast<int64_t>(ids.size());
  const ModelConfig& config = model->config();
  const int64_t pages = (tokens + kPageSize - 1) / kPageSize;
  KvLayout layout = {model->kv_heads(), config.head_dim, kPageSize, pages, DType::kF32};
  layout.latent_dim = config.latent_dim;
  KvLayout window_layout = layout;
  window_layout.kv_heads = model->local_kv_heads();
  window_layout.head_dim = config.HeadDim(/*local=*/true);
  window_layout.state = model->state_layout();
  std::vector<int32_t> page_ids;
  for (int64_t page = pages; page-- > 0;) page_ids.push_back(static_cast<int32_t>(page));
  std::vector<std::vector<std::byte>> memory(
      static_cast<size_t>(config.layers),
      std::vector<std::byte>(
          static_cast<size_t>(pages * std::max(layout.PageBytes(), window_layout.PageBytes()))));
  std::vector<std::byte*> layers;
  for (auto& layer : memory) layers.push_back(layer.data());

  output.vocab = model->vocab();
  output.hidden.resize(static_cast<size_t>(tokens * config.hidden));
  output.logits.resize(static_cast<size_t>(tokens * model->vocab().size()));
  const Tensor hidden = DenseTensor(output.hidden.data(), DType::kF32, tokens, config.hidden);
  for (int64_t begin = 0; begin < tokens; begin += setting.chunk) {
    const int64_t count = std::min(setting.chunk, tokens - begin);
    std::vector<int32_t> positions;
    for (int64_t i = 0; i < count; ++i) positions.push_back(static_cast<int32_t>(begin + i));
    const SequenceSpan span = {0, static_cast<int32_t>(count), static_cast<int32_t>(begin),
                               page_ids.data()};
    TREADLE_RETURN_IF_ERROR(model->Forward({ids.subspan(begin, count), positions, {&span, 1}},
                                           {layout, layers, window_layout}, ranks,
                                           hidden.Rows(begin, count)));
  }
  std::vector<float> head_input = output.hidden;
  model->Head(DenseTensor(head_input.data(), DType::kF32, tokens, config.hidden),
              DenseTensor(output.logits.data(), DType::kF32, tokens, model->vocab().size()));
  // The others may still read this model's last partial sum.
  return ranks != nullptr ? ranks->Broadcast(nullptr, 0, 0) : absl::OkStatus();
}

// One output per rank.
std::vector<Output> RunRanks(const Checkpoint& checkpoint, const Setting& setting, int size,
                             std::span<const int32_t> ids) {
  std::vector<Output> outputs(size);
  std::vector<std::unique_ptr<Backend>> backends;
  for (int rank = 0; rank < size; ++rank) backends.push_back(MakeBackend(setting));
  const auto models = Load(checkpoint, setting, backends);
  if (!models.ok()) {
    for (Output& output : outputs) output.status = models.status();
    return outputs;
  }
  const auto ranks = CreateThreadCommunicators(size, kPatient);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Communicator* others = size > 1 ? ranks[rank].get() : nullptr;
      outputs[rank].status = RunRank((*models)[rank].get(), setting, others, ids, outputs[rank]);
      if (!outputs[rank].status.ok()) ranks[rank]->Abort(outputs[rank].status);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outputs;
}

// [tokens, vocab] of the parts.
std::vector<float> Gathered(const std::vector<Output>& outputs, int64_t tokens) {
  const int64_t vocab = outputs.back().vocab.end;
  std::vector<float> logits(static_cast<size_t>(tokens * vocab));
  for (const Output& output : outputs) {
    for (int64_t token = 0; token < tokens; ++token) {
      std::copy_n(output.logits.begin() + token * output.vocab.size(), output.vocab.size(),
                  logits.begin() + token * vocab + output.vocab.begin);
    }
  }
  return logits;
}

double Distance(std::span<const float> a, std::span<const float> b) {
  TREADLE_CHECK(a.size() == b.size());
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double distance = std::abs(double{a[i]} - b[i]);
    if (!(distance <= largest)) largest = distance;  // NaN too
  }
  return largest;
}

class TensorParallel : public ::testing::Test {
 protected:
  using Writer = absl::StatusOr<std::string> (*)(const std::string&, const TinyModelOptions&);
  std::unique_ptr<Checkpoint> Open(Writer write, const TinyModelOptions& options) const {
    const auto path = write(folder_.path(), options).value();
    return Checkpoint::Open(path).value();
  }

  static std::vector<int32_t> Ids(int64_t count, int64_t vocab = TinyVocabulary()) {
    Random random(11);
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(random.Below(vocab)));
    return ids;
  }

  // The model on `size` ranks gives what it gives on one, within 8 E (+ `more`), and the same bits
  // on all ranks, in every run, and cut into chunks anywhere.
  static void ExpectSameAsWhole(const Checkpoint& checkpoint, const Setting& setting, int size,
                                double more = 0) {
    const int64_t most = std::min<int64_t>(37, checkpoint.config().context);
    const std::vector<int32_t> ids = Ids(most, checkpoint.config().vocab);
    const auto tokens = static_cast<int64_t>(ids.size());
    const Output whole = RunRanks(checkpoint, setting, 1, ids)[0];
    ASSERT_TRUE(whole.status.ok()) << whole.status;
    Setting in_double = setting;
    in_double.reference = true;
    const Output truth = RunRanks(checkpoint, in_double, 1, ids)[0];
    ASSERT_TRUE(truth.status.ok()) << truth.status;

    const std::vector<Output> parts = RunRanks(checkpoint, setting, size, ids);
    int64_t token = 0;
    for (const Output& part : parts) {
      ASSERT_TRUE(part.status.ok()) << part.status;
      EXPECT_EQ(part.vocab.begin, token);
      EXPECT_GT(part.vocab.size(), 0);
      token = part.vocab.end;
      EXPECT_EQ(part.hidden, parts[0].hidden);
    }
    EXPECT_EQ(token, checkpoint.config().vocab);
    const std::vector<float> logits = Gathered(parts, tokens);
    const double hidden_rounding = Distance(whole.hidden, truth.hidden);
    const double logits_rounding = Distance(whole.logits, truth.logits);
    EXPECT_LE(Distance(parts[0].hidden, whole.hidden), 8 * hidden_rounding + more);
    EXPECT_LE(Distance(logits, whole.logits), 8 * logits_rounding + more);

    Setting chunked = setting;
    chunked.chunk = 5;
    const std::vector<Output> again = RunRanks(checkpoint, chunked, size, ids);
    EXPECT_EQ(again[0].hidden, parts[0].hidden);
    EXPECT_EQ(Gathered(again, tokens), logits);
  }

  const TestFolder folder_;
};

TEST_F(TensorParallel, LlamaWithSharedAndRepeatedKvHeads) {
  struct Grid {
    int size;
    int64_t heads, kv_heads;
  };
  // K/V heads of one query head each, of groups, and held by several ranks.
  constexpr Grid kGrids[] = {{2, 4, 4}, {2, 4, 2}, {2, 4, 1}, {3, 6, 6}, {3, 6, 3},
                             {3, 6, 1}, {4, 8, 8}, {4, 8, 4}, {4, 8, 2}, {4, 8, 1}};
  for (const Grid& grid : kGrids) {
    SCOPED_TRACE(Str(grid.size, " ranks, ", grid.heads, " heads, ", grid.kv_heads, " K/V heads"));
    TinyModelOptions options;
    options.heads = grid.heads;
    options.hidden = 16 * grid.heads;
    options.kv_heads = grid.kv_heads;
    options.ffn_hidden = 200;  // uneven parts
    options.tied_head = grid.size % 2 == 0;
    const auto checkpoint = Open(WriteTinyLlamaGguf, options);
    ExpectSameAsWhole(*checkpoint, {}, grid.size);
  }
}

TEST_F(TensorParallel, EveryArchitectureInBothContainers) {
  struct Row {
    int size;
    int64_t kv_heads;
    const char* weights;
  };
  const Row rows[] = {{2, 12, ""}, {3, 1, "q8_0"}, {4, 4, "nf4"}};
  size_t turn = 0;  // a row in each container
  for (const Architecture& architecture : Architectures()) {
    for (const auto write : {WriteTinyGguf, WriteTinyFolder}) {
      const Row& row = rows[turn++ % 3];
      SCOPED_TRACE(Str(architecture.name, " over ", row.size, " ranks ", row.weights));
      TinyModelOptions options;
      options.heads = 12;
      options.kv_heads = row.kv_heads;
      options.hidden = 192;
      options.ffn_hidden = 224;
      options.tied_head = row.size != 2;
      ASSERT_OK_AND_ASSIGN(const auto path, write(architecture, folder_.path(), options));
      ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(path));
      ExpectSameAsWhole(*checkpoint, {.weights = row.weights}, row.size);
    }
  }
}

// A rank's value heads are in two ranges of a .gguf file's, and in one of a folder's; those of
// Qwen3-Next are in one of either, as those of Mamba 2, which all that a rank has are in one matrix
// with; and channels of convolutions. Converted to codes that lie apart, a rank's are floats.
TEST_F(TensorParallel, HeadsAndChannelsOfStates) {
  for (const auto& [name, ranks] :
       {std::pair("qwen35moe", 3), std::pair("qwen3next", 3), std::pair("granitehybrid", 2),
        std::pair("lfm2", 3), std::pair("granitehybrid", 4), std::pair("granitehybridmoe", 2),
        std::pair("nemotron-h-moe", 2)}) {
    for (const char* file : {"/model.gguf", ""}) {
      for (const char* weights : {"", "nf4"}) {
        SCOPED_TRACE(Str(name, file, " ", weights));
        ASSERT_OK_AND_ASSIGN(const auto checkpoint,
                             Checkpoint::Open(Str(TREADLE_TESTDATA "/models/", name, file)));
        ExpectSameAsWhole(*checkpoint, {.weights = weights}, ranks);
      }
    }
  }
}

TEST_F(TensorParallel, StoredFormats) {
  for (const char* format : {"f16", "bf16", "q8_0", "q4_1"}) {
    for (const int size : {2, 3}) {
      SCOPED_TRACE(Str(format, ", ", size, " ranks"));
      TinyModelOptions options;
      options.format = format;
      options.heads = 6;
      options.kv_heads = 1;
      options.hidden = 192;
      options.ffn_hidden = 160;  // five blocks
      ExpectSameAsWhole(*Open(WriteTinyLlamaGguf, options), {}, size);
    }
  }
}

// Converted whole, then cut. Embedding and head too.
TEST_F(TensorParallel, ConvertedFormats) {
  TinyModelOptions options;
  options.heads = 6;
  options.kv_heads = 3;
  options.hidden = 96;  // blocks of 64 straddle rows
  options.ffn_hidden = 160;
  options.tied_head = false;
  const auto checkpoint = Open(WriteTinyLlamaFolder, options);
  for (const char* format :
       {"nf4", "nf4-dq", "fp4:32", "fp8", "q8_0", "q4_0", "q4_1", "kbit-int3:64",
        "kbit-dynamic5:tensor", "kbit-quantile6:32", "kbit-float7e3:128", "kbit-int8:64"}) {
    SCOPED_TRACE(format);
    Setting setting;
    setting.weights = Str(format, ",lm_head=", format, ",embedding=", format);
    ExpectSameAsWhole(*checkpoint, setting, 3);
  }
}

// With a threshold that makes every activation an outlier the product is exact: the weights are
// right. As it is, each rank rounds its own activations; that moves results no further than
// rounding them at all does, but for the two samples (8, as for E).
TEST_F(TensorParallel, RowInt8) {
  TinyModelOptions options;
  options.heads = 6;
  options.kv_heads = 3;
  options.hidden = 96;
  options.ffn_hidden = 160;
  const auto checkpoint = Open(WriteTinyLlamaFolder, options);
  const Setting exact = {.weights = "int8", .outlier_threshold = 1e-30f};
  ExpectSameAsWhole(*checkpoint, exact, 3);
  const std::vector<int32_t> ids = Ids(37);
  const Setting rounded = {.weights = "int8"};
  const Output a = RunRanks(*checkpoint, exact, 1, ids)[0],
               b = RunRanks(*checkpoint, rounded, 1, ids)[0];
  const double rounding = std::max(Distance(a.hidden, b.hidden), Distance(a.logits, b.logits));
  EXPECT_GT(rounding, 0);
  ExpectSameAsWhole(*checkpoint, rounded, 3, 8 * rounding);
}

// GPTQ's act-order: columns of a group lie side by side and are cut apart all the same.
TEST_F(TensorParallel, ActOrder) {
  for (const char* name : {"gptq-act-v1", "gptq-act-v2-8bit"}) {
    ASSERT_OK_AND_ASSIGN(const auto checkpoint,
                         Checkpoint::Open(Str(TREADLE_TESTDATA "/quantized/", name)));
    ExpectSameAsWhole(*checkpoint, {}, 2);
  }
}

// Activations in blocks of 32, which the cuts leave whole.
TEST_F(TensorParallel, IntegerActivations) {
  TinyModelOptions options;
  options.format = "q4_1";
  options.heads = 4;
  options.hidden = 128;
  const auto checkpoint = Open(WriteTinyLlamaGguf, options);
  const std::vector<int32_t> ids = Ids(37);
  const Setting rounded = {.compute = ComputeMode::kInt16};
  const Output a = RunRanks(*checkpoint, {}, 1, ids)[0],
               b = RunRanks(*checkpoint, rounded, 1, ids)[0];
  const double rounding = std::max(Distance(a.hidden, b.hidden), Distance(a.logits, b.logits));
  ExpectSameAsWhole(*checkpoint, rounded, 2, 8 * rounding);
}

// An error of the communicator comes out, on every rank.
TEST_F(TensorParallel, ABrokenCommunicatorEndsTheForwardPass) {
  const auto checkpoint = Open(WriteTinyLlamaGguf, {});
  const auto ranks = CreateThreadCommunicators(2, kPatient);
  ranks[1]->Abort(absl::UnavailableError("rank 1 is gone"));
  std::vector<std::unique_ptr<Backend>> backends;
  for (int rank = 0; rank < 2; ++rank) backends.push_back(MakeBackend({}));
  ASSERT_OK_AND_ASSIGN(const auto models, Load(*checkpoint, {}, backends));
  Output output;
  EXPECT_EQ(RunRank(models.front().get(), {}, ranks[0].get(), Ids(3), output),
            absl::UnavailableError("rank 1 is gone"));
}

TEST_F(TensorParallel, VocabularyParallelEmbeddingIsExact) {
  constexpr int64_t kRows = 103, kHidden = 40;
  constexpr int kSize = 3;
  Random random(3);
  std::vector<float> table(kRows * kHidden);
  for (float& value : table) value = random.Normal();
  std::vector<int32_t> ids;
  for (int i = 0; i < 50; ++i) ids.push_back(static_cast<int32_t>(random.Below(kRows)));
  const auto ranks = CreateThreadCommunicators(kSize, kPatient);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank) {
    threads.emplace_back([&, rank] {
      const auto backend = CreateReferenceBackend();
      const ShardRange part = PartOf(kRows, 1, {rank, kSize});
      MatrixSource source = {.format = FindWeightFormat("f32"), .n = part.size(), .k = kHidden};
      source.data = reinterpret_cast<const std::byte*>(table.data() + part.begin * kHidden);
      ASSERT_OK_AND_ASSIGN(auto packed, backend->Pack(source));
      const Linear linear(std::move(packed), Buffer());
      Activations activations(*backend, 64);
      RankSums sums;
      ASSERT_TRUE(sums.Allocate(activations, kHidden, {rank, kSize}).ok());
      std::vector<float> out(ids.size() * kHidden, 7.0f);
      const Tensor hidden = DenseTensor(out.data(), DType::kF32, std::ssize(ids), kHidden);
      ASSERT_TRUE(sums.Embed(*backend, linear, part, ids, ranks[rank].get(), hidden).ok());
      ASSERT_TRUE(ranks[rank]->Broadcast(nullptr, 0, 0).ok());  // all have read all parts
      for (size_t i = 0; i < ids.size(); ++i) {
        for (int64_t k = 0; k < kHidden; ++k) {
          ASSERT_EQ(out[i * kHidden + k], table[ids[i] * kHidden + k]);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace treadle
