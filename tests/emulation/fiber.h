// Stacks that can be left and come back to: what a GPU thread of the emulation runs on.
//
// A fiber is made once and runs its function again whenever it is switched to after the function
// returned control by its last switch; it never ends by itself. Switching costs some nanoseconds
// (no system call). Thread safety: a fiber belongs to the OS thread that made it.
#pragma once

#include <cstddef>

namespace treadle::simt {

class Fiber {
 public:
  // The calling thread's own stack.
  Fiber();
  // `body` must never return. color: neighbours' stack tops are shifted by it, so that they do not
  // all fall on the same cache sets.
  Fiber(void (*body)(), int color);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Leaves `from`, which must be what runs now, and goes on where `to` was left.
  static void Switch(Fiber& from, Fiber& to);

 private:
  static void Start();

  void* stack_pointer_ = nullptr;
  void (*const body_)();
  std::byte* memory_ = nullptr;  // a guard page, then the stack
  // For sanitizers: the stack's bounds, and their own record of it.
  const void* bottom_ = nullptr;
  size_t bytes_ = 0;
  void* sanitizer_ = nullptr;
};

}  // namespace treadle::simt
