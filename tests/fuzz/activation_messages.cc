// Messages of activations as a stage gets them: the input is a message of one of the wires, or says
// which bytes of a right one are others. Only the right one is taken.
#include "base/status.h"
#include "engine/activation_link.h"
#include "kernels/reference/reference_backend.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace treadle {
namespace {

constexpr WireType kWires[] = {WireType::kF32, WireType::kBf16, WireType::kInt8};
constexpr int64_t kRows = 3;
constexpr LinkMessages::About kAbout = {.epoch = 7, .iteration = 11, .rows = kRows};

LinkMessages& Messages(WireType wire) {
  static Backend& backend = *CreateReferenceBackend().release();
  static std::unique_ptr<LinkMessages> all[std::size(kWires)];
  std::unique_ptr<LinkMessages>& messages = all[static_cast<size_t>(wire)];
  if (messages == nullptr) {
    messages = *LinkMessages::Create(backend, StagingPlace::kHost,
                                     {.hidden = 40, .max_batch_tokens = kRows + 1, .wire = wire});
  }
  return *messages;
}

// The right message, as bytes.
std::string Sealed(WireType wire) {
  LinkMessages& messages = Messages(wire);
  for (int64_t i = 0; i < kRows * 40; ++i) messages.slot(0).rows[i] = static_cast<float>(i) / 8;
  messages.Seal(0, kAbout, {});
  return {reinterpret_cast<const char*>(messages.slot(0).message), messages.MessageBytes(kRows)};
}

void Run(std::string_view bytes) {
  FuzzInput input(bytes);
  const WireType wire = kWires[input.Choose(std::size(kWires))];
  const std::string right = Sealed(wire);
  std::string message = right;
  if (input.Byte() % 2 == 0) {
    const std::string_view rest = input.Rest();
    message.replace(0, std::min(rest.size(), message.size()), rest.substr(0, message.size()));
  }
  while (!input.empty()) {
    const size_t at = input.Number<uint16_t>();
    message[at % message.size()] ^= static_cast<char>(input.Byte());
  }
  LinkMessages& messages = Messages(wire);
  std::memcpy(messages.slot(1).message, message.data(), message.size());
  const absl::Status opened = messages.Open(1, kAbout);
  TREADLE_CHECK(opened.ok() == (message == right));
  TREADLE_CHECK(opened.ok() || absl::IsDataLoss(opened));
}

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (size_t i = 0; i < std::size(kWires); ++i) {
    seeds.push_back(std::string{static_cast<char>(i), '\0'} + Sealed(kWires[i]));
    seeds.push_back(std::string{static_cast<char>(i), '\1', '\4', '\0', '\1'});
  }
  return seeds;
}

}  // namespace

const FuzzTarget kActivationMessagesTarget = {"activation_messages", 600, Seeds, Run};

}  // namespace treadle
