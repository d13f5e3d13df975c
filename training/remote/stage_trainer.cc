#include "training/remote/stage_trainer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/quoted.h"
#include "base/status.h"
#include "engine/choices.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/control_boxes.h"
#include "kernels/cpu/matmul/pack.h"
#include "kernels/cpu/ops/cpu_ops.h"
#include "training/ops/cpu_gradients.h"

namespace treadle {
namespace {

constexpr int64_t kMaxRank = 1024;
constexpr int64_t kMaxSequences = 4096;
constexpr uint32_t kDeadlineMs = 120'000;  // of iterations, of which such a stage has none

absl::Status Refuse(const auto&... parts) { return absl::FailedPreconditionError(Str(parts...)); }

// Numbers that no client of ours sends, which would be bugs of the trainer.
absl::Status CheckNumbers(const ModelConfig& config, const control::TrainHello& hello) {
  const struct {
    const char* name;
    int64_t value, least, most;
  } rows[] = {{"a rank of", hello.rank(), 0, kMaxRank},
              {"batches of sequences", hello.max_sequences(), 1, kMaxSequences},
              {"sequences of tokens", hello.max_length(), 1, config.context}};
  for (const auto& [name, value, least, most] : rows) {
    if (value >= least && value <= most) continue;
    return InvalidArgument("the client wants ", name, " ", value, ", expected ", least, " to ",
                           most);
  }
  if (!(hello.alpha() > 0) || !std::isfinite(hello.alpha())) {
    return InvalidArgument("the client wants an alpha of ", hello.alpha(), ", expected above 0");
  }
  const int64_t tokens = hello.max_sequences() * hello.max_length();
  if (tokens * config.hidden * 4 + 4 * kMaxSequences > static_cast<int64_t>(kMaxMessageBytes)) {
    return ResourceExhausted("the client wants batches of ", tokens, " tokens, expected at most ",
                             static_cast<int64_t>(kMaxMessageBytes) / config.hidden / 4,
                             ", of one message");
  }
  return absl::OkStatus();
}

// Exact arithmetic reads what the stage has packed for its own.
absl::Status CheckArithmetic(const control::Configure& stage, const Decoder& model) {
  if (stage.backend() != "cpu") return Unimplemented("training on a stage on a GPU");
  if (stage.tensor_parallel() != 1) {
    return Unimplemented("training on a stage of ", stage.tensor_parallel(), " ranks");
  }
  const auto mode = ValueOf(kComputeModes, stage.compute());
  if (mode == ComputeMode::kInt8 || mode == ComputeMode::kBf16 || mode == ComputeMode::kMixed) {
    return Unimplemented("training on a stage whose weights are packed for --compute ",
                         stage.compute(), ", expected auto, int16 or exact");
  }
  for (size_t i = 0; i < static_cast<size_t>(model.layers().end - model.layers().begin); ++i) {
    const LayerWeights& layer = model.weights(i);
    for (const Linear* linear : {&layer.q, &layer.k, &layer.v, &layer.qkv, &layer.out, &layer.gate,
                                 &layer.up, &layer.gate_up, &layer.down}) {
      if (!linear->loaded()) continue;
      const auto& weight = static_cast<const CpuMatrix&>(linear->weight());
      if (weight.view().kind != PackKind::kWords) continue;
      return Unimplemented("training on a stage whose ", weight.format().name,
                           " weights --compute ", stage.compute(), " has rounded, expected exact");
    }
  }
  return absl::OkStatus();
}

}  // namespace

control::Configure StageFor(const control::TrainHello& hello) {
  control::Configure stage;
  stage.set_stages(1);
  stage.set_tensor_parallel(1);
  stage.set_first_layer(hello.first_layer());
  stage.set_end_layer(hello.end_layer());
  stage.set_fingerprint(hello.fingerprint());
  stage.set_backend("cpu");
  stage.set_compute(std::string(Name(ComputeMode::kExact)));
  stage.set_weights(hello.weights());
  stage.set_kv_dtype(std::string(Name(DType::kF32)));
  stage.set_wire(std::string(Name(WireType::kF32)));
  stage.set_data_plane(std::string(Name(DataPlane::kGloo)));
  stage.set_max_batch_tokens(1);
  stage.set_page_size(16);
  stage.set_iteration_deadline_ms(kDeadlineMs);
  return stage;
}

absl::Status CheckClient(const LentStage& lent, const control::TrainHello& hello) {
  const control::Configure& stage = lent.configuration;
  const auto& model = static_cast<const Decoder&>(lent.ranks->model());
  const ModelConfig& config = model.config();
  TREADLE_RETURN_IF_ERROR(
      CheckTrainable(config, "the worker's stage",
                     {.rank = hello.rank(), .alpha = hello.alpha(), .targets = hello.targets()}));
  TREADLE_RETURN_IF_ERROR(CheckNumbers(config, hello));
  TREADLE_RETURN_IF_ERROR(CheckArithmetic(stage, model));
  if (stage.weights() != hello.weights()) {
    return Refuse("its weights are ", Quoted(stage.weights()), ", the client's ",
                  Quoted(hello.weights()), " (--weights, of both)");
  }
  if (stage.has_outlier_threshold() || stage.outliers_per_call()) {
    return Unimplemented("training on a stage with a rule of its own for outliers");
  }
  const auto [begin, end] = model.layers();
  if (hello.first_layer() < begin || hello.first_layer() >= hello.end_layer() ||
      hello.end_layer() > end) {
    return Refuse("it has layers ", begin, " to ", end, ", the client wants ", hello.first_layer(),
                  " to ", hello.end_layer());
  }
  const int64_t context = stage.max_context() > 0 ? stage.max_context() : config.context;
  if (hello.max_length() > context) {
    return Refuse("its stage has a context of ", context, " tokens, the client wants ",
                  hello.max_length());
  }
  if (const auto& rope = config.long_rope;
      rope && (context > rope->original_context) != (hello.max_length() > rope->original_context)) {
    return Unimplemented("training on a stage whose rotary factors are for a context of ", context,
                         ", with sequences of ", hello.max_length());
  }
  return absl::OkStatus();
}

absl::Status StageTrainer::Fit(const FrozenLayers::Room& room) {
  if (room.tokens <= room_.tokens && room.pages <= room_.pages) return absl::OkStatus();
  const FrozenLayers::Room most = {std::max(room.tokens, room_.tokens),
                                   std::max(room.pages, room_.pages)};
  if (!tape_) {
    TREADLE_ASSIGN_OR_RETURN(const CpuIsa isa, ChooseIsa());
    auto cpu = std::make_unique<CpuOps>(options_.threads > 0 ? options_.threads : UsableCpus(),
                                        options_.pin, options_.first_cpu, isa, ComputeMode::kExact);
    auto gradients = CreateCpuGradients(*cpu);
    tape_ = std::make_unique<Tape>(std::move(cpu), std::move(gradients));
  }
  TREADLE_ASSIGN_OR_RETURN(auto borrowed, Decoder::Borrow(model_, *tape_, most.tokens));
  TREADLE_ASSIGN_OR_RETURN(auto layers, FrozenLayers::Create(*tape_, *borrowed, most));
  layers_ = std::move(layers);
  borrowed_ = std::move(borrowed);
  room_ = most;
  return absl::OkStatus();
}

}  // namespace treadle
