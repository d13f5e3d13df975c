#include "engine/remote/worker/held_stage.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "engine/remote/control.pb.h"
#include "models/checkpoints/fingerprint.h"

namespace treadle {
namespace {

absl::Status OtherModel(const std::string& whose, const std::string& sum,
                        const std::string& wanted) {
  return absl::FailedPreconditionError(Str(whose, " another file: SHA-256 ", sum.substr(0, 16),
                                           "..., expected ", wanted.substr(0, 16), "..."));
}

}  // namespace

absl::Status CheckModel(const Checkpoint& own, const control::Configure& wanted,
                        const std::string& files) {
  if (!files.empty() && FilesHere(own) == files) return absl::OkStatus();
  TREADLE_ASSIGN_OR_RETURN(const ModelIdentity identity, IdentityOf(own));
  if (identity.fingerprint == wanted.fingerprint()) return absl::OkStatus();
  const size_t common = std::min<size_t>(identity.files.size(), wanted.files_size());
  for (size_t i = 0; i < common; ++i) {
    const std::string& expected = wanted.files(static_cast<int>(i)).sha256();
    if (identity.files[i].sum == expected) continue;
    return OtherModel(Str("its model's ", identity.files[i].path, " is"), identity.files[i].sum,
                      expected);
  }
  return OtherModel(Str("its model ", own.path(), " is"), identity.fingerprint,
                    wanted.fingerprint());
}

HeldStage::HeldStage(Options options)
    : options_(std::move(options)), configuration_(std::make_unique<control::Configure>()) {}

HeldStage::~HeldStage() { Drop(); }

void HeldStage::Drop() {
  options_.gone();
  stage_.reset();
}

absl::Status HeldStage::Load(const StageSource& source) {
  Drop();
  for_guest_ = false;
  options_.log(
      Str("loading layers ", configuration_->first_layer(), " to ", configuration_->end_layer()));
  TREADLE_ASSIGN_OR_RETURN(const std::shared_ptr<const Checkpoint> checkpoint,
                           source.open(*configuration_));
  auto loaded = WorkerStage::Load(*configuration_, *checkpoint, options_.ranks, source.progress);
  source.loaded();
  TREADLE_ASSIGN_OR_RETURN(stage_, std::move(loaded));
  return absl::OkStatus();
}

absl::Status HeldStage::Configure(const control::Configure& wanted, const StageSource& source) {
  const std::string configured = wanted.SerializeAsString();
  if (stage_ != nullptr && configured == configured_) return absl::OkStatus();
  *configuration_ = wanted;
  configured_.clear();
  TREADLE_RETURN_IF_ERROR(Load(source));
  configured_ = configured;
  return absl::OkStatus();
}

absl::Status HeldStage::Reserve(const PageCounts& kv_pages, const StageSource& source) {
  if (stage_ == nullptr) return absl::FailedPreconditionError("nothing is loaded");
  // A cache of another size: the ranks are made of what was loaded, so that goes too.
  if (ranks() != nullptr && stage_->kv_pages() != kv_pages) TREADLE_RETURN_IF_ERROR(Load(source));
  if (ranks() != nullptr) return absl::OkStatus();
  const absl::Status status =
      stage_->Reserve(kv_pages, options_.memory, configured_, options_.events);
  if (!status.ok()) {
    configured_.clear();
    Drop();
  }
  return status;
}

absl::Status HeldStage::ForGuest(const control::Configure& wanted, bool replace, bool has_master) {
  const bool none = ranks() == nullptr;
  if (none && has_master) {
    return absl::UnavailableError("the worker is loading its master's stage");
  }
  const bool lacks = wanted.first_layer() < configuration_->first_layer() ||
                     wanted.end_layer() > configuration_->end_layer() ||
                     wanted.weights() != configuration_->weights();
  if (none || (for_guest_ && replace && lacks && !has_master && wanted.end_layer() > 0)) {
    return LoadForGuest(wanted);
  }
  if (configuration_->fingerprint() != wanted.fingerprint()) {
    return OtherModel("its stage is", configuration_->fingerprint(), wanted.fingerprint());
  }
  return absl::OkStatus();
}

// Checks alone, where no layers are wanted.
absl::Status HeldStage::LoadForGuest(const control::Configure& wanted) {
  if (options_.model_path.empty()) {
    return absl::FailedPreconditionError(
        "the worker has no model of its own, and no master: start it with --model");
  }
  TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(options_.model_path));
  TREADLE_RETURN_IF_ERROR(CheckModel(*checkpoint, wanted, ""));
  if (wanted.end_layer() == 0) return absl::OkStatus();
  Drop();
  configured_.clear();
  *configuration_ = wanted;
  options_.log(
      Str("loading layers ", wanted.first_layer(), " to ", wanted.end_layer(), ", to train"));
  TREADLE_ASSIGN_OR_RETURN(stage_,
                           WorkerStage::Load(*configuration_, *checkpoint, options_.ranks, {}));
  for_guest_ = true;
  const absl::Status reserved = stage_->Reserve({1, 1}, -1, "", options_.events);
  if (!reserved.ok()) Drop();
  return reserved;
}

}  // namespace treadle
