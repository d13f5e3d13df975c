#include "server/durable/stored_frame.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/checksum.h"
#include "base/status.h"

namespace treadle {
namespace {

static_assert(std::endian::native == std::endian::little);

// The last byte counts formats. A change that an older program would misread raises it.
constexpr std::string_view kMagic = "TREADST\1";

struct FrameHead {
  uint64_t marker, checksum, number;
  uint32_t bytes, index, attempt, first;
};
static_assert(sizeof(FrameHead) == kFrameBytes);
constexpr size_t kUnsummed = offsetof(FrameHead, number);

struct HeaderBytes {
  char magic[8];
  uint64_t store, next_number, bytes_before, checksum;
};
static_assert(sizeof(HeaderBytes) == SegmentHeader::kBytes);

uint64_t ChecksumOf(uint64_t seed, std::string_view bytes) {
  return Checksum(seed, reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
}
uint64_t MarkerOf(uint64_t store) { return ChecksumOf(store, kMagic); }

template <typename T>
T Read(std::string_view bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}
template <typename T>
std::string_view AsBytes(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// Whether the rest is what a process, or a machine, leaves that ends while a frame is appended.
bool IsTorn(uint64_t store, std::string_view rest) {
  const uint64_t marker = MarkerOf(store);
  const size_t known = std::min(rest.size(), sizeof marker);
  const bool begins = rest.substr(0, known) == AsBytes(marker).substr(0, known);
  if (begins && rest.size() < kFrameBytes) return true;
  if (begins && Read<FrameHead>(rest).bytes > rest.size() - kFrameBytes) return true;
  return rest.find_first_not_of('\0') == rest.npos;
}

}  // namespace

void AppendFrame(uint64_t store, const Frame& frame, std::string& bytes) {
  FrameHead head{.marker = MarkerOf(store),
                 .checksum = 0,
                 .number = frame.number,
                 .bytes = static_cast<uint32_t>(frame.payload.size()),
                 .index = frame.index,
                 .attempt = frame.attempt,
                 .first = frame.first};
  const size_t at = bytes.size();
  bytes.append(AsBytes(head)).append(frame.payload);
  head.checksum = ChecksumOf(store, std::string_view(bytes).substr(at + kUnsummed));
  std::memcpy(bytes.data() + at, &head, sizeof head);
}

std::optional<Frame> FrameAt(uint64_t store, std::string_view bytes, size_t at) {
  if (at > bytes.size() || bytes.size() - at < kFrameBytes) return std::nullopt;
  bytes.remove_prefix(at);
  const auto head = Read<FrameHead>(bytes);
  if (head.marker != MarkerOf(store) || head.bytes > bytes.size() - kFrameBytes) {
    return std::nullopt;
  }
  bytes = bytes.substr(0, kFrameBytes + head.bytes);
  if (ChecksumOf(store, bytes.substr(kUnsummed)) != head.checksum) return std::nullopt;
  return Frame{.number = head.number,
               .index = head.index,
               .attempt = head.attempt,
               .first = head.first,
               .payload = bytes.substr(kFrameBytes)};
}

std::string SegmentHeader::ToBytes() const {
  HeaderBytes made{.magic = {},
                   .store = store,
                   .next_number = next_number,
                   .bytes_before = bytes_before,
                   .checksum = 0};
  std::memcpy(made.magic, kMagic.data(), kMagic.size());
  made.checksum = ChecksumOf(0, AsBytes(made).substr(0, offsetof(HeaderBytes, checksum)));
  return std::string(AsBytes(made));
}

absl::StatusOr<std::optional<SegmentHeader>> SegmentHeader::In(std::string_view bytes) {
  constexpr size_t kFormat = kMagic.size() - 1;
  if (bytes.size() < kBytes || !bytes.starts_with(kMagic.substr(0, kFormat))) return std::nullopt;
  const auto read = Read<HeaderBytes>(bytes);
  if (ChecksumOf(0, bytes.substr(0, offsetof(HeaderBytes, checksum))) != read.checksum) {
    return std::nullopt;
  }
  if (read.magic[kFormat] != kMagic[kFormat]) {
    return absl::FailedPreconditionError(
        Str("has format ", int{read.magic[kFormat]},
            ", which another version of this program wrote; expected ", int{kMagic[kFormat]},
            ", or another folder"));
  }
  return SegmentHeader{read.store, read.next_number, read.bytes_before};
}

SegmentScan ScanSegment(uint64_t store, std::string_view bytes,
                        const std::function<void(size_t at, const Frame&)>& take) {
  const uint64_t marker = MarkerOf(store);
  SegmentScan scan;
  for (size_t at = scan.end; at < bytes.size();) {
    const std::optional<Frame> frame = FrameAt(store, bytes, at);
    if (!frame) {
      at = std::min(bytes.find(AsBytes(marker), at + 1), bytes.size());
      continue;
    }
    scan.dropped += at - scan.end;
    take(at, *frame);
    at += frame->bytes();
    scan.end = at;
  }
  if (scan.end < bytes.size()) scan.torn = IsTorn(store, bytes.substr(scan.end));
  return scan;
}

}  // namespace treadle
