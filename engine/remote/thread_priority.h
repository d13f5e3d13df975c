// Messages before arithmetic: who gets a core first when both want it.
//
// A plan that waits behind a forward pass holds up the next stage for milliseconds, while passing
// it on takes microseconds. So threads that pass messages on ask the kernel for short time slices
// (Linux 6.12 and later let such a thread interrupt one with a longer slice; older kernels ignore
// it), and compute threads are nice to everybody. Threads started later inherit either from the
// thread that starts them.
//
// A refusal by the system only costs latency. Thread safety: each call concerns its own thread.
#pragma once

namespace treadle {

void MakeMessageThread();
void MakeComputeThread();

}  // namespace treadle
