// A Trainer's checkpoints: a .safetensors file of the adapter, the optimizer's moments, the step,
// and the settings, as text.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/json_file.h"
#include "base/mapped_file.h"
#include "base/status.h"
#include "models/checkpoints/huggingface/safetensors.h"
#include "models/checkpoints/write/hf_matrix_writer.h"
#include "training/trainer.h"

namespace treadle {

std::string Trainer::Settings() const {
  const AdamWOptions& adam = options_.optimizer;
  return nlohmann::json({{"lora-rank", options_.lora.rank},
                         {"lora-alpha", options_.lora.alpha},
                         {"target-modules", options_.lora.targets},
                         {"soft-prompt", options_.soft_prompt.virtual_tokens},
                         {"soft-prompt-text", options_.soft_prompt.begin},
                         {"optimizer", adam.eight_bit ? "adamw8bit" : "adamw"},
                         {"learning-rate", adam.learning_rate},
                         {"weight-decay", adam.weight_decay},
                         {"max-gradient-norm", adam.max_gradient_norm},
                         {"warmup", adam.warmup},
                         {"steps", adam.steps},
                         {"batch-size", options_.batch_size},
                         {"gradient-accumulation", options_.accumulation},
                         {"max-length", options_.max_length},
                         {"keep-order", options_.keep_order},
                         {"seed", options_.seed},
                         {"model and data", options_.checkpoint_key}})
      .dump();
}

absl::Status Trainer::WriteCheckpoint(const std::string& path) const {
  const std::string next = path + ".next";
  std::remove(next.c_str());
  TREADLE_ASSIGN_OR_RETURN(const auto writer, SafetensorsWriter::Create(next, 4096));
  const auto add = [&](const char* name, const char* dtype, auto values) {
    return writer->Add(name, dtype, {std::ssize(values)}, std::as_bytes(values));
  };
  TREADLE_RETURN_IF_ERROR(add("values", "F32", adapter_->values()));
  TREADLE_RETURN_IF_ERROR(add("moments", "U8", optimizer_->moments()));
  TREADLE_RETURN_IF_ERROR(add("step", "I64", std::span(&step_, 1)));
  const std::string settings = Settings();
  TREADLE_RETURN_IF_ERROR(add("settings", "U8", std::span(settings)));
  TREADLE_RETURN_IF_ERROR(writer->Finish({}));
  if (std::rename(next.c_str(), path.c_str()) != 0) {
    return InvalidArgument(path, ": cannot be written: ", std::strerror(errno));
  }
  return absl::OkStatus();
}

absl::Status Trainer::Resume(const std::string& path) {
  TREADLE_ASSIGN_OR_RETURN(const auto file, MappedFile::Open(path));
  TREADLE_ASSIGN_OR_RETURN(const auto entries, ReadSafetensors(*file));
  const auto data = [&](const char* name) {
    const auto found = std::ranges::find(entries, name, &SafetensorsEntry::name);
    return found == entries.end() ? std::span<const std::byte>() : found->data;
  };
  const auto text = data("settings");
  TREADLE_ASSIGN_OR_RETURN(
      const nlohmann::json was,
      ParseJsonObject({reinterpret_cast<const char*>(text.data()), text.size()}, path));
  const auto now = nlohmann::json::parse(Settings());
  for (const auto& [name, value] : now.items()) {
    if (was.value(name, nlohmann::json()) == value) continue;
    return InvalidArgument(path, ": was made with another ", name, ": ",
                           was.value(name, nlohmann::json()).dump(), ", now it is ", value.dump());
  }
  const std::pair<const char*, std::span<std::byte>> parts[] = {
      {"values", std::as_writable_bytes(adapter_->values())},
      {"moments", optimizer_->moments()},
      {"step", std::as_writable_bytes(std::span(&step_, 1))}};
  for (const auto& [name, to] : parts) {
    if (data(name).size() != to.size()) {
      return InvalidArgument(path, ": ", name, " has ", data(name).size(), " bytes, expected ",
                             to.size());
    }
  }
  for (const auto& [name, to] : parts) std::ranges::copy(data(name), to.begin());
  TREADLE_RETURN_IF_ERROR(file->CheckUnchanged());
  adapter_->Refresh();
  return absl::OkStatus();
}

}  // namespace treadle
