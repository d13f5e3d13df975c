// Models on an emulated GPU whose norms, activations and attention leave rows of 16 bits for the
// products that round their input anyway: the same bits as with f32 between all ops.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/runtime/backend_on_device.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/forwarding_backend.h"
#include "kernels/op_cases/random.h"
#include "models/architectures/architecture.h"
#include "tests/models/checkpoints/scratch_checkpoint.h"
#include "tests/models/teacher_forcing.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

// Calls of MatMul by the type of their input.
using Products = std::map<DType, int>;

// An emulated GPU; with `floats`, as if nothing were gained by other types.
class Gpu final : public ForwardingBackend {
 public:
  Gpu(DType dtype, bool deterministic, bool floats, Products* products)
      : ForwardingBackend(Open(dtype, deterministic)), floats_(floats), products_(products) {}

  DType InputType(std::span<const PackedMatrix* const> weights) const override {
    return floats_ ? DType::kF32 : ForwardingBackend::InputType(weights);
  }
  void MatMul(Tensor x, std::span<const Projection> projections) override {
    ++(*products_)[x.dtype];
    ForwardingBackend::MatMul(x, projections);
  }

 private:
  static std::unique_ptr<Backend> Open(DType dtype, bool deterministic) {
    auto device = cuda::Device::Open(0);
    TREADLE_CHECK(device.ok());
    auto backend =
        cuda::MakeCudaBackend(*std::move(device), {.dtype = dtype, .deterministic = deterministic});
    TREADLE_CHECK(backend.ok());
    return *std::move(backend);
  }

  const bool floats_;
  Products* const products_;
};

struct InputTypeCase {
  std::string name;
  const char* architecture;
  std::string format;   // of the file's matrices
  std::string weights;  // a WeightPlan
  DType dtype;          // of products
  Products products;    // of a forward pass of two layers and the head
  int64_t hidden = 64;
};

class InputTypes : public ScratchCheckpoint, public ::testing::WithParamInterface<InputTypeCase> {
 protected:
  // The logits of a sequence of `tokens`, so many rows at a time.
  std::vector<float> Logits(const Checkpoint& checkpoint, int64_t rows, int64_t tokens,
                            bool deterministic, bool floats, Products* products) const {
    const InputTypeCase& c = GetParam();
    const auto model = TeacherForcing::Create(
        checkpoint, std::make_unique<Gpu>(c.dtype, deterministic, floats, products),
        {.max_tokens = tokens,
         .chunk = rows,
         .kv_dtype = DType::kF16,
         .weights = WeightPlan::Parse(c.weights).value()});
    EXPECT_EQ(model.status(), absl::OkStatus());
    if (!model.ok()) return {};
    Random random(3);
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < tokens; ++i) {
      ids.push_back(static_cast<int32_t>(random.Below(TinyVocabulary())));
    }
    return (*model)->Logits(ids);
  }
  void ExpectSameBits(const Checkpoint& checkpoint, int64_t rows, int64_t tokens,
                      bool deterministic) const {
    SCOPED_TRACE(Str(rows, " rows", deterministic ? ", deterministic" : ""));
    Products rounded_products, float_products;
    const auto rounded = Logits(checkpoint, rows, tokens, deterministic, false, &rounded_products);
    const auto floats = Logits(checkpoint, rows, tokens, deterministic, true, &float_products);
    ASSERT_FALSE(floats.empty());
    ASSERT_EQ(rounded.size(), floats.size());
    EXPECT_EQ(std::memcmp(rounded.data(), floats.data(), floats.size() * sizeof(float)), 0);
    const int passes = static_cast<int>((tokens + rows - 1) / rows);
    Products expected = GetParam().products;
    for (auto& [type, count] : expected) count *= passes;
    EXPECT_EQ(rounded_products, expected);
    EXPECT_EQ(float_products, (Products{{DType::kF32, 9 * passes}}));
  }
};

TEST_P(InputTypes, HaveTheBitsOfFloats) {
  const InputTypeCase& c = GetParam();
  // So many inner features that their rows are longer than those of all that a norm feeds.
  const TinyModelOptions options = {
      .format = c.format, .hidden = c.hidden, .ffn_hidden = 576, .context = 64};
  const auto path = WriteTinyGguf(*FindArchitecture(c.architecture), Path(""), options);
  ASSERT_EQ(path.status(), absl::OkStatus());
  const auto checkpoint = Checkpoint::Open(*path);
  ASSERT_EQ(checkpoint.status(), absl::OkStatus());
  ExpectSameBits(**checkpoint, 1, 2, true);
  ExpectSameBits(**checkpoint, 4, 8, true);
  ExpectSameBits(**checkpoint, 5, 8, true);
  ExpectSameBits(**checkpoint, 33, 40, true);
  ExpectSameBits(**checkpoint, 33, 40, false);
}

constexpr DType kF16 = DType::kF16;
constexpr DType kBF16 = DType::kBF16;
constexpr DType kF32 = DType::kF32;
// LLM.int8() in layer 0, but for its last product, and in attention's of layer 1; NF4.
constexpr char kMixed[] = "blk.0.=int8,blk.0.ffn_down=keep,blk.1.attn_output=int8,blk.1.ffn_up=nf4";
INSTANTIATE_TEST_SUITE_P(
    Formats, InputTypes,
    ::testing::Values(
        InputTypeCase{"llama_bf16", "llama", "bf16", "", kBF16, {{kBF16, 9}}},
        InputTypeCase{"gpt2_bf16", "gpt2", "bf16", "", kBF16, {{kBF16, 9}}},
        InputTypeCase{"gptneox_bf16", "gptneox", "bf16", "", kBF16, {{kBF16, 9}}},
        InputTypeCase{"phi3_bf16", "phi3", "bf16", "", kBF16, {{kBF16, 9}}},
        InputTypeCase{"opt_f16", "opt", "f16", "", kF16, {{kF16, 9}}},
        InputTypeCase{"falcon_nf4", "falcon", "f32", "nf4", kBF16, {{kBF16, 9}}},
        InputTypeCase{"qwen2_bf16", "qwen2", "bf16", "", kBF16, {{kBF16, 9}}},
        InputTypeCase{"qwen2_q4_0", "qwen2", "f32", "q4_0", kF16, {{kF16, 9}}},
        InputTypeCase{"qwen3_bf16", "qwen3", "bf16", "", kBF16, {{kBF16, 9}}},
        InputTypeCase{"qwen3_nf4", "qwen3", "f32", "nf4", kBF16, {{kBF16, 9}}},
        InputTypeCase{"qwen3_mixed", "qwen3", "bf16", kMixed, kBF16, {{kF32, 4}, {kBF16, 5}}},
        InputTypeCase{"gemma3_bf16", "gemma3", "bf16", "", kBF16, {{kBF16, 9}}},
        InputTypeCase{"llama_f16", "llama", "f16", "", kF16, {{kF16, 9}}},
        InputTypeCase{"gpt2_f16", "gpt2", "f16", "", kF16, {{kF16, 9}}},
        InputTypeCase{"llama_nf4", "llama", "f32", "nf4", kBF16, {{kBF16, 9}}},
        InputTypeCase{"gpt2_q4_0", "gpt2", "f32", "q4_0", kF16, {{kF16, 9}}},
        InputTypeCase{"llama_mixed", "llama", "bf16", kMixed, kBF16, {{kF32, 4}, {kBF16, 5}}},
        InputTypeCase{"gpt2_mixed", "gpt2", "bf16", kMixed, kBF16, {{kF32, 4}, {kBF16, 5}}},
        // One of the matrices that share an input is enough.
        InputTypeCase{"llama_one_int8",
                      "llama",
                      "bf16",
                      "blk.1.attn_k=int8,blk.0.ffn_up=int8",
                      kF16,
                      {{kF32, 2}, {kF16, 7}}},
        InputTypeCase{
            "llama_int8_head", "llama", "bf16", "lm_head=int8", kF16, {{kF32, 1}, {kF16, 8}}},
        InputTypeCase{
            "gpt2_int8_head", "gpt2", "bf16", "lm_head=int8", kF16, {{kF32, 1}, {kF16, 8}}},
        // Rows that SwiGLU and GeLU leave in place, and nothing else.
        InputTypeCase{
            "llama_int8_down", "llama", "bf16", "ffn_down=int8", kF16, {{kF32, 2}, {kF16, 7}}},
        InputTypeCase{
            "gpt2_int8_down", "gpt2", "bf16", "ffn_down=int8", kF16, {{kF32, 2}, {kF16, 7}}},
        InputTypeCase{"llama_int8", "llama", "f32", "int8,embedding=int8", kBF16, {{kF32, 9}}},
        // Features that come in 64s between up and down alone.
        InputTypeCase{"llama_odd", "llama", "bf16", "", kBF16, {{kF32, 7}, {kBF16, 2}}, 48},
        InputTypeCase{"gpt2_odd", "gpt2", "bf16", "", kBF16, {{kF32, 7}, {kBF16, 2}}, 48}),
    [](const auto& info) { return info.param.name; });

// The head's rows are as many as it is told, whatever the layers' are.
TEST_F(ScratchCheckpoint, AHeadOfMoreRowsThanABatch) {
  const auto path = WriteTinyLlamaGguf(Path(""), {.format = "bf16"});
  ASSERT_EQ(path.status(), absl::OkStatus());
  const auto checkpoint = Checkpoint::Open(*path);
  ASSERT_EQ(checkpoint.status(), absl::OkStatus());
  constexpr int64_t kRows = 64;
  std::vector<float> logits[2];
  for (const bool floats : {false, true}) {
    Products products;
    Gpu gpu(kBF16, /*deterministic=*/true, floats, &products);
    LoadOptions options;
    options.max_batch_tokens = 2;
    options.max_head_rows = kRows;
    const auto model = Model::Load(**checkpoint, gpu, options);
    ASSERT_EQ(model.status(), absl::OkStatus());
    const ModelConfig& config = (*model)->config();
    Random random(4);
    std::vector<float> hidden(static_cast<size_t>(kRows * config.hidden));
    for (float& x : hidden) x = random.Normal();
    const Buffer in = gpu.Allocate(hidden.size() * sizeof(float)).value();
    gpu.CopyToDevice(in.data(), hidden.data(), in.bytes());
    const Buffer out = gpu.Allocate(static_cast<size_t>(kRows * config.vocab) * 4).value();
    (*model)->Head(DenseTensor(in.data(), kF32, kRows, config.hidden),
                   DenseTensor(out.data(), kF32, kRows, config.vocab));
    ASSERT_EQ(gpu.Synchronize(), absl::OkStatus());
    logits[floats].resize(out.bytes() / sizeof(float));
    gpu.CopyToHost(logits[floats].data(), out.data(), out.bytes());
  }
  EXPECT_EQ(std::memcmp(logits[0].data(), logits[1].data(), logits[0].size() * sizeof(float)), 0);
}

}  // namespace
}  // namespace treadle
