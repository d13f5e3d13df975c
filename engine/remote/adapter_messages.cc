#include "engine/remote/adapter_messages.h"

#include <utility>

#include "base/status.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/control_boxes.h"

namespace treadle {
namespace {

void Encode(const StoredTensor& tensor, control::Factor& message) {
  message.set_format(std::string(tensor.format->name));
  for (const int64_t extent : tensor.shape) message.add_shape(extent);
  message.set_data(tensor.data, tensor.bytes);
}

// The data stays the message's.
StoredTensor Decode(const control::Factor& message) {
  return {.format = FindWeightFormat(message.format()),
          .shape = {message.shape().begin(), message.shape().end()},
          .data = reinterpret_cast<const std::byte*>(message.data().data()),
          .bytes = message.data().size()};
}

}  // namespace

absl::Status EncodeAdapter(const AdapterFile& adapter, LayerRange layers,
                           control::Adapter& message) {
  TREADLE_RETURN_IF_ERROR(adapter.Revalidate());
  message.set_path(adapter.path());
  message.set_hash(adapter.hash());
  message.set_hugging_face(adapter.kind() == Container::kHuggingFace);
  for (const AdapterFactors& factors : adapter.factors()) {
    const bool outside = !InLayer(factors.row->part);
    if (!outside && (factors.layer < layers.begin || factors.layer >= layers.end)) continue;
    control::AdapterFactors& sent = *message.add_factors();
    sent.set_name(factors.name);
    sent.set_scale(factors.scale);
    Encode(factors.a, *sent.mutable_a());
    Encode(factors.b, *sent.mutable_b());
  }
  if (adapter.virtual_tokens() > 0) Encode(adapter.soft_prompt(), *message.mutable_soft_prompt());
  const size_t bytes = message.ByteSizeLong();
  if (bytes + 64 <= kMaxMessageBytes) return adapter.CheckUnchanged();
  return ResourceExhausted(adapter.path(), ": takes ", bytes, " bytes for one stage, expected at ",
                           "most ", kMaxMessageBytes, " to be sent to a worker");
}

absl::StatusOr<std::shared_ptr<const AdapterFile>> DecodeAdapter(control::Adapter&& message,
                                                                 const ModelConfig& config) {
  const auto kept = std::make_shared<const control::Adapter>(std::move(message));
  AdapterContents contents = {
      .path = kept->path(),
      .hash = kept->hash(),
      .kind = kept->hugging_face() ? Container::kHuggingFace : Container::kGguf,
      .factors = {},
      .soft_prompt = {},
      .memory = kept};
  for (const control::AdapterFactors& sent : kept->factors()) {
    AdapterFactors& factors = contents.factors.emplace_back();
    factors.name = sent.name();
    factors.scale = sent.scale();
    factors.a = Decode(sent.a());
    factors.b = Decode(sent.b());
  }
  if (kept->has_soft_prompt()) contents.soft_prompt = Decode(kept->soft_prompt());
  return AdapterFile::Make(std::move(contents), config);
}

}  // namespace treadle
