// How long the machine keeps this process waiting for a processor, seen from a thread that wakes at
// set times. On a busy machine others are as late as this process: silence that a delay explains is
// no sign of a lost peer.
//
// Thread safety: thread-compatible.
#pragma once

#include <algorithm>
#include <chrono>

namespace treadle {

class HostDelay {
 public:
  using Clock = std::chrono::steady_clock;
  // A heartbeat passes four threads, each of which may wait as long: the peer's pulse and writer,
  // this process's reader, and the thread that looks.
  static constexpr int kWaits = 4;

  // The thread woke at `now` and will wake at `next`. Gives how late it was.
  Clock::duration Wake(Clock::time_point now, Clock::time_point next) {
    const Clock::duration late =
        due_ == Clock::time_point{} ? Clock::duration{} : std::max(now - due_, Clock::duration{});
    worst_ = std::max(late, worst_ * 7 / 8);  // half of it is forgotten after five wakes
    due_ = next;
    return late;
  }
  // The time that a peer may be silent for beyond its limit.
  Clock::duration slack() const { return kWaits * worst_; }

 private:
  Clock::time_point due_{};
  Clock::duration worst_{};
};

}  // namespace treadle
