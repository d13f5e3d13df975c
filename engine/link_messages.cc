#include "engine/link_messages.h"

#include <cstring>
#include <string>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

constexpr uint16_t kMagic = 0x4c54;  // "TL"
constexpr size_t kAlignment = 64;

struct Header {
  uint16_t magic = kMagic;
  uint16_t wire = 0;
  uint32_t rows = 0;
  uint64_t epoch = 0;
  uint64_t iteration = 0;
  uint64_t checksum = 0;  // of all that stands before it, and of rows that the host has
};
static_assert(sizeof(Header) == 32 && sizeof(Header) <= kAlignment);

size_t RoundUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

size_t RowBytes(const LinkMessages::Shape& shape) {
  return kAlignment + RoundUp(shape.max_batch_tokens * shape.hidden * sizeof(float));
}
// Bytes for messages that are not made in place.
size_t EncodedRoom(const LinkMessages::Shape& shape) {
  if (shape.wire == WireType::kF32) return 0;
  return kAlignment + RoundUp(EncodedBytes(shape.wire, shape.max_batch_tokens, shape.hidden));
}

std::string Describe(const Header& header) {
  const std::string wire =
      header.wire < std::size(kWireNames) ? std::string(kWireNames[header.wire]) : "unknown";
  return Str("epoch ", header.epoch, ", iteration ", header.iteration, ", ", header.rows,
             " rows of ", wire);
}

Header HeaderOf(WireType wire, const LinkMessages::About& about) {
  return {.wire = static_cast<uint16_t>(wire),
          .rows = static_cast<uint32_t>(about.rows),
          .epoch = about.epoch,
          .iteration = about.iteration};
}

uint64_t ChecksumOf(const Header& header, const std::byte* rows, size_t bytes) {
  const uint64_t seed =
      WireChecksum(0, reinterpret_cast<const std::byte*>(&header), offsetof(Header, checksum));
  return WireChecksum(seed, rows, bytes);
}

absl::Status CheckHeader(const Header& found, uint64_t checksum, const Header& wanted) {
  if (found.magic != kMagic || found.checksum != checksum) {
    return absl::DataLossError(
        Str("a damaged message: checksum ", found.checksum, ", its contents have ", checksum));
  }
  if (found.wire != wanted.wire || found.rows != wanted.rows || found.epoch != wanted.epoch ||
      found.iteration != wanted.iteration) {
    return absl::DataLossError(Str("expected ", Describe(wanted), "; found ", Describe(found)));
  }
  return absl::OkStatus();
}

}  // namespace

size_t WireBytes(WireType wire, int64_t rows, int64_t hidden) {
  return sizeof(Header) + EncodedBytes(wire, rows, hidden);
}

size_t LinkMessages::Bytes(const Shape& shape) {
  return kSlots * (RowBytes(shape) + EncodedRoom(shape));
}

LinkMessages::LinkMessages(Backend& backend, const Shape& shape, Buffer memory, Buffer headers)
    : backend_(backend), shape_(shape), memory_(std::move(memory)), headers_(std::move(headers)) {
  const size_t rows = RowBytes(shape);
  const size_t encoded = EncodedRoom(shape);
  for (size_t i = 0; i < kSlots; ++i) {
    std::byte* const begin = memory_.data() + i * (rows + encoded);
    slots_[i].rows = reinterpret_cast<float*>(begin + kAlignment);
    slots_[i].message = (encoded == 0 ? begin : begin + rows) + kAlignment - sizeof(Header);
  }
}

absl::StatusOr<std::unique_ptr<LinkMessages>> LinkMessages::Create(Backend& backend,
                                                                   StagingPlace place,
                                                                   const Shape& shape) {
  Staging* const staging = backend.staging(place);
  TREADLE_CHECK(place == StagingPlace::kHost || staging != nullptr);
  TREADLE_ASSIGN_OR_RETURN(Buffer memory, staging == nullptr ? backend.Allocate(Bytes(shape))
                                                             : staging->Allocate(Bytes(shape)));
  Buffer headers;
  if (place == StagingPlace::kDevice) {
    TREADLE_ASSIGN_OR_RETURN(
        headers, backend.staging(StagingPlace::kHost)->Allocate(kSlots * sizeof(Header)));
  }
  return std::unique_ptr<LinkMessages>(
      new LinkMessages(backend, shape, std::move(memory), std::move(headers)));
}

void LinkMessages::Seal(size_t slot, const About& about) {
  std::byte* const message = slots_[slot].message;
  Header header = HeaderOf(shape_.wire, about);
  if (on_device()) {
    header.checksum = ChecksumOf(header, nullptr, 0);
    std::byte* const staged = headers_.data() + slot * sizeof(Header);
    std::memcpy(staged, &header, sizeof(header));
    backend_.staging(StagingPlace::kHost)->Upload(message, staged, sizeof(header));
    return;
  }
  std::byte* const rows = message + sizeof(Header);
  if (shape_.wire != WireType::kF32) EncodeRows(shape_.wire, RowsOf(slot, about), rows);
  header.checksum = ChecksumOf(header, rows, Encoded(about));
  std::memcpy(message, &header, sizeof(header));
}

absl::Status LinkMessages::Open(size_t slot, const About& expected) {
  const std::byte* const message = slots_[slot].message;
  const Header wanted = HeaderOf(shape_.wire, expected);
  Header found;
  if (on_device()) {
    backend_.CopyToHost(&found, message, sizeof(found));
    TREADLE_RETURN_IF_ERROR(backend_.Synchronize());
    return CheckHeader(found, ChecksumOf(found, nullptr, 0), wanted);
  }
  std::memcpy(&found, message, sizeof(found));
  const std::byte* const rows = message + sizeof(Header);
  TREADLE_RETURN_IF_ERROR(CheckHeader(found, ChecksumOf(found, rows, Encoded(expected)), wanted));
  if (shape_.wire != WireType::kF32) DecodeRows(shape_.wire, rows, RowsOf(slot, expected));
  return absl::OkStatus();
}

}  // namespace treadle
