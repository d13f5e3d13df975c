#include "models/checkpoints/write/importance.h"

#include <cmath>
#include <cstring>

#include "base/quoted.h"
#include "base/status.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/gguf/gguf_file.h"
#include "models/checkpoints/write/gguf_file_writer.h"

namespace treadle {
namespace {

constexpr std::string_view kSquares = ".in_sum2", kCounts = ".counts";
constexpr uint64_t kAlignment = 32;

// "blk.0.ffn_up_exps.3.weight" of "blk.0.ffn_up_exps.weight".
std::string ExpertName(std::string_view all, int64_t expert) {
  const size_t dot = all.rfind('.');
  return Str(all.substr(0, dot), ".", expert, all.substr(dot));
}

// The inverse; the name itself if it is of no expert.
std::string WithoutExpert(const std::string& name) {
  const size_t end = name.rfind('.');
  const size_t begin = name.find("_exps.");
  if (begin == name.npos || end <= begin + 6) return name;
  return name.substr(0, begin + 5) + name.substr(end);
}

}  // namespace

void Importance::Add(std::string_view name, const float* values, int64_t rows, int64_t columns,
                     int64_t stride) {
  auto found = sums_.find(name);
  if (found == sums_.end()) found = sums_.emplace(std::string(name), Sums()).first;
  Sums& sums = found->second;
  sums.squares.resize(static_cast<size_t>(columns));
  sums.rows += rows;
  for (int64_t row = 0; row < rows; ++row, values += stride) {
    for (int64_t i = 0; i < columns; ++i) sums.squares[i] += values[i] * values[i];
  }
}

std::vector<float> Importance::Of(std::string_view name) const {
  const auto found = sums_.find(name);
  if (found == sums_.end()) return {};
  const Sums& sums = found->second;
  std::vector<float> means(sums.squares.size(), 1.0f);
  for (size_t i = 0; i < means.size() && sums.rows > 0; ++i) {
    means[i] = sums.squares[i] / static_cast<float>(sums.rows);
  }
  return means;
}

absl::StatusOr<Importance> Importance::Read(const std::string& path) {
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> file, GgufFile::Read(path));
  TREADLE_ASSIGN_OR_RETURN(const std::string type, file->String("general.type", ""));
  if (type != "imatrix") {
    return InvalidArgument(path, ": general.type is ", Quoted(type),
                           ", expected imatrix (an importance matrix of llama.cpp)");
  }
  std::map<std::string_view, const StoredTensor*> tensors;
  for (const StoredTensor& tensor : file->tensors()) tensors[tensor.name] = &tensor;
  Importance importance;
  for (const auto& [name, tensor] : tensors) {
    if (!name.ends_with(kSquares)) continue;
    const std::string_view matrix = name.substr(0, name.size() - kSquares.size());
    const int64_t columns = tensor->shape.back();
    const int64_t matrices = tensor->Elements() / columns;
    const auto counts = tensors.find(Str(matrix, kCounts));
    if (counts == tensors.end() || counts->second->Elements() != matrices ||
        tensor->format->name != "f32" || counts->second->format->name != "f32") {
      return InvalidArgument(path, ": tensor ", Quoted(name), " is of ", matrices, " matrices in ",
                             tensor->format->name, ", expected f32, and as many numbers in ",
                             Quoted(Str(matrix, kCounts)));
    }
    for (int64_t i = 0; i < matrices; ++i) {
      Sums& sums = importance.sums_[matrices == 1 ? std::string(matrix) : ExpertName(matrix, i)];
      sums.squares.resize(static_cast<size_t>(columns));
      const auto row_bytes = static_cast<size_t>(columns) * sizeof(float);
      std::memcpy(sums.squares.data(), tensor->data + static_cast<size_t>(i) * row_bytes,
                  row_bytes);
      float rows;
      std::memcpy(&rows, counts->second->data + static_cast<size_t>(i) * sizeof(float),
                  sizeof(rows));
      if (!(rows >= 0 && rows < 0x1p62f)) {
        return InvalidArgument(path, ": ", Quoted(Str(matrix, kCounts)), " has ", rows,
                               ", expected a number of rows");
      }
      sums.rows = static_cast<int64_t>(rows);
      for (const float square : sums.squares) {
        if (!(square >= 0) || std::isinf(square)) {
          return InvalidArgument(path, ": tensor ", Quoted(name), " has ", square,
                                 ", expected sums of squares");
        }
      }
    }
  }
  if (importance.empty()) {
    return InvalidArgument(path, ": has no tensor NAME", kSquares, ", expected one of each matrix");
  }
  return importance;
}

absl::Status Importance::Write(const std::string& path, const std::string& text, int64_t chunks,
                               int64_t chunk_tokens) const {
  // The sums of experts' matrices lie in one tensor, in order of their numbers.
  std::map<std::string, std::map<int64_t, const Sums*>> all;
  for (const auto& [name, sums] : sums_) {
    const std::string whole = WithoutExpert(name);
    const bool expert = whole.size() < name.size();
    const size_t number = name.find("_exps.") + 6;
    all[whole][expert ? std::stoll(name.substr(number)) : 0] = &sums;
  }
  GgufMetadataWriter metadata;
  const std::vector<std::string> texts = {text};
  metadata.Add("general.type", std::string_view("imatrix"));
  metadata.Add("imatrix.datasets", std::span<const std::string>(texts));
  metadata.Add("imatrix.chunk_count", static_cast<uint32_t>(chunks));
  metadata.Add("imatrix.chunk_size", static_cast<uint32_t>(chunk_tokens));
  std::vector<GgufFileWriter::Tensor> tensors;
  std::vector<float> values;
  for (const auto& [name, of] : all) {
    const size_t columns = of.begin()->second->squares.size();
    const int64_t matrices = of.rbegin()->first + 1;
    const WeightFormat* const f32 = FindWeightFormat("f32");
    tensors.push_back({Str(name, kSquares), {matrices, static_cast<int64_t>(columns)}, f32});
    tensors.push_back({Str(name, kCounts), {matrices, 1}, f32});
    std::vector<float> counts;
    for (int64_t i = 0; i < matrices; ++i) {
      const auto found = of.find(i);  // an expert that no row met has none
      const std::vector<float> none(columns);
      const std::vector<float>& squares = found == of.end() ? none : found->second->squares;
      TREADLE_CHECK(squares.size() == columns);
      values.insert(values.end(), squares.begin(), squares.end());
      counts.push_back(found == of.end() ? 0.0f : static_cast<float>(found->second->rows));
    }
    values.insert(values.end(), counts.begin(), counts.end());
  }
  TREADLE_ASSIGN_OR_RETURN(const auto writer,
                           GgufFileWriter::Create(path, metadata, tensors, kAlignment));
  const float* at = values.data();
  for (const GgufFileWriter::Tensor& tensor : tensors) {
    const auto count = static_cast<size_t>(tensor.shape[0] * tensor.shape[1]);
    TREADLE_RETURN_IF_ERROR(writer->Add(std::as_bytes(std::span(at, count))));
    at += count;
  }
  return writer->Finish();
}

}  // namespace treadle
