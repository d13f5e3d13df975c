// Quantized Hugging Face checkpoints (tests/oracles/make_quantized_checkpoints.py made them, and
// make_tool_checkpoints.py with GPTQModel and AutoAWQ): logits against the weights that
// bitsandbytes, or those tools, dequantize, and tables of spoiled parts, each refused with a line
// that names the tensor.
//
// The tolerance is model_test.cc's: 8 E, E being float32's rounding in this very model. LLM.int8()
// rounds activations: where a sum's last bit decides about a rounding, one element of a row moves
// by a whole step. Few can (an element in 10^5 lies so near to a tie), so three positions in four
// must be within 8 E, and all within what bitsandbytes' own forward differs (another outlier rule,
// 16-bit activations).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "base/mapped_file.h"
#include "kernels/cpu/cpu_backend.h"
#include "models/checkpoints/huggingface/hf_quantization.h"
#include "tests/models/checkpoints/safetensors_file.h"
#include "tests/models/checkpoints/scratch_checkpoint.h"
#include "tests/models/teacher_forcing.h"
#include "tests/support/assert_ok.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

constexpr double kToleranceFactor = 8;

std::string Folder(const std::string& name) { return TREADLE_TESTDATA "/quantized/" + name; }

Json OracleOf(const std::string& name) {
  return Json::parse(std::ifstream(Folder(name) + "/oracle.json"));
}

std::unique_ptr<Backend> MakeBackend(bool cpu) {
  if (!cpu) return CreateReferenceBackend();
  return CreateCpuBackend({.threads = 1, .compute = ComputeMode::kExact}).value();
}

// Largest difference at each position.
std::vector<double> Errors(const std::string& name, bool cpu, const std::string& plan,
                           const std::string& logits) {
  const auto checkpoint = Checkpoint::Open(Folder(name));
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto weights = WeightPlan::Parse(plan);
  EXPECT_TRUE(weights.ok()) << weights.status();
  if (!checkpoint.ok() || !weights.ok()) return {};
  const auto ids = OracleOf(name)["token_ids"].get<std::vector<int32_t>>();
  const auto model = TeacherForcing::Create(
      **checkpoint, MakeBackend(cpu),
      {.max_tokens = static_cast<int64_t>(ids.size()), .chunk = 7, .weights = *weights});
  EXPECT_TRUE(model.ok()) << model.status();
  if (!model.ok()) return {};
  const std::vector<float> found = (*model)->Logits(ids);
  const std::vector<float> wanted = ReadFloats(Folder(name) + "/" + logits);
  EXPECT_EQ(found.size(), wanted.size());
  std::vector<double> errors(ids.size());
  for (size_t i = 0; i < found.size() && i < wanted.size(); ++i) {
    double& error = errors[i / (found.size() / ids.size())];
    const double difference = std::abs(double{found[i]} - double{wanted[i]});
    error = std::isnan(difference) ? INFINITY : std::max(error, difference);
  }
  return errors;
}

class QuantizedLogits : public ::testing::TestWithParam<std::tuple<const char*, bool>> {};

TEST_P(QuantizedLogits, AreThoseOfTheDequantizedWeights) {
  const auto& [name, cpu] = GetParam();
  // LLM.int8() rounds activations: its weights are judged alone, as floats.
  const std::string plan = std::string(name) == "int8" ? "f32" : "";
  const std::vector<double> errors = Errors(name, cpu, plan, "logits.f32");
  ASSERT_FALSE(errors.empty());
  EXPECT_LE(std::ranges::max(errors),
            kToleranceFactor * OracleOf(name)["fp32_rounding"].get<double>());
}

INSTANTIATE_TEST_SUITE_P(
    All, QuantizedLogits,
    ::testing::Combine(::testing::Values("nf4", "nf4-dq", "fp4-dq", "nf4-128-dq", "int8",
                                         "fp8-channel", "fp8-tensor", "fp8-block", "gptq-v1",
                                         "gptq-v2-8bit", "awq", "gptq-act-v1", "gptq-act-v2-8bit",
                                         "gptqmodel-mixed", "gptqmodel-v2-8bit", "gptqmodel-awq",
                                         "autoawq", "compressed-w4a16",
                                         "compressed-w4a16-asymmetric", "compressed-w4a16-order",
                                         "compressed-w8a16", "compressed-w8a8", "compressed-nvfp4",
                                         "modelopt-nvfp4"),
                       ::testing::Bool()),
    [](const auto& info) {
      std::string name = std::get<0>(info.param);
      std::ranges::replace(name, '-', '_');
      return name + (std::get<1>(info.param) ? "_cpu" : "_reference");
    });

// As the compressed-tensors package decodes them (tests/oracles/make_compressed_checkpoints.py).
TEST(CompressedTensors, AreDecodedBitForBit) {
  for (const char* name :
       {"compressed-w4a16", "compressed-w4a16-asymmetric", "compressed-w4a16-order",
        "compressed-w8a16", "compressed-w8a8", "compressed-nvfp4", "modelopt-nvfp4"}) {
    SCOPED_TRACE(name);
    ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(Folder(name)));
    ASSERT_OK_AND_ASSIGN(const auto file, MappedFile::Open(Folder(name) + "/decoded.safetensors"));
    ASSERT_OK_AND_ASSIGN(const auto matrices, ReadSafetensors(*file));
    EXPECT_EQ(matrices.size(), 7u);
    for (const SafetensorsEntry& wanted : matrices) {
      const StoredTensor* const tensor = checkpoint->Find(wanted.name);
      ASSERT_NE(tensor, nullptr) << wanted.name;
      ASSERT_EQ(tensor->shape, wanted.shape);
      MatrixConstants constants;
      ASSERT_OK_AND_ASSIGN(const auto source,
                           SourceOf(*tensor, wanted.shape[0], wanted.shape[1], constants));
      EXPECT_EQ(CheckMatrixSource(source), absl::OkStatus());
      std::vector<float> found(static_cast<size_t>(wanted.Elements()));
      for (int64_t row = 0; row < wanted.shape[0]; ++row) {
        DecodeSourceRow(source, row, found.data() + row * wanted.shape[1]);
      }
      for (float& value : found) value += 0.0f;  // zeros are +0 there or here
      std::vector<float> expected(found.size());
      std::memcpy(expected.data(), wanted.data.data(), wanted.data.size());
      for (float& value : expected) value += 0.0f;
      EXPECT_EQ(std::memcmp(found.data(), expected.data(), wanted.data.size()), 0) << wanted.name;
    }
  }
}

// Scales of activations are no tensors of the model: a file that is made of the folder is whole.
TEST(CompressedTensors, ScalesOfActivationsAreNoTensors) {
  for (const char* name : {"compressed-nvfp4", "modelopt-nvfp4"}) {
    ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(Folder(name)));
    for (const StoredTensor& tensor : checkpoint->tensors()) {
      EXPECT_TRUE(tensor.name.ends_with(".weight")) << tensor.name;
    }
  }
}

TEST(Int8Checkpoint, RunsTheAlgorithmWithItsOwnThreshold) {
  const Json oracle = OracleOf("int8");
  for (const bool cpu : {false, true}) {
    const std::vector<double> errors = Errors("int8", cpu, "", "int8.f32");
    ASSERT_FALSE(errors.empty());
    const double tolerance = kToleranceFactor * oracle["int8_rounding"].get<double>();
    const auto near = std::ranges::count_if(errors, [&](double e) { return e <= tolerance; });
    EXPECT_GE(near, static_cast<int64_t>(errors.size() * 3 / 4)) << (cpu ? "cpu" : "reference");
    EXPECT_LE(std::ranges::max(errors), oracle["bitsandbytes"].get<double>());
  }
}

// -- what is spoiled -----------------------------------------------------------------------------

class SpoiledCheckpoint : public ScratchCheckpoint {
 protected:
  void Copy(const std::string& name) {
    for (const char* file : {"config.json", "model.safetensors"}) {
      std::filesystem::copy_file(Folder(name) + "/" + file, Path(file),
                                 std::filesystem::copy_options::overwrite_existing);
    }
    good_ = Safetensors::Parse(Read("model.safetensors"));
    config_ = Json::parse(Read("config.json"));
  }

  struct Row {
    const char* name;
    std::function<void(Safetensors&)> spoil;
    std::string message;
  };
  void ExpectRefusedRows(const std::vector<Row>& rows) {
    EXPECT_EQ(Load(folder_.path()), absl::OkStatus());
    for (const Row& row : rows) {
      SCOPED_TRACE(row.name);
      Safetensors bad = good_;
      row.spoil(bad);
      Write("model.safetensors", bad.Bytes());
      ExpectRefused(Load(folder_.path()), folder_.path(), row.message);
    }
  }

  static std::function<void(Safetensors&)> Erase(const std::string& name) {
    return [=](Safetensors& file) { file.header.erase(name); };
  }
  static std::function<void(Safetensors&)> Set(const std::string& name, const std::string& dtype,
                                               Json shape, const std::string& bytes) {
    return [=](Safetensors& file) { file.Set(name, dtype, shape, bytes); };
  }
  // Element `index` of a tensor of floats.
  static std::function<void(Safetensors&)> Poke(const std::string& name, size_t index,
                                                float value) {
    return [=](Safetensors& file) {
      const size_t begin = file.header.at(name)["data_offsets"][0];
      std::memcpy(file.data.data() + begin + index * sizeof(value), &value, sizeof(value));
    };
  }
  // One field of the JSON inside a tensor.
  static std::function<void(Safetensors&)> Describe(const std::string& name, const char* field,
                                                    Json value) {
    return [=](Safetensors& file) {
      Json json = Json::parse(file.Tensor(name));
      json[field] = value;
      if (value.is_null()) json.erase(field);
      const std::string text = json.dump();
      file.Set(name, "U8", {text.size()}, text);
    };
  }

  Safetensors good_;
  Json config_;
};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
const std::string kLayer = "model.layers.0.mlp.up_proj.";
const std::string kWeight = kLayer + "weight";  // [52, 36]: 936 bytes of 4-bit codes, 30 blocks

TEST_F(SpoiledCheckpoint, FourBits) {
  Copy("nf4");
  const std::string state = kWeight + ".quant_state.bitsandbytes__nf4";
  const std::string named = "tensor '" + kWeight;
  ExpectRefusedRows({
      {"no state", Erase(state), named + "' has 4-bit codes but no '"},
      {"state", Set(state, "U8", {2}, "{]"), "quant_state.bitsandbytes__nf4': is not valid JSON"},
      {"state type", Set(state, "F32", {1}, "abcd"), "is F32 [1], expected U8"},
      {"quant type", Describe(state, "quant_type", "fp4"), "has a quant_type that is not nf4"},
      {"no shape", Describe(state, "shape", Json()), "has no shape of two extents"},
      {"one extent", Describe(state, "shape", {1872}), "has no shape of two extents"},
      {"negative", Describe(state, "shape", {-52, -36}), "has no shape of two extents"},
      {"other shape", Describe(state, "shape", {52, 38}), "has 936 bytes of codes, expected 988"},
      {"turned", Describe(state, "shape", {36, 52}), "has shape [36, 52], expected [52, 36]"},
      {"no block", Describe(state, "blocksize", Json()), "has no blocksize from 1 to 2^30"},
      {"zero block", Describe(state, "blocksize", 0), "has no blocksize"},
      {"other block", Describe(state, "blocksize", 32), "is F32 [30], expected F32 [59]"},
      {"no absmax", Erase(kWeight + ".absmax"), named + ".absmax' is missing, expected F32 [30]"},
      {"absmax length", Set(kWeight + ".absmax", "F32", {2}, "abcdabcd"),
       named + ".absmax' is F32 [2], expected F32 [30]"},
      {"absmax type", Set(kWeight + ".absmax", "I32", {30}, std::string(120, 0)), "is I32 [30]"},
      {"absmax NaN", Poke(kWeight + ".absmax", 7, kNan), named + ".absmax' has nan as element 7"},
      {"absmax Inf", Poke(kWeight + ".absmax", 29, kInfinity), "has inf as element 29"},
      {"no map", Erase(kWeight + ".quant_map"), named + ".quant_map' is missing"},
      {"map length", Set(kWeight + ".quant_map", "F32", {2}, "abcdabcd"), "expected F32 [16]"},
      {"map NaN", Poke(kWeight + ".quant_map", 3, kNan), ".quant_map' has nan as element 3"},
      {"codes", Set(kWeight, "U8", {935, 1}, std::string(935, 0)), "has 935 bytes of codes"},
  });
}

TEST_F(SpoiledCheckpoint, DoubleQuantization) {
  Copy("nf4-dq");
  const std::string state = kWeight + ".quant_state.bitsandbytes__nf4";
  ExpectRefusedRows({
      {"no offset", Describe(state, "nested_offset", Json()), "has no finite nested_offset"},
      {"huge offset", Describe(state, "nested_offset", 1e300), "has no finite nested_offset"},
      {"no block", Describe(state, "nested_blocksize", Json()), "has no nested_blocksize"},
      {"other block", Describe(state, "nested_blocksize", 8), "expected F32 [4]"},
      {"no absmax", Erase(kWeight + ".nested_absmax"), ".nested_absmax' is missing"},
      {"no map", Erase(kWeight + ".nested_quant_map"), ".nested_quant_map' is missing"},
      {"map length", Set(kWeight + ".nested_quant_map", "F32", {1}, "abcd"), "expected F32 [256]"},
      {"absmax Inf", Poke(kWeight + ".nested_absmax", 0, kInfinity), "has inf as element 0"},
      {"map NaN", Poke(kWeight + ".nested_quant_map", 255, kNan), "has nan as element 255"},
      {"overflow",
       [&](Safetensors& file) {
         Poke(kWeight + ".nested_absmax", 0, 3e38f)(file);
         Poke(kWeight + ".nested_quant_map", 255, 3e38f)(file);
         file.Set(kWeight + ".absmax", "U8", {30}, std::string(30, '\xff'));
       },
       ".absmax' gives inf as scale 0"},
  });
}

TEST_F(SpoiledCheckpoint, Int8) {
  Copy("int8");
  ExpectRefusedRows({
      {"no SCB", Erase(kLayer + "SCB"), "tensor '" + kLayer + "SCB' is missing, expected F32 [52]"},
      {"SCB length", Set(kLayer + "SCB", "F32", {1}, "abcd"), "is F32 [1], expected F32 [52]"},
      {"SCB type", Set(kLayer + "SCB", "F16", {52}, std::string(104, 0)), "is F16 [52], expected"},
      {"SCB NaN", Poke(kLayer + "SCB", 51, kNan), "SCB' has nan as element 51"},
      {"SCB negative", Poke(kLayer + "SCB", 0, -1), "SCB' has -1 as element 0"},
      {"layout", Set(kLayer + "weight_format", "U8", Json::array(), "\x01"),
       "weight_format' is not u8 0"},
      {"shape", Set(kWeight, "I8", {1872}, std::string(1872, 1)), "has shape [1872], expected"},
      {"size", Set(kWeight, "I8", {52, 35}, std::string(1820, 1)), "expected [52, 36]"},
      {"type", Set(kWeight, "I16", {52, 36}, std::string(3744, 1)), "' has dtype 'I16', expected"},
  });
}

TEST_F(SpoiledCheckpoint, Fp8) {
  Copy("fp8-channel");
  const std::string scale = kWeight + "_scale";
  ExpectRefusedRows({
      {"no scale", Erase(scale), "tensor '" + kWeight + "' is F8_E4M3 without '" + scale},
      {"length", Set(scale, "F32", {2}, "abcdabcd"), "has shape [2], expected one number, [52]"},
      {"type", Set(scale, "U8", {52}, std::string(52, 1)), "is U8, expected F32, F16 or BF16"},
      {"NaN scale", Set(scale, "BF16", Json::array(), "\xff\x7f"), "_scale' has nan as element 0"},
      {"NaN weight",
       [](Safetensors& file) {
         file.data[static_cast<size_t>(file.header[kWeight]["data_offsets"][0]) + 5] = '\xff';
       },
       "tensor '" + kWeight + "' is NaN at element 5"},
      {"E5M2", Set(kWeight, "F8_E5M2", {52, 36}, std::string(1872, 1)), "has dtype 'F8_E5M2'"},
  });
}

TEST_F(SpoiledCheckpoint, Gptq) {
  Copy("gptq-v1");  // up_proj is [48, 32] in groups of 16
  const std::string named = "tensor '" + kLayer;
  const auto words = [](int64_t count) { return std::string(static_cast<size_t>(4 * count), 1); };
  ExpectRefusedRows({
      {"no scales", Erase(kLayer + "scales"), named + "scales' is missing"},
      {"no zeros", Erase(kLayer + "qzeros"), named + "qzeros' is missing"},
      {"codes", Set(kLayer + "qweight", "I32", {3, 48}, words(144)),
       "has shape [48, 24], expected"},
      {"type", Set(kLayer + "qweight", "F32", {4, 48}, words(192)), "expected an I32 matrix"},
      {"zeros", Set(kLayer + "qzeros", "I32", {1, 6}, words(6)), "qzeros has 6 elements, expected"},
      {"scales", Set(kLayer + "scales", "F16", {1, 48}, std::string(96, 1)), "expected [2, 48]"},
      {"scale NaN", Set(kLayer + "scales", "F16", {2, 48}, std::string(192, '\x7e')), "is nan"},
      {"group", Set(kLayer + "g_idx", "I32", {32}, words(32)), "g_idx names group 16843009 at 0"},
      {"index", Set(kLayer + "g_idx", "I32", {31}, words(31)), "g_idx has 31 elements"},
  });
  config_.erase("quantization_config");
  Write("model.safetensors", good_.Bytes());
  Write("config.json", config_.dump());
  ExpectRefused(Load(folder_.path()), folder_.path(), "config.json's quantization_config");
}

TEST_F(SpoiledCheckpoint, CompressedIntegers) {
  Copy("compressed-w4a16-order");  // up_proj is [48, 32] in groups of 16
  const std::string named = "tensor '" + kWeight;
  const auto words = [](int64_t count) { return std::string(static_cast<size_t>(4 * count), 1); };
  ExpectRefusedRows({
      {"no shape", Erase(kWeight + "_shape"), named + "_shape' is missing"},
      {"shape", Set(kWeight + "_shape", "I32", {2}, std::string(8, 0)),
       "_shape' says 0, expected 1"},
      {"no scale", Erase(kWeight + "_scale"), named + "_scale' is missing"},
      {"words", Set(kWeight + "_packed", "I32", {48, 3}, words(144)),
       "has shape [48, 3], expected [48, 4] or [48, 8] words"},
      {"groups", Set(kWeight + "_scale", "BF16", {48, 3}, std::string(288, 1)),
       "has 3 groups for 32 columns, expected a number that divides"},
      {"scales", Set(kWeight + "_scale", "BF16", {40, 2}, std::string(160, 1)),
       "expected [48, gro"},
      {"scale NaN", Set(kWeight + "_scale", "F16", {48, 2}, std::string(192, '\x7e')), "has nan"},
      {"zeros", Set(kWeight + "_zero_point", "I32", {6, 1}, words(6)), "qzeros has 6 elements"},
      {"order", Set(kWeight + "_g_idx", "I32", {32}, words(32)), "g_idx names group 16843009 at 0"},
  });
}

TEST_F(SpoiledCheckpoint, CompressedInt8) {
  Copy("compressed-w8a8");
  ExpectRefusedRows({
      {"no scale", Erase(kWeight + "_scale"), "'" + kWeight + "_scale' is missing"},
      {"groups", Set(kWeight + "_scale", "BF16", {48, 5}, std::string(480, 1)), "has 5 groups"},
      {"zeros", Set(kWeight + "_zero_point", "I8", {2}, "ab"), "_zero_point' is I8 [2]"},
  });
}

TEST_F(SpoiledCheckpoint, Nvfp4) {
  for (const auto& [folder, whole] :
       {std::pair("compressed-nvfp4", "_global_scale"), std::pair("modelopt-nvfp4", "_scale_2")}) {
    Copy(folder);
    ExpectRefusedRows({
        {"no scale of all", Erase(kWeight + whole), Str("weight", whole, "' is missing")},
        {"zero", Set(kWeight + whole, "F32", Json::array(), std::string(4, 0)),
         "is 0, expected more"},
        {"scales", Set(kWeight + "_scale", "F8_E4M3", {48, 1}, std::string(48, 1)),
         "has shape [48, 1] beside codes of [48, 32], expected [48, 2]"},
        {"NaN", Set(kWeight + "_scale", "F8_E4M3", {48, 2}, std::string(96, '\x7f')),
         "is NaN at element 0"},
    });
  }
}

TEST_F(SpoiledCheckpoint, GptqActOrder) {
  Copy("gptq-act-v1");  // up_proj is [96, 64] in groups of 32
  const auto group = [&](size_t column, int32_t value) {
    return [=](Safetensors& file) {
      const size_t begin = file.header.at(kLayer + "g_idx")["data_offsets"][0];
      std::memcpy(file.data.data() + begin + 4 * column, &value, 4);
    };
  };
  const std::string named = "tensor '" + kLayer + "qweight': ";
  ExpectRefusedRows({
      {"beyond", group(9, 2), named + "g_idx names group 2 at 9, expected 0 to 1"},
      {"negative", group(63, -1), named + "g_idx names group -1 at 63"},
      {"length", Set(kLayer + "g_idx", "I32", {8}, std::string(32, 0)), "g_idx has 8 elements"},
      {"type", Set(kLayer + "g_idx", "I64", {64}, std::string(512, 0)), "g_idx' is I64 [64]"},
      {"NaN", Set(kLayer + "scales", "F16", {2, 96}, std::string(384, '\x7e')), "is nan"},
  });
}

// Rules of `dynamic`: shapes say how a matrix differs from the rest.
TEST_F(SpoiledCheckpoint, GptqMixed) {
  Copy("gptqmodel-mixed");
  const std::string down = "model.layers.0.mlp.down_proj.";  // [64, 96] of 8 bits in groups of 16
  const std::string named = "tensor '" + down + "qweight' ";
  const auto bytes = [](size_t count) { return std::string(count, 1); };
  ExpectRefusedRows({
      {"2 bits", Set(down + "qzeros", "I32", {6, 4}, bytes(96)), named + "is of 2 bits by its"},
      {"vector", Set(down + "qzeros", "I32", {96}, bytes(384)),
       "has shape [96], expected a matrix"},
      {"empty", Set(down + "qzeros", "I32", {0, 16}, ""), "has shape [0, 16], expected a matrix"},
      {"groups", Set(down + "scales", "F16", {5, 64}, bytes(640)),
       named + "has 5 groups of scales"},
      {"scales", Set(down + "scales", "I32", {6, 64}, bytes(1536)), "is I32 [6, 64], expected F16"},
      {"no scales", Set(down + "scales", "F16", {0, 64}, ""), "expected an I32 matrix with"},
      {"codes", Set(down + "qweight", "I32", {12, 64}, bytes(3072)), "expected [64, 96]"},
  });
  // Without the rules, the matrix is not what the file says of all.
  config_["quantization_config"].erase("dynamic");
  Write("model.safetensors", good_.Bytes());
  Write("config.json", config_.dump());
  ExpectRefused(Load(folder_.path()), folder_.path(), down + "weight' has shape");
}

// One matrix that is not symmetric: no zero point's meaning is guessed from its value any more.
TEST(GptqRules, SymmetricIsWhatAllMatricesAre) {
  Json config;
  Json& section = config["quantization_config"];
  section = {{"quant_method", "gptq"}, {"bits", 4}, {"sym", true}};
  section["dynamic"] = {{"+:.*down_proj", {{"bits", 8}}}};
  EXPECT_TRUE(ReadHfQuantization(config, "config.json")->symmetric);
  section["dynamic"]["+:.*up_proj"] = {{"sym", false}};
  EXPECT_FALSE(ReadHfQuantization(config, "config.json")->symmetric);
}

// FP8 with the blocks of each of its groups of matrices.
Json CompressedTensors(const std::vector<Json>& blocks) {
  Json section = {{"quant_method", "compressed-tensors"}, {"format", "float-quantized"}};
  for (size_t i = 0; i < blocks.size(); ++i) {
    section["config_groups"]["group_" + std::to_string(i)]["weights"]["block_structure"] =
        blocks[i];
  }
  return section;
}

TEST_F(SpoiledCheckpoint, BlocksOfCompressedTensorsAreRead) {
  Copy("fp8-block");
  config_["quantization_config"] = CompressedTensors({{16, 20}, nullptr});
  Write("config.json", config_.dump());
  EXPECT_EQ(Load(folder_.path()), absl::OkStatus());
}

TEST_F(SpoiledCheckpoint, Configuration) {
  Copy("fp8-block");
  const std::pair<Json, const char*> rows[] = {
      {3, "quantization_config is not an object"},
      {{{"quant_method", "hqq"}}, "quant_method is 'hqq', expected one of bitsandbytes, fp8"},
      {{{"quant_method", "gptq"}, {"bits", 3}}, "bits is 3, expected 4 or 8"},
      {{{"quant_method", "awq"}, {"bits", 8}}, "bits is 8, expected 4"},
      {{{"quant_method", "gptq"}, {"group_size", 0}}, "group_size is 0, expected -1 or 1 to 2^30"},
      {{{"quant_method", "gptq"}, {"checkpoint_format", "marlin"}},
       "checkpoint_format is 'marlin'"},
      {{{"quant_method", "awq"}, {"version", "gemv"}}, "version is 'gemv', expected one of gemm"},
      {{{"quant_method", "gptq"}, {"format", "gptq_p"}}, "checkpoint_format is 'gptq_p'"},
      {{{"quant_method", "gptq"}, {"rotation", "hadamard"}}, "rotation is \"hadamard\", whose"},
      {{{"quant_method", "awq"}, {"rotation", "random"}}, "rotation is \"random\", whose"},
      {{{"quant_method", "gptq"}, {"dynamic", 3}}, "dynamic is not an object"},
      {{{"quant_method", "gptq"}, {"dynamic", {{"+:a", 3}}}}, "dynamic's '+:a' is not an object"},
      {{{"quant_method", "gptq"}, {"dynamic", {{"b", {{"format", "gptq_v2"}}}}}},
       "dynamic's 'b' has a format of its own, \"gptq_v2\", expected \"gptq\""},
      {{{"bits", 4}}, "quant_method is missing"},
      {{{"quant_method", "compressed-tensors"}, {"format", "marlin-24"}},
       "format is 'marlin-24', expected one of float-quantized"},
      {{{"quant_method", "compressed-tensors"},
        {"format", "pack-quantized"},
        {"transform_config", {{"config_groups", 1}}}},
       "transform_config is set, whose rotation"},
      {{{"quant_method", "compressed-tensors"},
        {"format", "int-quantized"},
        {"sparsity_config", {{"format", "sparse-24-bitmask"}}}},
       "sparsity_config.format is \"sparse-24-bitmask\", expected dense"},
      {{{"quant_method", "modelopt"}, {"quant_algo", "W4A8_AWQ"}},
       "quant_algo is 'W4A8_AWQ', expected one of NVFP4, FP8"},
      {{{"quant_method", "bitsandbytes"}, {"llm_int8_threshold", -1}}, "llm_int8_threshold is not"},
      {{{"quant_method", "bitsandbytes"}, {"llm_int8_threshold", "6"}},
       "llm_int8_threshold is not"},
      {{{"quant_method", "fp8"}, {"weight_block_size", {0, 20}}}, "weight_block_size is not two"},
      {{{"quant_method", "fp8"}, {"weight_block_size", {16, 10}}}, "expected one number, [36]"},
      {CompressedTensors({{16, 10}}), "expected one number, [36]"},
      {CompressedTensors({{16, 20}, {16, 10}}), "block_structure is [16,20] and [16,10], expected"},
      {CompressedTensors({"16x20"}), "block_structure is not two integers"},
  };
  for (const auto& [section, message] : rows) {
    SCOPED_TRACE(message);
    Json config = config_;
    config["quantization_config"] = section;
    Write("config.json", config.dump());
    ExpectRefused(Load(folder_.path()), folder_.path(), message);
  }
}

// Whatever the bytes, an answer.
TEST_F(SpoiledCheckpoint, RandomMutationsNeverCrash) {
  std::mt19937 random(31);
  for (const char* name :
       {"nf4-dq", "int8", "fp8-block", "gptq-v1", "gptq-act-v1", "gptqmodel-mixed"}) {
    Copy(name);
    const std::string good = good_.Bytes();
    const size_t header = good.size() - good_.data.size();
    for (int i = 0; i < 150; ++i) {
      const std::string bad = Mutate(good, i % 2 == 0 ? header : good.size(), random);
      Write("model.safetensors", bad);
      const absl::Status status = Load(folder_.path());
      EXPECT_EQ(std::string(status.message()).find('\n'), std::string::npos) << status;
    }
  }
}

}  // namespace
}  // namespace treadle
