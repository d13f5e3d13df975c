// Loaded into a program before its libraries (LD_PRELOAD): its wall clock is as many seconds ahead
// as stand, as a double, in the file that TREADLE_CLOCK names. Its other clocks go on as they are.
// Waits of futexes until a time of day, which abseil's and so gRPC's are, end by this clock: at
// once when it jumps ahead of them, and later when it jumps back.
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <ctime>

namespace {

double Ahead() {
  static const volatile double* const ahead = [] {
    const char* const path = std::getenv("TREADLE_CLOCK");
    const int file = path == nullptr ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    void* const mapped =
        file < 0 ? MAP_FAILED : mmap(nullptr, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
    return mapped == MAP_FAILED ? nullptr : static_cast<const volatile double*>(mapped);
  }();
  return ahead == nullptr ? 0 : *ahead;
}

using Syscall = long (*)(long, ...);  // NOLINT: the system's own type

Syscall System() {
  static const auto system = reinterpret_cast<Syscall>(dlsym(RTLD_NEXT, "syscall"));
  return system;
}

bool IsBefore(const timespec& a, const timespec& b) {
  return a.tv_sec < b.tv_sec || (a.tv_sec == b.tv_sec && a.tv_nsec < b.tv_nsec);
}

}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* time) {
  const auto result = static_cast<int>(System()(SYS_clock_gettime, clock, time));
  if (result == 0 && clock == CLOCK_REALTIME) time->tv_sec += static_cast<time_t>(Ahead());
  return result;
}

extern "C" int gettimeofday(timeval* time, void*) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  *time = {.tv_sec = now.tv_sec, .tv_usec = now.tv_nsec / 1000};
  return 0;
}

extern "C" long syscall(long number, ...) {  // NOLINT: the system's own types
  constexpr int kWaitUntil = FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG | FUTEX_CLOCK_REALTIME;
  va_list list;
  va_start(list, number);
  long given[6];                                               // NOLINT
  for (auto& argument : given) argument = va_arg(list, long);  // NOLINT
  va_end(list);
  const auto* const until = reinterpret_cast<const timespec*>(given[3]);
  const bool waits =
      number == SYS_futex && static_cast<int>(given[1]) == kWaitUntil && until != nullptr;
  while (true) {
    timespec now, slice;  // the kernel waits by its own clock, a twentieth of a second at a time
    bool over = true;
    if (waits) {
      clock_gettime(CLOCK_REALTIME, &now);
      System()(SYS_clock_gettime, CLOCK_REALTIME, &slice);
      over = !IsBefore(now, *until);
      if (!over) slice.tv_nsec += 50'000'000;
      slice.tv_sec += slice.tv_nsec / 1'000'000'000;
      slice.tv_nsec %= 1'000'000'000;
      given[3] = reinterpret_cast<long>(&slice);  // NOLINT
    }
    const auto result =
        System()(number, given[0], given[1], given[2], given[3], given[4], given[5]);
    if (over || result == 0 || errno != ETIMEDOUT) return result;
  }
}
