// Standard input and output of `treadle top`: a screen that is redrawn in place if both sides are a
// terminal's, else plain lines; and what ends it.
//
// From the first Draw on it has the alternate screen, hides the cursor and reads keys as they come;
// the destructor, a stop (Ctrl-Z) and every signal that can be caught give all of it back.
// Thread safety: none. Construct before any other thread starts (gRPC starts some with the first
// object of its own), so that all inherit the mask.
#pragma once

#include <signal.h>
#include <termios.h>

#include <optional>
#include <string>
#include <vector>

namespace treadle {

class TopTerminal {
 public:
  // `screen`: to be redrawn if stdout is a terminal; false: lines in any case.
  explicit TopTerminal(bool screen);
  ~TopTerminal();
  TopTerminal(const TopTerminal&) = delete;
  TopTerminal& operator=(const TopTerminal&) = delete;

  bool has_screen() const { return screen_; }

  struct Size {
    int width = 80;
    int height = 24;
  };
  static Size size();  // of stdout's terminal, else as above

  // Requires has_screen().
  void Draw(const std::vector<std::string>& lines);
  // A line, at once.
  static void Print(const std::string& line);

  enum class Event { kNews, kRedraw, kQuit };
  // Waits until `news` is readable, the screen must be drawn again, or somebody wants to quit: q,
  // SIGINT, SIGTERM, SIGHUP, or a terminal that went away.
  Event Wait(int news);

 private:
  void Enter();
  void Leave();
  std::optional<Event> TakeSignal();
  std::optional<Event> TakeKey();

  const bool screen_;
  const bool keys_;  // stdin is a terminal, too
  sigset_t old_mask_;
  termios old_settings_{};
  bool entered_ = false;
  int signal_fd_ = -1;
};

}  // namespace treadle
