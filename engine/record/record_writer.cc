#include "engine/record/record_writer.h"

#include "base/status.h"
#include "engine/plan/plan_messages.h"
#include "engine/record/record.pb.h"

namespace treadle {

absl::StatusOr<RecordWriter> RecordWriter::Create(const std::string& path, int64_t most,
                                                  std::string header) {
  TREADLE_ASSIGN_OR_RETURN(RecordFileWriter file, RecordFileWriter::Create(path));
  RecordWriter writer(std::move(file), path, most, std::move(header));
  TREADLE_RETURN_IF_ERROR(writer.file_.Append(writer.header_));
  writer.begun_with_ = writer.file_.bytes();
  return writer;
}

absl::Status RecordWriter::Write(const std::string& bytes) {
  const int64_t after = file_.bytes() + std::ssize(bytes) + kRecordFrameBytes;
  // A file that holds nothing but its beginning is not worth another one.
  if (after > most_ && file_.bytes() > begun_with_) TREADLE_RETURN_IF_ERROR(BeginFile());
  TREADLE_RETURN_IF_ERROR(file_.Append(bytes));
  return Follow(bytes);
}

absl::Status RecordWriter::BeginFile() {
  TREADLE_ASSIGN_OR_RETURN(file_, RecordFileWriter::Create(path_));
  TREADLE_RETURN_IF_ERROR(file_.Append(header_));
  if (!live_.live().empty()) {
    record::Entry entry;
    IterationPlan everything = live_.Everything();
    everything.epoch = answered_.first;
    everything.iteration = answered_.second;
    EncodePlan(everything, *entry.mutable_restored());
    TREADLE_RETURN_IF_ERROR(file_.Append(entry.SerializeAsString()));
  }
  for (const auto& [id, bytes] : adapters_) TREADLE_RETURN_IF_ERROR(file_.Append(bytes));
  for (const Pending& pending : pending_) TREADLE_RETURN_IF_ERROR(file_.Append(pending.bytes));
  for (const auto& [iteration, bytes] : masks_) TREADLE_RETURN_IF_ERROR(file_.Append(bytes));
  begun_with_ = file_.bytes();
  return absl::OkStatus();
}

// Follows an entry, so that the next file can begin with what lives then.
absl::Status RecordWriter::Follow(const std::string& bytes) {
  record::Entry entry;
  TREADLE_CHECK(entry.ParseFromString(bytes));
  if (entry.has_plan()) {
    TREADLE_ASSIGN_OR_RETURN(IterationPlan plan, DecodePlan(entry.plan()));
    pending_.push_back({std::move(plan), bytes});
  } else if (entry.has_masks()) {
    masks_.emplace(Iteration(entry.masks().epoch(), entry.masks().iteration()), bytes);
  } else if (entry.has_adapter()) {
    adapters_[entry.adapter().id()] = bytes;
  } else if (entry.has_epoch_end()) {
    live_.Clear();
    pending_.clear();
    std::erase_if(
        masks_, [&](const auto& masks) { return masks.first.first <= entry.epoch_end().epoch(); });
  } else if (entry.has_result() && !pending_.empty()) {
    TREADLE_ASSIGN_OR_RETURN(const IterationResult result, DecodeResult(entry.result()));
    answered_ = {result.epoch, result.iteration};
    live_.Apply(pending_.front().plan, result);
    masks_.erase(answered_);
    pending_.pop_front();
  }
  return absl::OkStatus();
}

}  // namespace treadle
