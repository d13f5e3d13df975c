// Where the frames of a stored request are.
//
// Thread safety: plain data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/durable/stored_frame.h"

namespace treadle {

struct FramePlace {
  uint64_t segment : 28 = 0;  // 0: the frame is missing
  uint64_t at : 36 = 0;       // byte
  bool operator==(const FramePlace&) const = default;
};

struct RequestRecord {
  struct Attempt {
    uint32_t number = 0;
    uint32_t first = 0;  // index of the frame with which it began
  };

  std::string id, owner;
  std::vector<FramePlace> frames;        // by index
  std::vector<Attempt> attempts = {{}};  // by number, and so by first
  int64_t bytes = 0;                     // of the frames, at most
  // Whether its session knows all that is stored.
  bool appendable = false;

  // Notes a frame that was found, in any order. False: it is a copy of one that is known, or a
  // later attempt has replaced it.
  bool Take(const Frame& frame, FramePlace place);
  uint32_t AttemptOf(uint32_t index) const;
  // Drops the frames from `index` on, which is no less than kFirstPiece. The next frame is a new
  // attempt.
  void Cut(uint32_t index, uint32_t least_attempt);
};

}  // namespace treadle
