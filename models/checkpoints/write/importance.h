// Importance of matrices' columns: the mean square of what each column is multiplied by over a
// text, by which quantizers weigh errors. In files as llama.cpp's imatrix has them: GGUF, with
// tensors NAME.in_sum2 [matrices, columns] and NAME.counts [matrices, 1] for each matrix (or all
// experts') NAME.
//
// Thread safety: distinct objects are independent.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace treadle {

class Importance {
 public:
  // Rows [rows, columns] that the matrix `name` is multiplied by. Names are those of GGUF files,
  // experts' matrices one by one ("blk.0.ffn_up_exps.3.weight").
  void Add(std::string_view name, const float* values, int64_t rows, int64_t columns,
           int64_t stride);

  bool empty() const { return sums_.empty(); }
  size_t size() const { return sums_.size(); }
  // [columns]; 1 for a matrix that no row met; empty: nothing is known of the matrix.
  std::vector<float> Of(std::string_view name) const;

  static absl::StatusOr<Importance> Read(const std::string& path);
  // text: the path of what was read, in chunks of so many tokens.
  absl::Status Write(const std::string& path, const std::string& text, int64_t chunks,
                     int64_t chunk_tokens) const;

 private:
  struct Sums {
    std::vector<float> squares;
    int64_t rows = 0;
  };
  std::map<std::string, Sums, std::less<>> sums_;
};

}  // namespace treadle
