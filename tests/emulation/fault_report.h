// Says which emulated GPU thread touched memory that is not there, before the process ends.
#pragma once

namespace treadle::simt {

// Installs a handler of SIGSEGV and SIGBUS once, and its stack on the calling thread. Does nothing
// under AddressSanitizer, which reports by itself.
void CatchFaults();

}  // namespace treadle::simt
