// The messages of an ActivationLink: where they lie, and how they are sealed and opened.
//
// A message is a header {magic, wire type, rows, epoch, iteration, checksum} and the encoded rows
// behind it, wherever it lies. One message and one way: a header that travelled apart from its rows
// could be taken for the header of others.
//
// In the host's memory the checksum is of header and rows. On a device the host writes and reads
// the header by copies of its own (32 bytes), and the checksum is of the header alone: reading the
// rows would cost what the device's way saves, and the way itself has checks (those of NVLink, PCIe
// and InfiniBand). A header of old or foreign memory, of another epoch or another plan is found in
// both places.
//
// Thread safety: confined to the rank's thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "engine/wire_codec.h"
#include "kernels/backend.h"

namespace treadle {

// Bytes of one message of `rows` rows, header included.
size_t WireBytes(WireType wire, int64_t rows, int64_t hidden);

class LinkMessages {
 public:
  static constexpr size_t kSlots = 3;

  struct Shape {
    int64_t hidden = 0;
    int64_t max_batch_tokens = 0;
    WireType wire = WireType::kF32;  // on a device: f32
  };
  // What a message is about.
  struct About {
    uint64_t epoch = 0;
    uint64_t iteration = 0;
    int64_t rows = 0;
  };
  // Room for one message.
  struct Slot {
    std::byte* message = nullptr;
    float* rows = nullptr;  // [max_batch_tokens, hidden]; with f32, behind the message's header
  };

  static size_t Bytes(const Shape& shape);
  // `backend` outlives it. kDevice: of a backend with staging. Errors: of allocation.
  static absl::StatusOr<std::unique_ptr<LinkMessages>> Create(Backend& backend, StagingPlace place,
                                                              const Shape& shape);

  const Slot& slot(size_t index) const { return slots_[index]; }
  size_t MessageBytes(int64_t rows) const { return WireBytes(shape_.wire, rows, shape_.hidden); }

  // Makes the slot's rows a message. In the host's memory: now, so the rows must be there. On a
  // device: in the order of ops; the slot's header must not be sealed again before that has run.
  void Seal(size_t slot, const About& about);
  // Checks the message in the slot, which is there, and leaves its rows in slot().rows. DataLoss:
  // it is damaged, or about something else. On a device: the device's own errors, too.
  absl::Status Open(size_t slot, const About& expected);

 private:
  LinkMessages(Backend& backend, const Shape& shape, Buffer memory, Buffer headers);
  bool on_device() const { return headers_.data() != nullptr; }
  size_t Encoded(const About& about) const {
    return EncodedBytes(shape_.wire, about.rows, shape_.hidden);
  }
  Tensor RowsOf(size_t slot, const About& about) const {
    return DenseTensor(slots_[slot].rows, DType::kF32, about.rows, shape_.hidden);
  }

  Backend& backend_;
  const Shape shape_;
  const Buffer memory_;
  const Buffer headers_;  // [kSlots] for uploads from page-locked memory; none in the host's
  std::array<Slot, kSlots> slots_;
};

}  // namespace treadle
