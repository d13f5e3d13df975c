// The activations' way between pipeline stages: rank 0 of a stage receives its input from the
// previous stage and sends its output to the next one, over a Communicator of the pipeline.
//
// A message is a header {magic, epoch, iteration, rows, wire type, checksum} and the encoded rows.
// Both ends know its size from the plan, and the header repeats what the plan said, so that a
// message that is not the one the plan asks for is an error and never a wrong token.
//
// Buffers belong to the link, in the host's memory (where a device has its own: in memory that it
// copies from and to, Backend::staging): three of [max_batch_tokens, hidden] f32 with room for a
// header in front, so that with the fp32 wire activations are received into, computed in, and sent
// from one place. One is received into while the second is computed in and the third is sent from.
// None is written to before its sending is complete.
//
// Wire types: f32 (bit-exact: what N3 speaks of), bf16 (half-even), int8 (dynamic blockwise: blocks
// of 64 within a row, absmax / 127 as fp16 scale, half-even; as in Petals, Borzunov et al.).
//
// Errors: DataLoss for a message that is not the expected one; else the communicator's. An error is
// final. Thread safety: confined to the rank's thread, but for Abort.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/collectives/communicator.h"

namespace treadle {

enum class WireType : uint8_t { kF32, kBf16, kInt8 };
inline constexpr std::string_view kWireNames[] = {"f32", "bf16", "int8"};
constexpr std::string_view Name(WireType wire) { return kWireNames[static_cast<size_t>(wire)]; }

// Of one message of `rows` rows, header included.
size_t WireBytes(WireType wire, int64_t rows, int64_t hidden);

class ActivationLink {
 public:
  struct Options {
    int previous = -1;  // rank of the pipeline's communicator to receive from; -1: first stage
    int next = -1;      // and to send to; -1: last stage
    int64_t hidden = 0;
    int64_t max_batch_tokens = 0;
    WireType wire = WireType::kF32;
  };

  // Bytes that a link allocates.
  static size_t BufferBytes(const Options& options);

  // The link owns the communicator, which must be gone before the link's buffers are. `backend`
  // outlives the link. Errors: of allocation.
  static absl::StatusOr<std::unique_ptr<ActivationLink>> Create(
      Backend& backend, std::unique_ptr<Communicator> pipeline, const Options& options);
  virtual ~ActivationLink() = default;

  // Says that an iteration of so many rows will be received next, after those announced before, so
  // that its receive is posted when a buffer is free: one iteration ahead of what Receive returned.
  // A hint: Receive does without. Ignored if the iteration was announced already.
  virtual absl::Status Announce(uint64_t epoch, uint64_t iteration, int64_t rows) = 0;

  // The next iteration's input, [rows, hidden] f32 of the link's buffers. First stage: a free one
  // to embed into. Valid until the second next call of Receive.
  virtual absl::StatusOr<Tensor> Receive(uint64_t epoch, uint64_t iteration, int64_t rows) = 0;

  // Any thread; as Communicator::Abort.
  virtual void Abort(absl::Status why) = 0;

  // Begins to send what Receive returned for that iteration, the last one or the one before, after
  // the layers ran over it. Not on the last stage.
  virtual absl::Status Send(uint64_t epoch, uint64_t iteration, Tensor hidden) = 0;
};

}  // namespace treadle
