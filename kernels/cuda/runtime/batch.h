// An iteration's description on the device: what Backend::BeginBatch uploads in one copy, and what
// kernels read. Addresses stay the same from batch to batch, so captured graphs read the current
// one; counts that a graph's launches depend on are upper bounds there (padded rows and sequences),
// and kernels look at the real ones here.
#pragma once

#include <cstdint>

#include "kernels/sampling.h"

namespace treadle::cuda {

// Rows [first_row, first_row + num_rows) at positions from first_position on. num_rows 0: none.
struct DeviceSequence {
  int32_t first_row = 0;
  int32_t num_rows = 0;
  int32_t first_position = 0;
  int32_t first_page = 0;  // of its page ids, in DeviceBatch::pages
};

// A SampleRow without pointers: lists are ranges of the arrays below.
struct DeviceSampleRow {
  float temperature = 1;
  float top_p = 1;
  float min_p = 0;
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  int32_t top_k = 0;
  uint32_t candidate = 0;
  uint64_t seed = 0;
  int64_t position = 0;
  int32_t sample = 0;  // 0: log probabilities only
  int32_t top_logprobs = -1;
  int32_t target = -1;
  int32_t first_count = 0, num_counts = 0;
  int32_t first_suppressed = 0, num_suppressed = 0;
  int32_t first_bias = 0, num_biases = 0;
  int32_t first_mask_word = -1;  // -1: no mask
};
// Without the lists.
inline DeviceSampleRow FlatRow(const SampleRow& row) {
  const SamplingParameters none;
  const SamplingParameters& wishes = row.parameters == nullptr ? none : *row.parameters;
  return {.temperature = wishes.temperature,
          .top_p = wishes.top_p,
          .min_p = wishes.min_p,
          .repetition_penalty = wishes.repetition_penalty,
          .presence_penalty = wishes.presence_penalty,
          .frequency_penalty = wishes.frequency_penalty,
          .top_k = wishes.top_k,
          .candidate = row.candidate,
          .seed = wishes.seed,
          .position = row.position,
          .sample = row.parameters == nullptr ? 0 : 1,
          .top_logprobs = row.top_logprobs,
          .target = row.target};
}

// Device addresses. A parameter of kernels by value.
struct DeviceBatch {
  int32_t rows = 0;           // upper bound: what launches are sized for
  int32_t num_sequences = 0;  // upper bound; sequences beyond the real ones have num_rows 0
  // The longest first_position + num_rows of any sequence: an upper bound, for grids.
  int32_t max_context = 0;
  // The largest num_rows of any sequence: an upper bound.
  int32_t max_sequence_rows = 0;
  const int32_t* token_ids = nullptr;  // [rows]; -1: zeros; -2 - r: see Backend::Embed
  // [num_sequences], in ascending order of their rows; those without rows last.
  const DeviceSequence* sequences = nullptr;
  const DeviceSequence* window_sequences = nullptr;  // likewise, with their window pages; or null
  const int32_t* pages = nullptr;            // page ids of all sequences, one after the other
  const int32_t* row_sequence = nullptr;     // [rows] index into sequences; -1: none
  const int32_t* row_position = nullptr;     // [rows]
  const int32_t* output_rows = nullptr;      // [num_samples]; -1: none
  const DeviceSampleRow* samples = nullptr;  // [num_samples]
  const TokenCount* counts = nullptr;
  const int32_t* suppressed = nullptr;
  const LogitBias* biases = nullptr;
  const uint32_t* mask_words = nullptr;
  int32_t num_output_rows = 0;  // upper bound
};

}  // namespace treadle::cuda
