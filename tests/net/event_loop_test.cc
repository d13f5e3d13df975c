#include "net/event_loop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <memory>
#include <thread>
#include <vector>

namespace treadle {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;

// A descriptor that can be read from the beginning.
class Readable {
 public:
  Readable() : fd_(eventfd(1, EFD_CLOEXEC)) {}
  ~Readable() { close(fd_); }
  int fd() const { return fd_; }

 private:
  const int fd_;
};

TEST(EventLoop, WhatIsPostedRunsInOrderAndNotFromWithin) {
  EventLoop loop;
  std::vector<int> ran;
  loop.Post([&] {
    loop.Post([&] { ran.push_back(3); });
    ran.push_back(1);
  });
  loop.Post([&] {
    ran.push_back(2);
    loop.Stop();
  });
  loop.Run();
  EXPECT_THAT(ran, ElementsAre(1, 2, 3));
}

TEST(EventLoop, AnotherThreadWakesIt) {
  EventLoop loop;
  std::thread other([&] {
    for (int i = 0; i < 1000; ++i) loop.Post([] {});
    loop.Post([&] { loop.Stop(); });
  });
  loop.Run();
  other.join();
}

TEST(EventLoop, TimesComeInTheirOrder) {
  EventLoop loop;
  std::vector<int> ran;
  loop.After(milliseconds(20), [&] {
    ran.push_back(2);
    loop.After(std::chrono::hours(1), [&] { ran.push_back(3); });  // forgotten
    loop.Stop();
  });
  loop.After(milliseconds(1), [&] { ran.push_back(1); });
  loop.Run();
  EXPECT_THAT(ran, ElementsAre(1, 2));
}

// Both are ready in the same turn; the first task destroys both watches.
TEST(EventLoop, ATaskMayDestroyWatchesAlsoItsOwn) {
  EventLoop loop;
  const Readable one, two;
  std::unique_ptr<EventLoop::Watch> watches[2];
  int ran = 0;
  const auto ready = [&] {
    ++ran;
    for (auto& watch : watches) watch.reset();
    loop.Post([&] { loop.Stop(); });
  };
  watches[0] = std::make_unique<EventLoop::Watch>(loop, one.fd(), ready);
  watches[1] = std::make_unique<EventLoop::Watch>(loop, two.fd(), ready);
  for (auto& watch : watches) watch->For(EPOLLIN);
  loop.Run();
  EXPECT_EQ(ran, 1);
}

TEST(EventLoop, AWatchForNothingIsNotServed) {
  EventLoop loop;
  const Readable one;
  int ran = 0;
  EventLoop::Watch watch(loop, one.fd(), [&] {
    ++ran;
    watch.For(0);
  });
  watch.For(EPOLLIN);
  loop.After(milliseconds(20), [&] { loop.Stop(); });
  loop.Run();
  EXPECT_EQ(ran, 1);
}

}  // namespace
}  // namespace treadle
