#include "models/checkpoints/write/hf_matrix_writer.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "kernels/dtype.h"
#include "models/checkpoints/huggingface/safetensors.h"

namespace treadle {

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, size_t header_room) {
  std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter());
  TREADLE_ASSIGN_OR_RETURN(writer->file_, OutputFile::Create(path));
  writer->header_room_ = (header_room + 7) / 8 * 8;
  TREADLE_RETURN_IF_ERROR(
      writer->file_->Append(std::string(sizeof(uint64_t) + writer->header_room_, ' ')));
  return writer;
}

absl::Status SafetensorsWriter::Put(const std::string& name, const std::string& dtype,
                                    const std::vector<int64_t>& shape,
                                    std::span<const std::byte> data) {
  header_[name] = {{"dtype", dtype},
                   {"shape", shape},
                   {"data_offsets", {data_bytes_, data_bytes_ + data.size()}}};
  data_bytes_ += data.size();
  return file_->Append(data);
}

absl::Status SafetensorsWriter::Add(const std::string& name, const std::string& dtype,
                                    const std::vector<int64_t>& shape,
                                    std::span<const std::byte> data) {
  if (data.size() % 8 == 0) return Put(name, dtype, shape, data);
  late_.push_back({name, dtype, shape, {data.begin(), data.end()}});
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish(const std::map<std::string, std::string>& metadata) {
  std::ranges::stable_sort(late_, std::greater(),
                           [](const Late& late) { return SafetensorsDtypeBytes(late.dtype); });
  for (const Late& late : late_) {
    TREADLE_RETURN_IF_ERROR(Put(late.name, late.dtype, late.shape, late.data));
  }
  header_["__metadata__"] = metadata;
  std::string text = header_.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  TREADLE_CHECK(text.size() <= header_room_);
  text.resize(header_room_, ' ');
  const uint64_t length = text.size();
  const std::string size(reinterpret_cast<const char*>(&length), sizeof(length));
  TREADLE_RETURN_IF_ERROR(file_->Overwrite(0, size + text));
  return file_->Finish();
}

namespace {

using Json = nlohmann::json;

template <typename T>
std::span<const std::byte> Bytes(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

absl::Status AddFloats(SafetensorsWriter& writer, const std::string& name,
                       std::span<const float> values) {
  return writer.Add(name, "F32", {static_cast<int64_t>(values.size())}, std::as_bytes(values));
}

absl::Status AddJson(SafetensorsWriter& writer, const std::string& name, const Json& json) {
  const std::string text = json.dump();
  return writer.Add(name, "U8", {static_cast<int64_t>(text.size())},
                    std::as_bytes(std::span(text.data(), text.size())));
}

std::span<const float> CodebookOf(const ConvertedTensor& tensor) {
  return tensor.constants.codebook.empty() ? tensor.format->codebook
                                           : std::span<const float>(tensor.constants.codebook);
}

std::string LayerOf(const std::string& tensor) { return tensor.substr(0, tensor.rfind('.')); }

absl::Status Add4Bit(const ConvertedTensor& tensor, SafetensorsWriter& writer) {
  const std::string& name = tensor.name;
  Json state = {{"quant_type", std::string(tensor.format->name)},
                {"blocksize", tensor.constants.scale_block},
                {"dtype", "float32"},
                {"shape", tensor.shape}};
  const auto bytes = static_cast<int64_t>(tensor.data.size());
  TREADLE_RETURN_IF_ERROR(writer.Add(name, "U8", {bytes, 1}, tensor.data));
  TREADLE_RETURN_IF_ERROR(AddFloats(writer, name + ".quant_map", CodebookOf(tensor)));
  if (tensor.nested) {
    const NestedScales& nested = *tensor.nested;
    state["nested_blocksize"] = 256;
    state["nested_dtype"] = "float32";
    state["nested_offset"] = nested.offset;
    const auto blocks = static_cast<int64_t>(nested.codes.size());
    TREADLE_RETURN_IF_ERROR(writer.Add(name + ".absmax", "U8", {blocks}, Bytes(nested.codes)));
    TREADLE_RETURN_IF_ERROR(AddFloats(writer, name + ".nested_absmax", nested.absmax));
    TREADLE_RETURN_IF_ERROR(AddFloats(writer, name + ".nested_quant_map", DynamicMap()));
  } else {
    TREADLE_RETURN_IF_ERROR(AddFloats(writer, name + ".absmax", tensor.constants.scales));
  }
  return AddJson(writer, Str(name, ".quant_state.bitsandbytes__", tensor.format->name), state);
}

absl::Status AddInt8(const ConvertedTensor& tensor, SafetensorsWriter& writer) {
  const std::string layer = LayerOf(tensor.name);
  // A scale is the 127th part of a float; 127 times it, divided again, is the same one (so for all
  // mantissas).
  std::vector<float> absmax = tensor.constants.scales;
  for (float& scale : absmax) scale *= 127;
  const std::byte row_major{0};
  TREADLE_RETURN_IF_ERROR(writer.Add(tensor.name, "I8", tensor.shape, tensor.data));
  TREADLE_RETURN_IF_ERROR(AddFloats(writer, layer + ".SCB", absmax));
  return writer.Add(layer + ".weight_format", "U8", {}, {&row_major, 1});
}

absl::Status AddFp8(const ConvertedTensor& tensor, SafetensorsWriter& writer) {
  const MatrixConstants& constants = tensor.constants;
  const int64_t n = tensor.shape[0], k = tensor.shape[1];
  if (constants.scale_block != k && constants.scale_block != n * k) {
    return Unimplemented("tensor '", tensor.name, "' has FP8 scales per ", constants.scale_block,
                         " weights, expected one per row of ", k, " or one in all to keep it");
  }
  const int64_t scales = static_cast<int64_t>(constants.scales.size());
  TREADLE_RETURN_IF_ERROR(writer.Add(tensor.name, "F8_E4M3", tensor.shape, tensor.data));
  return writer.Add(tensor.name + "_scale", "F32", {scales, 1}, Bytes(constants.scales));
}

absl::Status AddKBit(const ConvertedTensor& tensor, SafetensorsWriter& writer) {
  std::vector<uint16_t> scales;
  for (const float scale : tensor.constants.scales) scales.push_back(ToHalf(scale).bits);
  const auto bytes = static_cast<int64_t>(tensor.data.size());
  const auto blocks = static_cast<int64_t>(scales.size());
  TREADLE_RETURN_IF_ERROR(writer.Add(tensor.name, "U8", {bytes}, tensor.data));
  TREADLE_RETURN_IF_ERROR(writer.Add(tensor.name + ".scales", "F16", {blocks}, Bytes(scales)));
  TREADLE_RETURN_IF_ERROR(AddFloats(writer, tensor.name + ".codebook", CodebookOf(tensor)));
  return AddJson(writer, tensor.name + ".quant_state.treadle",
                 {{"format", std::string(tensor.format->name)},
                  {"spec", tensor.spec},
                  {"shape", tensor.shape},
                  {"block", tensor.constants.scale_block}});
}

struct Row {
  std::string_view format;
  absl::Status (*add)(const ConvertedTensor&, SafetensorsWriter&);
};
constexpr Row kRows[] = {{"nf4", Add4Bit}, {"fp4", Add4Bit}, {"int8", AddInt8}, {"fp8", AddFp8}};

}  // namespace

absl::Status AddHfTensor(const ConvertedTensor& tensor, SafetensorsWriter& writer) {
  const WeightFormat& format = *tensor.format;
  if (!format.safetensors_dtype.empty()) {
    return writer.Add(tensor.name, std::string(format.safetensors_dtype), tensor.shape,
                      tensor.data);
  }
  const auto* row = std::ranges::find(kRows, format.name, &Row::format);
  if (row != std::end(kRows)) return row->add(tensor, writer);
  if (format.apart()) return AddKBit(tensor, writer);
  return Unimplemented("tensor '", tensor.name, "': a Hugging Face folder has no ", format.name);
}

size_t HfHeaderRoom(const std::string& tensor_name) {
  constexpr size_t kMaxEntries = 6;
  return kMaxEntries * SafetensorsWriter::HeaderRoom(tensor_name + ".quant_state.bitsandbytes__");
}

void HfQuantizationSummary::Note(const ConvertedTensor& tensor, bool linear, bool tied) {
  if (!tensor.format->apart()) {
    if (linear) as_floats_.push_back(LayerOf(tensor.name));
    if (tied) as_floats_.push_back("lm_head");
    return;
  }
  const std::string format(tensor.format->name);
  if (std::ranges::find(formats_, format) == formats_.end()) formats_.push_back(format);
  double_quantized_ |= tensor.nested.has_value();
  beyond_linear_ |= !linear;
}

bool HfQuantizationSummary::ReadByBitsAndBytes() const {
  constexpr std::string_view kTheirs[] = {"nf4", "fp4", "int8"};
  return formats_.size() == 1 && !beyond_linear_ &&
         std::ranges::find(kTheirs, formats_[0]) != std::end(kTheirs);
}

Json HfQuantizationSummary::Config(float outlier_threshold, const std::string& dtype) const {
  if (formats_.empty()) return nullptr;
  if (!ReadByBitsAndBytes()) {
    return {{"quant_method", "treadle"},
            {"formats", formats_},
            {"llm_int8_threshold", outlier_threshold}};
  }
  const bool int8 = formats_[0] == "int8";
  return {{"quant_method", "bitsandbytes"},
          {"load_in_8bit", int8},
          {"load_in_4bit", !int8},
          {"_load_in_8bit", int8},
          {"_load_in_4bit", !int8},
          {"llm_int8_threshold", outlier_threshold},
          {"llm_int8_skip_modules", as_floats_},
          {"llm_int8_enable_fp32_cpu_offload", false},
          {"llm_int8_has_fp16_weight", false},
          {"bnb_4bit_quant_type", int8 ? "fp4" : formats_[0]},
          {"bnb_4bit_use_double_quant", double_quantized_},
          {"bnb_4bit_compute_dtype", dtype},
          {"bnb_4bit_quant_storage", "uint8"}};
}

}  // namespace treadle
