// SIGTERM and SIGINT as something to wait for.
//
// Thread safety: construct before any other thread starts, so that all inherit the mask; Wait from
// one thread; Interrupt from any.
#pragma once

namespace treadle {

class Signals {
 public:
  Signals();  // blocks both signals in this thread and those that it starts; ignores SIGPIPE
  ~Signals();

  // The signal that came, or 0 after Interrupt.
  int Wait();
  void Interrupt();

 private:
  int signal_fd_;
  int event_fd_;
};

}  // namespace treadle
