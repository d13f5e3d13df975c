// The bytes of a segment of stored requests: a header, then frames, little-endian.
//
//   header  magic (8 bytes; the last one counts formats), the store's id (8, random), the next
//           request number when the segment was begun (8), the size of the segment before (8; 0:
//           not known), a checksum over these (8)
//   frame   marker (8), checksum (8), request number (8), bytes of the payload (4), index (4),
//           attempt (4), the attempt's first index (4), payload
//
// Marker and checksum depend on the store's id, so that neither another store's frames nor what a
// client sends look like a frame. The checksum covers the request number and all that follows: a
// frame whose bytes changed is none, and one that is found elsewhere is still the piece of the
// request that it says.
//
// Index 0 is the request's id and owner, 1 the request, further ones the pieces of its answer; the
// frames of a request have all indexes from 0 on. The frame kGone says that the request was
// deleted. Pieces that are lost are computed again in a new attempt, which replaces what earlier
// attempts wrote from its first index on.
//
// Thread safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace treadle {

inline constexpr size_t kFrameBytes = 40;  // of a frame, beside its payload
inline constexpr uint32_t kHead = 0, kRequest = 1, kFirstPiece = 2, kGone = ~uint32_t{0};

struct Frame {
  uint64_t number = 0;  // of the request; a store never uses one again
  uint32_t index = 0;
  uint32_t attempt = 0;
  uint32_t first = 0;  // index of the attempt
  std::string_view payload = {};

  size_t bytes() const { return kFrameBytes + payload.size(); }
};

void AppendFrame(uint64_t store, const Frame& frame, std::string& bytes);
// The frame that begins at `at`; nothing if there is none, or it is damaged. Its payload points
// into `bytes`.
std::optional<Frame> FrameAt(uint64_t store, std::string_view bytes, size_t at);

struct SegmentHeader {
  static constexpr size_t kBytes = 40;

  uint64_t store = 0;
  uint64_t next_number = 1;
  uint64_t bytes_before = 0;

  std::string ToBytes() const;
  // Nothing if there is none, or it is damaged. FailedPrecondition: it has another format.
  static absl::StatusOr<std::optional<SegmentHeader>> In(std::string_view bytes);
};

struct SegmentScan {
  size_t end = SegmentHeader::kBytes;  // behind the last whole frame
  size_t dropped = 0;                  // damaged bytes before that
  bool torn = true;  // what follows the end is a frame that is not whole, or nothing
};
// Takes every whole frame of a segment, in order, with its place.
SegmentScan ScanSegment(uint64_t store, std::string_view bytes,
                        const std::function<void(size_t at, const Frame&)>& take);

}  // namespace treadle
