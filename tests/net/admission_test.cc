#include "net/admission.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "net/address.h"
#include "tests/attacks/hostile_client.h"

namespace treadle {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// Whoever enters stays, the oldest makes room; the loop ends once `expected` have come and gone.
class House {
 public:
  House(Admission::Limits limits, bool makes_room)
      : admission_(loop_, *OpenListener(address_),
                   {.limits = limits,
                    .make_room =
                        [this, makes_room](const std::string& host) {
                          asked_.push_back(host);
                          if (makes_room) Leave();
                          return makes_room;
                        },
                    .enter =
                        [this](Newcomer newcomer) {
                          inside_.push_back(std::move(newcomer));
                          Count();
                        },
                    .turned_away =
                        [this] {
                          ++turned_away_;
                          Count();
                        },
                    .sweep_every = std::chrono::hours(1),
                    .sweep = [] {}}) {
    admission_.Open();
  }
  // Until so many have come, and are inside or turned away.
  void Await(int newcomers) {
    left_ = newcomers;
    loop_.After(std::chrono::minutes(1), [this] { loop_.Stop(); });
    loop_.Run();
    EXPECT_EQ(left_, 0);
  }
  void Leave() {
    admission_.Leave(inside_.front().host);
    inside_.erase(inside_.begin());
  }

  Address address_{.host = "127.0.0.1"};
  EventLoop loop_;
  std::vector<Newcomer> inside_;
  std::vector<std::string> asked_;
  int turned_away_ = 0, left_ = 0;
  Admission admission_;

 private:
  void Count() {
    if (--left_ == 0) loop_.Stop();
  }
};

std::vector<std::unique_ptr<HostileClient>> Connect(const House& house, int count) {
  std::vector<std::unique_ptr<HostileClient>> clients;
  for (int i = 0; i < count; ++i) {
    clients.push_back(std::make_unique<HostileClient>(house.address_.port));
  }
  return clients;
}

TEST(Admission, TheFullHouseIsAskedForRoom) {
  for (const Admission::Limits limits : {Admission::Limits{2, 2}, Admission::Limits{9, 2}}) {
    House makes_room(limits, true);
    const auto clients = Connect(makes_room, 5);
    makes_room.Await(5);
    EXPECT_EQ(makes_room.inside_.size(), 2u);
    EXPECT_THAT(makes_room.asked_, ElementsAre("127.0.0.1", "127.0.0.1", "127.0.0.1"));
    EXPECT_EQ(makes_room.turned_away_, 0);

    House stays(limits, false);
    const auto others = Connect(stays, 5);
    stays.Await(5);
    EXPECT_EQ(stays.inside_.size(), 2u);
    EXPECT_EQ(stays.turned_away_, 3);
    EXPECT_TRUE(stays.inside_[0].peer.starts_with("ipv4:127.0.0.1:"));
  }
}

TEST(Admission, WhoFoundNoDescriptorComesInOnceOneIsFree) {
  {
    // A whole life while there are descriptors: UndefinedBehaviorSanitizer opens a pipe for each
    // type that it meets for the first time, and takes the object for damaged where it gets none.
    House first({9, 9}, false);
    const auto client = Connect(first, 1);
    first.Await(1);
  }
  House house({9, 9}, false);
  const auto clients = Connect(house, 2);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);  // the least that is free
  close(next);
  rlimit one_more = before;
  one_more.rlim_cur = static_cast<rlim_t>(next) + 1;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &one_more), 0);
  // The second finds none. Its client stays connected, until the first has left.
  house.loop_.After(std::chrono::milliseconds(20), [&] { house.Leave(); });
  house.Await(2);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(house.inside_.size(), 1u);
  EXPECT_EQ(house.turned_away_, 0);
  EXPECT_THAT(house.asked_, testing::Not(IsEmpty()));
}

TEST(Admission, HasConnectionsForWhatFilesThereAre) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const auto most = static_cast<size_t>(before.rlim_max);
  const Admission::Limits limits = Admission::Affordable({most, most}, 3, 64);
  EXPECT_EQ(limits.connections, (most - 64) / 3);
  EXPECT_EQ(limits.per_address, limits.connections);
  EXPECT_EQ(Admission::Affordable({5, 2}, 3, 64).connections, 5u);
  EXPECT_EQ(Admission::Affordable({most, 1}, most, 64).connections, Admission::kMinConnections);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

}  // namespace
}  // namespace treadle
