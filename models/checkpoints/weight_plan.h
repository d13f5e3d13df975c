// The plan of matrices that change their format on the way in, and to what: `--weights`.
//
//   nf4                      every matrix of a linear layer, but for embedding and head
//   nf4,lm_head=int8         and the head in LLM.int8()
//   q4_0,ffn_down=q8_0       tensors whose name in the file contains "ffn_down" differ
//   int8,blk.0.=keep         the first layer stays as stored
//   embedding=q8_0           nothing but the token embedding
//   q8_0,experts=nf4         the experts' matrices in fewer bits than the others
//   q4_k_m                   every matrix, embedding and head too, as llama-quantize mixes formats
//
// Names before '=': part of a tensor's name, or `lm_head`, `embedding` or `experts` whatever the
// file calls them (a matrix that is both answers to both). Later entries win. Formats are those of
// ParseQuantizeSpec, and `keep`. A router, whose choices small errors change, stays as stored
// unless its name is asked for.
//
// Thread safety: constant once parsed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/formats/quantize.h"

namespace treadle {

class Checkpoint;
struct Mixture;
struct ModelConfig;
struct StoredTensor;

class WeightPlan {
 public:
  WeightPlan() = default;  // everything as stored
  // The error names the part that is wrong.
  static absl::StatusOr<WeightPlan> Parse(std::string_view text);

  bool empty() const { return entries_.empty(); }
  const std::string& text() const { return text_; }

  // The format to make of a matrix of the checkpoint; null: as stored. Where the columns are no
  // multiple of a format's block, that of GGUF which llama-quantize takes then.
  const QuantizeSpec* For(const StoredTensor& tensor, const Checkpoint& checkpoint) const;
  // The same by the name alone, where no mixture is in the plan. `tied_head`: the embedding is the
  // head too.
  const QuantizeSpec* For(std::string_view tensor, bool tied_head) const;

  // Errors: an entry that no matrix of the checkpoint answers to.
  absl::Status CheckAgainst(const Checkpoint& checkpoint) const;
  // Bytes of all tensors after conversion, as formats count them: what a backend needs at least.
  uint64_t EstimateBytes(const Checkpoint& checkpoint) const;
  uint64_t EstimateBytes(const StoredTensor& tensor, const Checkpoint& checkpoint) const;  // of one
  // A line for the user about matrices that were quantized already, whose errors add up; or empty.
  std::string Notice(const Checkpoint& checkpoint) const;

 private:
  struct Entry {
    std::string text;
    std::string pattern;               // empty: the matrices of linear layers
    std::optional<QuantizeSpec> spec;  // unset: keep, or a mixture
    const Mixture* mixture = nullptr;
  };
  std::string text_;
  std::vector<Entry> entries_;

  const Entry* Find(std::string_view tensor, bool tied_head) const;
  static bool Matches(const Entry& entry, std::string_view tensor, bool tied_head);
};

// The role of a matrix, by its name in the file.
// kSmall: convolutions, and vectors that files keep as matrices.
enum class MatrixRole { kLayer, kEmbedding, kPositions, kHead, kRouter, kSmall };
MatrixRole RoleOf(std::string_view tensor);
// Whether a folder keeps this tensor, if it is dense, as [in, out].
bool TransposedInFolder(const ModelConfig& config, const StoredTensor& tensor);

}  // namespace treadle
