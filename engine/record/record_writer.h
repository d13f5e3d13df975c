// Entries of a recording into its generations of files: what can be left behind, what a new file
// has to begin with.
//
// Thread safety: one thread.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "engine/record/live_inputs.h"
#include "engine/record/record_file.h"

namespace treadle {

class RecordWriter {
 public:
  // `header`: an entry. A file may have `most` bytes.
  static absl::StatusOr<RecordWriter> Create(const std::string& path, int64_t most,
                                             std::string header);

  // A serialized entry. Errors are the file's; it ends with the entry before then.
  absl::Status Write(const std::string& bytes);

 private:
  // A plan whose result is not there, as it was told.
  struct Pending {
    IterationPlan plan;
    std::string bytes;
  };
  using Iteration = std::pair<uint64_t, uint64_t>;  // epoch, iteration

  RecordWriter(RecordFileWriter file, const std::string& path, int64_t most, std::string header)
      : file_(std::move(file)), path_(path), most_(most), header_(std::move(header)) {}
  absl::Status Follow(const std::string& bytes);
  absl::Status BeginFile();

  RecordFileWriter file_;
  std::string path_;
  int64_t most_;
  std::string header_;
  int64_t begun_with_ = 0;  // bytes that this file began with

  LiveInputs live_;  // after this one:
  Iteration answered_;
  std::deque<Pending> pending_;
  std::map<uint64_t, std::string> adapters_;     // all so far, as they were told
  std::multimap<Iteration, std::string> masks_;  // of what is pending, or yet to come
};

}  // namespace treadle
