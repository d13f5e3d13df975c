// Work that waits, in a queue for each owner: who has had the least of a processor is next, and of
// those who had as much, who was served longest ago.
//
// An owner who comes begins with as much as the one who was served last, so that nobody saves up
// turns by waiting; one who leaves is remembered for as long as he has had more than that.
// Start-time fair queueing (Goyal, Vin, Cheng 1996) with the cost of an entry known when it has
// run.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>

namespace treadle {

class FairQueue {
 public:
  struct Entry {
    std::string owner;
    size_t bytes = 0;
    std::function<void()> work;
  };

  void Push(Entry entry);
  // Takes the first entry of at most `most_bytes` of the owner who is next among those who have
  // one. Charge must follow.
  std::optional<Entry> Pop(size_t most_bytes);
  // Charges an owner for an entry that was taken, in seconds of a processor.
  void Charge(const std::string& owner, double seconds);

 private:
  struct Owner {
    std::deque<Entry> entries;
    int running = 0;      // entries that were taken and are not charged
    double had = 0;       // seconds
    uint64_t served = 0;  // number of the Pop
  };

  void Forget();

  std::map<std::string, Owner> owners_;
  double level_ = 0;  // what the owner who was served last had had then
  uint64_t pops_ = 0;
};

}  // namespace treadle
