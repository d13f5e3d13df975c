#include "tests/emulation/fiber.h"

#include <sys/mman.h>

#include <cstdint>

#include "base/status.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

#if !defined(__x86_64__)
#error "the emulation switches stacks on x86-64 only, as the CPU backend's kernels are"
#endif

// Saves what a function call must preserve on the old stack, and the stack's top in *save. A jump
// instead of a return: the processor predicts that a return goes back to where the call was.
extern "C" void treadle_switch_stack(void** save, void* load);
asm(R"(
.text
.p2align 4
.type treadle_switch_stack, @function
treadle_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rdx
  jmp *%rdx
.size treadle_switch_stack, .-treadle_switch_stack
)");

namespace treadle::simt {
namespace {

constexpr size_t kGuardBytes = 4096;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kStackBytes = 256 << 10;
#else
constexpr size_t kStackBytes = 128 << 10;
#endif

thread_local Fiber* t_from = nullptr;
thread_local Fiber* t_to = nullptr;

}  // namespace

Fiber::Fiber() : body_(nullptr) {
#if defined(__SANITIZE_THREAD__)
  sanitizer_ = __tsan_get_current_fiber();
#endif
}

Fiber::Fiber(void (*body)(), int color) : body_(body) {
  void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TREADLE_CHECK(memory != MAP_FAILED);
  TREADLE_CHECK(mprotect(memory, kGuardBytes, PROT_NONE) == 0);
  memory_ = static_cast<std::byte*>(memory);
  bottom_ = memory_ + kGuardBytes;
  bytes_ = kStackBytes;
  // The words that treadle_switch_stack pops: six registers and where to go. Above it one word, so
  // that Start finds the stack aligned as after a call.
  std::byte* top = memory_ + kGuardBytes + kStackBytes - 64 - 320 * static_cast<size_t>(color % 64);
  auto* frame = reinterpret_cast<uintptr_t*>(top) - 8;
  for (int i = 0; i < 6; ++i) frame[i] = 0;
  frame[6] = reinterpret_cast<uintptr_t>(&Start);
  frame[7] = 0;
  stack_pointer_ = frame;
#if defined(__SANITIZE_THREAD__)
  sanitizer_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
  if (memory_ == nullptr) return;
#if defined(__SANITIZE_ADDRESS__)
  // Frames of a body that never returns still mark it; what is mapped here next is not a stack.
  __asan_unpoison_memory_region(bottom_, bytes_);
#elif defined(__SANITIZE_THREAD__)
  __tsan_destroy_fiber(sanitizer_);
#endif
  munmap(memory_, kGuardBytes + kStackBytes);
}

void Fiber::Switch(Fiber& from, Fiber& to) {
  t_from = &from;
  t_to = &to;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.sanitizer_, to.bottom_, to.bytes_);
#elif defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(to.sanitizer_, 0);
#endif
  treadle_switch_stack(&from.stack_pointer_, to.stack_pointer_);
#if defined(__SANITIZE_ADDRESS__)
  // The thread's own stack learns its bounds when it is left for the first time.
  __sanitizer_finish_switch_fiber(from.sanitizer_, &t_from->bottom_, &t_from->bytes_);
#endif
}

void Fiber::Start() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &t_from->bottom_, &t_from->bytes_);
#endif
  t_to->body_();
}

}  // namespace treadle::simt
